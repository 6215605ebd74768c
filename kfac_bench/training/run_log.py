"""The record of a run and its views: the console and the loggers. Rank 0 alone has them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from kfac_bench.config import KFACConfig, TrainConfig
from kfac_bench.config.train import LOGGERS, logger_class
from kfac_bench.core.planning.plan import IDENTITY
from kfac_bench.record.event_log import EventLog, JsonlSink, Sink
from kfac_bench.record.sinks.console import ConsoleSink
from kfac_bench.record.sinks.view import ShownRun
from kfac_bench.training.run_directory import RunDirectory
from kfac_bench.training.trainer import Trainer


def open_log(
    config: TrainConfig, trainer: Trainer, directory: RunDirectory, about: Mapping[str, Any]
) -> tuple[EventLog, Callable[[str], None]]:
    """Open the record and its views on rank 0; return them and a function that prints a line."""
    metric, higher_is_better = trainer.task.metric, trainer.task.higher_is_better
    console = ConsoleSink(
        metric=metric,
        higher_is_better=higher_is_better,
        total_steps=trainer.course.max_steps,
        target=config.trainer.target,
    )
    shown = ShownRun(
        directory.path,
        directory.run_id,
        config.logger,
        asdict(config) | {"environment": about},
        metric,
        higher_is_better,
        console.say,
    )
    # The record comes first: a view may read it.
    sinks: list[Sink] = [JsonlSink(directory.events), console]
    sinks += [logger_class(name)(shown) for name in LOGGERS if getattr(config.logger, name)]
    return EventLog(sinks), console.say


def say_what_kfac_does(config: KFACConfig, trainer: Trainer) -> None:
    """Say which layers K-FAC covers, how large its factors are, and which options change.

    The first step on a large model takes long, because it decomposes all factors.
    """
    if trainer.kfac is None:
        return
    report = trainer.kfac.report()
    largest = report.largest_factor
    total = report.covered_params + report.skipped_params
    if report.plan.method == IDENTITY:
        trainer.say(
            f"identity factors: of K-FAC only the KL clip, over {len(report.layers)} layers"
        )
        return
    trainer.say(
        f"K-FAC preconditions {len(report.layers)} layers ({report.covered_params:,} of {total:,} "
        f"parameters); every {trainer.kfac.update_freq} steps it decomposes "
        f"{2 * len(report.layers)} factors, the largest {largest} x {largest}"
    )
    if report.choice is not None:
        trainer.say(str(report.choice))
    elif config.max_overhead is not None:
        trainer.say(
            f"kfac.max_overhead={config.max_overhead:g}: K-FAC measures the first steps, then "
            "chooses its options"
        )
    for change in config.changes():
        trainer.say(change)
