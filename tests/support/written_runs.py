"""Runs for tests of tables and pages: event files as a run would have written them, in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kfac_bench.record.event_log import EventLog, JsonlSink
from kfac_bench.record.events import Evaluated, RunEnded, RunStarted, TargetReached, Trained

EVIL = "<script>alert('x')</script> $\\frac{1}{0}$ |]] --> [red]\x1b[31m\ud800 & _"


def write_run(
    folder: Path,
    *,
    optimizer: str = "sgd",
    kfac: bool = False,
    seed: int = 0,
    seconds: float | None = 2.0,
    target: float | None = 0.9,
    losses: tuple[float, ...] = (2.0, 1.0, 0.5),
    errors: tuple[float, ...] = (),
    shares: tuple[float, ...] = (),
    text: str = "digits",
    environment: dict[str, Any] | None = None,
    clock: str = "wall",
) -> Path:
    """A run of 30 steps; it reaches its target at step 30 after ``seconds``, if given.

    Its metric is an accuracy of 0.31, 0.62, 0.93, or what ``shares`` says, or what ``errors`` says
    (less is better).
    """
    folder.mkdir(parents=True)
    log = EventLog([JsonlSink(folder / "events.jsonl")])
    config = {
        "data": {"name": text},
        "model": {"name": "resnet8"},
        "optimizer": {"name": optimizer, "lr": 0.1},
        "kfac": {"enabled": kfac, "damping": 0.003},
        "trainer": {"target": target, "clock": clock},
        "seed": seed,
    }
    started = RunStarted(
        0, 0.0, text, "accuracy", not errors, config, environment or {"torch": "2.11"}
    )
    log.emit(started)
    last_s = 4.0 if seconds is None else seconds
    values = errors or shares
    for i, loss in enumerate(losses, start=1):
        log.emit(Trained(10 * i, last_s * i / 3, 0.1 * i, loss, 0.1, 100.0))
        log.emit(
            Evaluated(
                10 * i, last_s * i / 3, 0.1 * i, {"accuracy": values[i - 1] if values else 0.31 * i}
            )
        )
    if seconds is not None:
        log.emit(TargetReached(30, seconds, "accuracy", 0.93, 0.9))
    log.emit(RunEnded(30, last_s, "finished" if seconds is None else "reached"))
    log.close()
    return folder


def two_optimizers(folder: Path) -> Path:
    """SGD and K-FAC with three seeds each; one seed of SGD misses the target."""
    for seed in range(3):
        missed = None if seed == 2 else 2.0 + seed
        write_run(folder / f"sgd{seed}", seed=seed, seconds=missed)
        write_run(folder / f"kfac{seed}", kfac=True, seed=seed, seconds=1.0)
    return folder
