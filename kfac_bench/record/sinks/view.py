"""The common parts of all loggers: the run that they show, names of metrics, and file views.

The names of metrics do not change between versions, because dashboards are built on them.

==============================  =============  ===============================================
name                            event          meaning
==============================  =============  ===============================================
``step``                        every row      axis: updates done so far
``train_s``                     every row      axis: seconds of the training clock
``epoch``                       some rows      axis: epochs done (Trained, Evaluated)
``train/loss``                  Trained        mean loss of the global batch
``train/lr``                    Trained        learning rate
``train/examples_per_s``        Trained        throughput since the previous Trained
``train/step_mean_s``           Trained        mean seconds of a step since the last row
``train/besides_kfac_s``        Trained        the part of it without K-FAC's stages
``train/epoch``                 Trained        epochs done
``train/data_wait_share``       Trained        time spent waiting for batches, of training time
``kfac/nu``                     Trained        factor of the limits of the step (1: none)
``kfac/damping``                Trained        damping of the next step
``kfac/failed_decompositions``  Trained        decompositions that failed, on all ranks
``kfac/dropped_statistics``     Trained        statistics left out: not finite, on all ranks
``kfac/cosine/<layer>``         Trained        cosine of gradient and preconditioned gradient
``kfac/cosine_min``             Trained        smallest cosine of all layers
``kfac/cosine_median``          Trained        median cosine of all layers
``kfac/condition/<layer>``      Trained        condition number of the damped curvature
``kfac/condition_max``          Trained        largest condition number of all layers
``kfac/stage_s/<stage>``        Trained        seconds of one K-FAC stage of the step
``kfac/stage_mean_s/<stage>``   Trained        mean seconds of the steps since the last row
``memory/peak_bytes``           Trained        largest memory of a rank so far
``eval/<metric>``               Evaluated      validation metric, exact
``eval/left_out``               Evaluated      examples that could not be read, if there are any
``data/skipped_files``          SampleSkipped  files so far that could not be read
``target/time_to_target_s``     TargetReached  training seconds until the target was met
``target/steps_to_target``      TargetReached  steps until the target was met
``target/value``                TargetReached  the metric when the target was met
``checkpoint/write_s``          Checkpointed   seconds the training waited for the checkpoint
==============================  =============  ===============================================
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfac_bench.config import LoggerConfig
from kfac_bench.record.events import (
    Checkpointed,
    Evaluated,
    Event,
    SampleSkipped,
    TargetReached,
    Trained,
)


def _say_nothing(line: str) -> None: ...


@dataclass(frozen=True)
class ShownRun:
    """A run as a logger needs to know it.

    ``config`` has all options and the environment. ``metric`` is the main validation metric.
    ``say`` prints a line.
    """

    directory: Path
    run_id: str = ""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    config: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "loss"
    higher_is_better: bool = False
    say: Callable[[str], None] = _say_nothing


class FileView:
    """A view in files of the run directory.

    A failure, such as a full disk, is printed once; it ends the view but not the training.
    """

    name: str

    def __init__(self, run: ShownRun) -> None:
        self._run = run
        self._is_broken = False

    def write(self, event: Event) -> None:
        """Show the event."""
        self._guard(lambda: self._write(event))

    def close(self) -> None:
        """Close the files."""
        self._guard(self._close)

    def _write(self, event: Event) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _guard(self, action: Callable[[], None]) -> None:
        if self._is_broken:
            return
        try:
            action()
        except Exception as error:
            self._is_broken = True
            self._run.say(f"{self.name} failed ({error}): training goes on without it")


AXES = ("step", "epoch", "train_s")


def metrics_of(event: Event) -> dict[str, float]:
    """Return the event as a row of named numbers; empty if it measures nothing."""
    match event:
        case Trained():
            row = {"epoch": event.epoch, **_trained(event)}
        case Evaluated():
            row = {"epoch": event.epoch}
            row |= {f"eval/{name}": value for name, value in event.metrics.items()}
            if event.left_out:
                row["eval/left_out"] = event.left_out
        case SampleSkipped():
            row = {"data/skipped_files": event.count}
        case TargetReached():
            row = {
                "target/time_to_target_s": event.train_s,
                "target/steps_to_target": event.step,
                "target/value": event.value,
            }
        case Checkpointed():
            row = {"checkpoint/write_s": event.write_s}
        case _:
            return {}
    return {"step": event.step, "train_s": event.train_s, **row}


def _trained(event: Trained) -> dict[str, float]:
    row = {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/examples_per_s": event.examples_per_s,
        "train/epoch": event.epoch,
    }
    if event.step_mean_s is not None:
        row["train/step_mean_s"] = event.step_mean_s
        besides_kfac_s = event.step_mean_s - sum(event.stage_mean_s.values())
        row["train/besides_kfac_s"] = max(0.0, besides_kfac_s)
    if event.data_wait_share is not None:
        row["train/data_wait_share"] = event.data_wait_share
    if event.peak_memory_bytes is not None:
        row["memory/peak_bytes"] = event.peak_memory_bytes
    for name in ("nu", "damping", "failed_decompositions", "dropped_statistics"):
        value = getattr(event, name)
        if value is not None:
            row[f"kfac/{name}"] = value
    if event.cosine:
        row |= {f"kfac/cosine/{layer}": value for layer, value in event.cosine.items()}
        row["kfac/cosine_min"] = min(event.cosine.values())
        row["kfac/cosine_median"] = statistics.median(event.cosine.values())
    if event.condition:
        row |= {f"kfac/condition/{layer}": value for layer, value in event.condition.items()}
        row["kfac/condition_max"] = max(event.condition.values())
    row |= {f"kfac/stage_s/{stage}": value for stage, value in event.stage_s.items()}
    return row | {f"kfac/stage_mean_s/{kind}": value for kind, value in event.stage_mean_s.items()}
