"""The training loop of all competitors of benchmarks/peers.py, and the files that it reads.

benchmarks/peers_torch.py and benchmarks/peers_jax.py call it, each in its own environment. So this
file imports numpy and the standard library only. It does not choose settings; peers.py does.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Job = Mapping[str, Any]
"""The instructions for a worker, from a JSON file that peers.py writes."""
WARM_UP_STEPS = 21
"""Steps before the clock runs. They reach each kind of step of a period of 20, so that all of them
are compiled."""
CHECK_RATE = 0.01
"""The learning rate of the one step of SGD that compares the models of both libraries."""


@dataclass(frozen=True)
class Work:
    """The images, the initial weights and the order of batches: the same for all competitors."""

    train: NDArray[np.float32]
    """Training images [n, pixels]."""
    evaluation: NDArray[np.float32]
    """Evaluation images [m, pixels]."""
    order: NDArray[np.int32]
    """Indices of the training images of each step [steps, batch]."""
    layers: list[tuple[NDArray[np.float32], NDArray[np.float32]]]
    """The initial weight [outputs, inputs] and bias [outputs] of each linear layer."""

    def batch(self, step: int) -> NDArray[np.float32]:
        """Return the images of a step, which counts from 0."""
        images: NDArray[np.float32] = self.train[self.order[step]]
        return images


class Learner(Protocol):
    """A model with an optimizer."""

    def restart(self) -> None:
        """Set the initial weights and a new state of the optimizer."""

    def place(self, images: NDArray[np.float32]) -> Any:
        """Return the images as an array of the library."""

    def step(self, batch: Any) -> None:
        """Update the weights, and wait until this is done."""

    def error(self, batch: Any) -> float:
        """Return the squared error, summed over the pixels, mean over the images."""


def read_work(images: Path, start: Path) -> Work:
    """Read the images, and the order and weights of a seed."""
    with np.load(images, allow_pickle=False) as file:
        train, evaluation = file["train"], file["evaluation"]
    with np.load(start, allow_pickle=False) as file:
        count = sum(name.startswith("weight_") for name in file.files)
        layers = [(file[f"weight_{i}"], file[f"bias_{i}"]) for i in range(count)]
        return Work(train, evaluation, file["order"], layers)


def train(learner: Learner, work: Work, job: Job) -> dict[str, Any]:
    """Train until the target, the limit of seconds or the last step; return the result."""
    warm_steps = min(WARM_UP_STEPS, job["max_steps"])
    warm_up_s = _warm_up(learner, work, warm_steps)
    learner.restart()
    evaluation = learner.place(work.evaluation)
    curve: list[list[float | None]] = []
    cpu_s = wall_s = 0.0
    end = ""
    step = 0
    while not end:
        batch = learner.place(work.batch(step))
        wall, cpu = time.perf_counter(), time.process_time()
        learner.step(batch)
        cpu_s += time.process_time() - cpu
        wall_s += time.perf_counter() - wall
        step += 1
        # The clock stands still while the error is computed.
        is_last = step == job["max_steps"] or cpu_s >= job["limit_s"]
        if is_last or step % job["eval_freq"] == 0:
            error = learner.error(evaluation)
            is_finite = math.isfinite(error)
            curve.append([step, cpu_s, error if is_finite else None])
            end = _reason(error, is_last, job)
    errors = [x for _, _, x in curve if x is not None]
    return {
        "end": end,
        "steps": step,
        "seconds": cpu_s,
        "best_error": min(errors, default=None),
        "cpu_share": cpu_s / wall_s,
        # What the first steps cost more than others: compilation, libraries, first allocations.
        "start_s": max(0.0, warm_up_s - warm_steps * cpu_s / step),
        "curve": curve,
    }


def _warm_up(learner: Learner, work: Work, steps: int) -> float:
    """Train some steps that do not count; return their CPU seconds."""
    batches = [learner.place(work.batch(step)) for step in range(steps)]
    start = time.process_time()
    learner.restart()
    for batch in batches:
        learner.step(batch)
    return time.process_time() - start


def _reason(error: float, is_last: bool, job: Job) -> str:
    """Return why the run ends after an evaluation, or an empty text."""
    if not math.isfinite(error):
        return "diverged"
    if error <= job["target"]:
        return "target"
    return "limit" if is_last else ""


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {package: metadata.version(package) for package in packages}


def serve(
    arguments: Sequence[str],
    learner: Callable[[Job, Work], Learner],
    losses: Callable[[Work], list[float]],
    packages: Sequence[str],
) -> None:
    """Do the job of the first file and write the result to the second file.

    Args:
        arguments: Paths of both JSON files.
        learner: Makes the learner of a job.
        losses: Returns the loss of the first batch before and after one step of SGD.
        packages: Packages whose versions belong to the result.
    """
    job_path, result_path = map(Path, arguments)
    job = json.loads(job_path.read_text())
    work = read_work(Path(job["images"]), Path(job["start"]))
    if job["kind"] == "check":
        result: dict[str, Any] = {"losses": losses(work)}
    else:
        result = train(learner(job, work), work, job)
    result["versions"] = versions(packages)
    result_path.write_text(json.dumps(result))
