"""Jobs for the processes of the competitors of benchmarks/peers.py, and the files that they read.

Each run is a process: benchmarks/peers_torch.py in this environment, or benchmarks/peers_jax.py in
the environment of kfac-jax. A process gets arrays as npz files and the rest as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers_results import Run, library_of
from benchmarks.peers_torch import linear_layers
from kfac_bench.benchmark import local_runs
from kfac_bench.config import compose
from kfac_bench.data.base.order import Shard, train_indices
from kfac_bench.errors import UsageError

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "peers_requirements.txt"
TOLERANCE = 1e-5
"""Largest relative difference between the losses of the torch model and the jax model."""


class Desk:
    """Gives jobs to the processes of the competitors, and keeps the files that they read.

    Args:
        folder: A folder for the files.
        environment: The environment of kfac-jax.
        experiment: The experiment of the data, the model, the target and the last step.
        limit_s: CPU seconds after which a run ends.
        max_steps: Updates of a run at most; None: those of the experiment.
    """

    def __init__(
        self,
        folder: Path,
        environment: Path,
        experiment: str,
        limit_s: float,
        max_steps: int | None = None,
    ) -> None:
        self._folder, self._experiment, self._limit_s = folder, experiment, limit_s
        self._config = compose.load([f"experiment={experiment}"])
        trainer = self._config.trainer
        assert trainer.max_steps is not None, "the experiment limits its steps"
        self._max_steps = max_steps or trainer.max_steps
        self._data = self._config.data.build(self._config.task.name)
        self._pythons = {"jax": environment / "bin" / "python"}
        self.is_short = self._max_steps < trainer.max_steps
        """True if runs end before the experiment's last step."""

    @property
    def work(self) -> dict[str, Any]:
        """The options that all runs share."""
        trainer = self._config.trainer
        return {
            "experiment": self._experiment,
            "train_images": self._data.train_size,
            "eval_images": self._data.eval_size,
            "batch_size": trainer.batch_size,
            "target": trainer.target,
            "max_steps": self._max_steps,
            "limit_s": self._limit_s,
            "eval_freq": trainer.eval_freq,
        }

    def python(self, library: str) -> Path:
        """Return the interpreter of the processes that use a library."""
        return self._pythons.get(library, Path(sys.executable))

    def run(self, job: Mapping[str, Any]) -> Run:
        """Run a job in a process of its own and return its result.

        Raises:
            UsageError: The process was killed.
        """
        files = {"images": str(self._images()), "start": str(self._start(job["seed"]))}
        job_path, result_path = self._folder / "job.json", self._folder / "result.json"
        job_path.write_text(json.dumps(self.work | files | dict(job)))
        result_path.unlink(missing_ok=True)
        library = library_of(job["runs"])
        script = HERE / f"peers_{library}.py"
        command = [self.python(library), script, job_path, result_path]
        code, line = local_runs.run_command([*map(str, command)])
        if code < 0:
            raise UsageError(f"{job.get('competitor', library)}: the process was killed. {line}")
        if code > 0:
            return {"end": "failed", "why": line}
        result: Run = json.loads(result_path.read_text())
        return result

    def _images(self) -> Path:
        """Return the file of the images, as the model takes them."""
        path = self._folder / "images.npz"
        if not path.exists():
            every = torch.arange(self._data.train_size)
            training = self._data.training_batches(iter([every]), (0, 0))
            evaluation = self._data.evaluate(self._data.eval_size, Shard())
            parts = (self._data.prepare(next(iter(part)))[0] for part in (training, evaluation))
            train, held_back = (part.flatten(1).numpy() for part in parts)
            np.savez(path, train=train, evaluation=held_back)
        return path

    def _start(self, seed: int) -> Path:
        """Return the file of a seed's initial weights and order of the images."""
        path = self._folder / f"seed_{seed}.npz"
        if not path.exists():
            torch.manual_seed(seed)
            data, config = self._data, self._config
            model = config.model.build(data.shape, data.num_classes, config.task.name)
            arrays = {"order": self._order(seed)}
            for i, layer in enumerate(linear_layers(model)):
                arrays[f"weight_{i}"] = layer.weight.detach().numpy()
                arrays[f"bias_{i}"] = layer.bias.detach().numpy()
            np.savez(path, **arrays)  # type: ignore[arg-type]
        return path

    def _order(self, seed: int) -> NDArray[np.int32]:
        """Return the indices of the images of each step, as kfac-train would take them."""
        size, batch_size = self._data.train_size, self._config.trainer.batch_size
        batches = (
            indices
            for epoch in count()
            for indices in train_indices(size, batch_size, seed, epoch, 0, Shard())
        )
        return torch.stack([*islice(batches, self._max_steps)]).numpy().astype(np.int32)


def find_reasons(desk: Desk, libraries: Sequence[str], seed: int) -> dict[str, str]:
    """Return by library why its competitors cannot run; an empty text if they can.

    The models of the libraries that can run are compared first.

    Raises:
        UsageError: The losses of two models differ.
    """
    reasons: dict[str, str] = {}
    losses: dict[str, list[float]] = {}
    for library in libraries:
        reason, found = _first_losses(desk, library, seed)
        how = f". {how_to_install()}" if reason and library == "jax" else ""
        reasons[library] = reason + how
        if not reason:
            losses[library] = found
    check_agreement(losses)
    return reasons


def _first_losses(desk: Desk, library: str, seed: int) -> tuple[str, list[float]]:
    """Return why a library cannot be used, and the losses if it can."""
    if not desk.python(library).exists():
        return f"{desk.python(library)} is missing", []
    result = desk.run({"kind": "check", "seed": seed, "runs": library})
    if "why" in result:
        return result["why"], []
    return _wrong_versions(result["versions"]), result["losses"]


def check_agreement(losses: Mapping[str, Sequence[float]]) -> None:
    """Compare the losses of all libraries, before and after one step of SGD.

    Raises:
        UsageError: They differ.
    """
    for library, found in losses.items():
        other, wanted = next(iter(losses.items()))
        pairs = zip(found, wanted, strict=True)
        if not all(math.isclose(x, y, rel_tol=TOLERANCE) for x, y in pairs):
            raise UsageError(
                "the models differ: the losses before and after one step of SGD are "
                f"{list(found)} with {library} and {list(wanted)} with {other}"
            )


def _wrong_versions(versions: Mapping[str, str]) -> str:
    """Return the packages whose versions differ from those of the requirements, as a text."""
    lines = REQUIREMENTS.read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    return ", ".join(
        f"{name} is {version}, not {pins[name]}"
        for name, version in versions.items()
        if version != pins.get(name, version)
    )


def how_to_install() -> str:
    """Return the commands that make the environment of kfac-jax."""
    command = REQUIREMENTS.read_text().splitlines()[1].removeprefix("#").strip()
    return f"Make the environment: {command}"
