"""A rank of `kfac-train` that meets a fault: one function is replaced before the rank starts.

Usage: `python -m tests.reliability.faults.inject '{"kind": "kill", ...}' OPTION=VALUE...`
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfac_bench.core.execution.batch_statistics import BatchStatistics
from kfac_bench.core.planning.layer_spec import FACTORS
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.tasks.image_tasks import Reconstruction
from kfac_bench.training.checkpoint import MANIFEST
from kfac_bench.training.trainer import Trainer
from kfac_bench.training.update import Update
from tests.reliability.faults import kills, shortages
from tests.reliability.faults.hooks import at, each_step, happens, marks, once, update

STEP_S = 0.03
"""Least duration of a step."""


WRITES_STEPS, WRITES_S = 2, 20.0
"""A checkpoint is on disk at most this many steps after its start, as in runs with slow steps."""


def _raise(step: int) -> None:
    def action(_: Trainer, now: int) -> None:
        if now == step:
            happens()
            raise RuntimeError("an error of the program")

    each_step(action)


def _nan_loss(step: int) -> None:
    original = Reconstruction.forward

    def forward(self: Reconstruction, *arguments: Any) -> tuple[Tensor, Tensor]:
        loss, output = original(self, *arguments)
        if update["step"] == step:
            happens()
            loss = loss * math.nan
        return loss, output

    Reconstruction.forward = forward  # type: ignore[method-assign, assignment]


def _nan_gradient(step: int) -> None:
    original = Update.backward

    def backward(self: Update, *arguments: Any) -> Tensor:
        loss = original(self, *arguments)
        if update["step"] == step:
            happens()
            self._optimizer.param_groups[0]["params"][0].grad.view(-1)[0] = math.nan
        return loss

    Update.backward = backward  # type: ignore[method-assign, assignment]


def _nan_statistic(step: int) -> None:
    """Put a NaN into the statistics of one batch for one factor."""
    original = BatchStatistics._only_finite
    done: list[int] = []

    def only_finite(
        self: BatchStatistics, moment: Tensor, samples: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        if update["step"] >= step and not done:
            done.append(step)
            happens()
            moment.view(-1)[0] = math.nan
        return original(self, moment, samples)

    BatchStatistics._only_finite = only_finite  # type: ignore[method-assign]


def _nan_factor(step: int) -> None:
    """Put a NaN into one running factor that this rank decomposes, as broken memory would."""

    def action(trainer: Trainer, now: int) -> None:
        if now == step and trainer.kfac is not None:
            happens()
            run = trainer.kfac._executor
            own = next(
                (p.layer.name, f)
                for p in run.plan.placements
                for f in FACTORS
                if p.worker(f) == run.collective.rank
            )
            run.store.factors[own].matrix.view(-1)[0] = math.nan

    each_step(action)


def _no_eigh(step: int) -> None:
    """Let LAPACK give up on one decomposition, in float64 too."""
    original, calls = torch.linalg.eigh, [0]

    def eigh(*arguments: Any) -> Any:
        # The first four calls are for the batch and then its first matrix, each in two precisions.
        if update["step"] >= step and calls[0] < 4:
            calls[0] += 1
            happens()
            raise torch.linalg.LinAlgError("eigh: did not converge")  # type: ignore[attr-defined]
        return original(*arguments)

    torch.linalg.eigh = eigh


def _remove_record(step: int) -> None:
    at(step, lambda trainer: (trainer.directory / EVENTS_FILE).unlink())


def _hold_interpreter(step: int) -> None:
    """Hang in C code that does not release Python's interpreter."""
    at(step, lambda _: ctypes.PyDLL(None).sleep(600))


INJECT: dict[str, Callable[[int], None]] = {
    "kill": kills.send(signal.SIGKILL),
    "kill worker": lambda step: each_step(
        lambda _, now: kills.kill_worker() if now == step else None
    ),
    "kill worker in evaluation": lambda step: once("evaluation", step, kills.kill_worker),
    "kill with wandb": kills.kill_with_wandb,
    "kill in commit": kills.send(signal.SIGKILL, here="commit"),
    "kill before event": kills.kill_before_event,
    "no memory": shortages.no_memory,
    "no threads": shortages.no_threads,
    "no inodes": shortages.no_inodes,
    "no shared memory": shortages.no_shared_memory,
    "few files": shortages.few_files,
    "remove record": _remove_record,
    "hold": _hold_interpreter,
    "term": kills.send(signal.SIGTERM),
    "hup": kills.send(signal.SIGHUP),
    "quit": kills.send(signal.SIGQUIT),
    "usr2": kills.send(signal.SIGUSR2),
    "slow term": kills.slow_term,
    "hup to all": kills.send(signal.SIGHUP, group=True),
    "quit to all": kills.send(signal.SIGQUIT, group=True),
    "usr2 to all": kills.send(signal.SIGUSR2, group=True),
    "term to all": kills.send(signal.SIGTERM, group=True),
    "term in evaluation": kills.send(signal.SIGTERM, here="evaluation"),
    "term in decomposition": kills.send(signal.SIGTERM, here="decomposition"),
    "term in checkpoint": kills.send(signal.SIGTERM, here="checkpoint"),
    "stop": kills.send(signal.SIGSTOP),
    "raise": _raise,
    "nan loss": _nan_loss,
    "nan gradient": _nan_gradient,
    "nan statistic": _nan_statistic,
    "nan factor": _nan_factor,
    "no eigh": _no_eigh,
    "kill wandb": kills.kill_wandb,
    "fill disk": shortages.fill_disk(0),
    "fill disk but for little": shortages.fill_disk(shortages.LITTLE_BYTES),
    "quota": shortages.fill_disk(shortages.LITTLE_BYTES, is_visible=False),
}
"""The faults. Each function takes the number of the update at which the fault happens."""


def _slow_down(trainer: Trainer, now: int) -> None:
    """Let steps take as long as in a real run, where a checkpoint is soon on disk."""
    time.sleep(STEP_S)
    every = trainer.config.checkpoint_freq or now
    due = (now - 1) // every * every
    manifest = trainer.directory / "checkpoints" / f"step-{due:08d}" / MANIFEST
    deadline = time.monotonic() + WRITES_S
    saving = trainer._saving
    while due and now - due > WRITES_STEPS and not manifest.exists() and not saving.has_failed:
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def main(injected: dict[str, Any], options: list[str], is_slow: bool = True) -> None:
    """Run `kfac-train` in this process, with the fault if it is meant for this rank.

    Args:
        injected: `{"kind": ..., "rank": ..., "step": ..., "mark": FILE}`. With `"once": true` the
            fault does not happen again in ranks that a launcher restarts.
        options: The options of `kfac-train`.
        is_slow: Whether each step takes at least STEP_S.
    """
    if injected and int(os.environ.get("RANK", "0")) == injected["rank"]:
        marks.append(Path(injected["mark"]))
        if not (injected.get("once") and marks[0].exists()):
            INJECT[injected["kind"]](injected["step"])
    # The last one installed is called first: wait before the fault happens.
    if is_slow:
        each_step(_slow_down)
    sys.argv = ["kfac-train", *options]
    runpy.run_module("kfac_bench", run_name="__main__")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
