"""The places where faults begin: before an update of the run, or in a function of the product.

Only a rank that meets a fault calls these functions. They replace functions of the product.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfac_bench.core.kernels import linalg
from kfac_bench.tasks.image_tasks import Reconstruction
from kfac_bench.training.checkpoint import writing
from kfac_bench.training.trainer import Trainer

MEET_S = 0.3
"""Time for other processes to receive a signal, and for their parent to notice their end."""

HAPPENED = "happened"
"""Name of a file that marks that the fault happened. A case without its fault proves nothing."""

update = {"step": 0}
"""The number of the present update."""

marks: list[Path] = []
"""The file that marks that the fault of this rank happened; empty if the rank meets no fault."""


def happens() -> None:
    """Mark that the fault happens now."""
    for path in marks:
        path.touch()


def each_step(action: Callable[[Trainer, int], None]) -> None:
    """Call `action` with the number of the update before each update."""
    original = Trainer._train_step

    def step(self: Trainer, batch: Any) -> None:
        update["step"] = self.step + 1
        action(self, self.step + 1)
        original(self, batch)

    Trainer._train_step = step  # type: ignore[method-assign]


def at(step: int, action: Callable[[Trainer], None]) -> None:
    """Call `action` before this update."""

    def act(trainer: Trainer, now: int) -> None:
        if now == step:
            happens()
            action(trainer)

    each_step(act)


PLACES: dict[str, tuple[Any, str]] = {
    "evaluation": (Reconstruction, "totals"),
    "decomposition": (linalg, "eigendecompose"),
    "checkpoint": (writing, "_write_synced"),
    "commit": (writing, "sync_folder"),
}
"""Functions in which a fault can happen, by name."""


def once(place: str, step: int, action: Callable[[], None]) -> None:
    """Call `action` once, when the function of `place` runs in update `step` or later."""
    owner, name = PLACES[place]
    original = getattr(owner, name)
    done: list[int] = []

    def function(*arguments: Any, **keywords: Any) -> Any:
        if update["step"] >= step and not done:
            done.append(step)
            action()
        return original(*arguments, **keywords)

    setattr(owner, name, function)
