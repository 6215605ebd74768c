"""One training run: build its parts, continue where it stopped, train, record.

``kfac-train`` calls :func:`start` on every rank, and programs call :func:`train_words`. Optimizer
and K-FAC are built in :mod:`kfac_bench.training.build`, a checkpoint is restored in
:mod:`kfac_bench.training.resume`, and the training loop is in
:mod:`kfac_bench.training.trainer`.
"""

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from kfac_bench import distributed
from kfac_bench.config import (
    KFACConfig,
    TrainConfig,
    compose,
    named_variables,
    options,
    problem_file,
)
from kfac_bench.config.options import PLACE
from kfac_bench.config.train import LOGGERS, logger_class
from kfac_bench.core.planning.plan import IDENTITY
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.images.random_methods import Mixup
from kfac_bench.distributed import slurm_rank
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import OneRankError, UsageError, WorkerLostError
from kfac_bench.record.event_log import EventLog, JsonlSink, Sink
from kfac_bench.record.events import Evaluated, RunEnded, RunStarted, TargetReached, read
from kfac_bench.record.progress import progress
from kfac_bench.record.sinks.console import ConsoleSink
from kfac_bench.record.sinks.view import ShownRun
from kfac_bench.tasks.task import reached
from kfac_bench.training import build, environment, model_changes, weights
from kfac_bench.training.build import Builders
from kfac_bench.training.rank_batches import RunLength
from kfac_bench.training.resume import start_or_resume
from kfac_bench.training.run_directory import RunDirectory, say_complete
from kfac_bench.training.trainer import Trainer
from kfac_bench.training.update import check_last_batch, check_parts, least_part


def train_words(words: Sequence[str]) -> float:
    """Train as ``kfac-train`` does with these words, and return the last validation metric.

    ``kfac_bench.train`` is this function, for programs that search for settings. Like the command
    it continues a run that is not complete: with the same ``run_id`` and a larger
    ``trainer.max_steps`` a run goes on where it stopped. If the run is complete, its metric is
    returned at once. The function prints what the command prints.

    Args:
        words: Words of the command line, such as ``model=resnet8`` and ``optimizer.lr=0.1``.

    Returns:
        The validation metric of the task, such as the accuracy. NaN if the training failed, for
        example because its loss is not finite.

    Raises:
        UsageError: A word is wrong, or the thread is not the main thread of its process.
        KeyboardInterrupt: A signal stopped the run, which has saved a checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "kfac_bench.train: a run handles signals, which Python allows only in the main thread. "
            "Call it there; for several runs at the same time start several processes"
        )
    slurm_rank.adopt()
    named_variables.allow(words)
    problem_file.run_named(words)
    config = compose.load(words, ranks=slurm_rank.launched_ranks())
    if config.dry_run:
        raise UsageError("dry_run=true trains nothing: use kfac-train dry_run=true")
    code = start(config)
    if code >= 128:
        raise KeyboardInterrupt
    events = read(RunDirectory(config).events)
    metric = next(event.metric for event in events if isinstance(event, RunStarted))
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    return float(evaluated[-1].metrics[metric]) if evaluated and code == 0 else math.nan


def start(config: TrainConfig) -> int:
    """Connect the ranks and :func:`train`; return the exit code of ``kfac-train``."""
    with distributed.join(config.backend, config.trainer.device) as backend:
        status, signal = train(config, backend)
    return {"failed": 1, "interrupted": 128 + signal}.get(status, 0)


def train(config: TrainConfig, backend: Backend) -> tuple[str, int]:
    """Start or continue the run of this configuration; all ranks call this.

    Args:
        config: The configuration of the run.
        backend: The backend that connects the ranks.

    Returns:
        The status of the run's last event, and the signal that stopped the run (0: none).

    Raises:
        UsageError: Something that the user can fix.
    """
    ranks = backend.ranks
    is_pinned = _set_up_process(config, ranks)
    # Before anything else: ranks with other options would wait for each other's messages.
    _check_same_options(config, ranks)
    directory = RunDirectory(config)
    about = environment.describe() | {"world_size": ranks.world_size, "device": str(ranks.device)}
    about["pinned"] = is_pinned
    with ExitStack() as stack:
        if_main = directory.open(config, about) if ranks.is_main else nullcontext()
        # An error on rank 0 alone would leave the others waiting: together() raises it on all.
        ranks.together(lambda: stack.enter_context(if_main))
        ranks.together(directory.check_is_here)
        with progress.task("reading the data and building the model"):
            trainer = build_trainer(config, backend, directory)
        complete = ranks.together(
            lambda: _status_if_complete(directory, trainer) if ranks.is_main else None
        )
        # Only rank 0 reads the event file; its answer is every rank's answer.
        if ranks.any(complete is not None):
            return complete or "finished", 0
        with progress.task("opening the log"):
            opened = ranks.together(
                lambda: open_log(config, trainer, directory, about) if ranks.is_main else None
            )
        if opened is not None:
            trainer.log, trainer.say = opened
            stack.callback(trainer.log.close)
        for line in (*trainer.data.notes, *trainer.notes):
            trainer.say(line)
        start_or_resume(config, trainer, directory, about)
        say_what_kfac_does(config.kfac, trainer)
        return _fit(trainer, directory)


def _set_up_process(config: TrainConfig, ranks: Ranks) -> bool:
    """Set threads and memory of this process; return whether it is bound to cores."""
    check_parts(config.trainer, ranks.world_size)
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    environment.try_threads(torch.get_num_threads())
    if config.trainer.clock == "cpu" and (ranks.world_size > 1 or ranks.device.type != "cpu"):
        raise UsageError(
            f"trainer.clock=cpu does not fit {ranks.world_size} rank(s) on {ranks.device.type}: it "
            "counts what one processor works for the run; use one rank and trainer.device=cpu, or "
            "trainer.clock=wall"
        )
    is_pinned = config.trainer.pin and environment.pin(torch.get_num_threads())
    if ranks.device.type == "cpu":
        environment.keep_freed_memory()
    else:
        # K-FAC multiplies in float32. TF32 keeps more digits than gradients in half precision have.
        is_half = config.trainer.precision != "fp32"
        torch.set_float32_matmul_precision("high" if is_half else "highest")
    return is_pinned


def _check_same_options(config: TrainConfig, ranks: Ranks) -> None:
    """Raise :class:`UsageError` if ranks differ in an option that all ranks must share."""
    common = {
        name: value
        for name, value, meta in options(config)
        if meta["role"] is not PLACE and not meta["per_node"]
    }
    if others := ranks.unlike_main(json.dumps(common, sort_keys=True)):
        raise UsageError(f"ranks {others} have other options than rank 0. Use one command for all")


def build_trainer(config: TrainConfig, backend: Backend, directory: RunDirectory) -> Trainer:
    """Return the trainer of a run, which writes no events yet.

    Args:
        config: The configuration of the run.
        backend: The backend that connects the ranks.
        directory: The directory of the run.

    Raises:
        UsageError: A part cannot be built, or ranks read other data.
    """
    builders, ranks = Builders.of(config), backend.ranks
    data, model, notes = ranks.together(lambda: _data_and_model(config, builders, ranks))
    about = f"{data.train_size} {data.eval_size} {data.shape} {data.num_classes}"
    if others := ranks.unlike_main(about):
        raise UsageError(
            f"ranks {others} read other data than rank 0. Copy the same dataset to every node"
        )
    average = ranks.together(lambda: model_changes.before_hooks(model, config))
    model = backend.shard(model)
    optimizer = build.build_optimizer(config.optimizer, model)
    length = RunLength.of(config.trainer, data.train_size)
    steps = length.steps_per_epoch
    notes += config.schedule.notes(steps, length.max_steps)
    kfac = build.build_kfac(config.kfac, model, optimizer, backend.collective(), steps)
    if config.trainer.compile:
        models = [model] if average is None else [model, average.module]
        ranks.together(lambda: model_changes.compile_models(models, ranks.device))
    model, optimizer = backend.wrap(model, optimizer)
    mixup = Mixup(config.data.mixup, data.num_classes, config.seed) if config.data.mixup else None
    return Trainer(
        builders.task(data),
        data,
        model,
        optimizer,
        kfac,
        config.trainer,
        config.schedule,
        config.seed,
        backend,
        EventLog([]),
        directory.path,
        notes,
        average=average,
        mixup=mixup,
        timeout_s=config.backend.timeout_s,
    )


def _data_and_model(
    config: TrainConfig, builders: Builders, ranks: Ranks
) -> tuple[Data, nn.Module, list[str]]:
    data = builders.data()
    torch.manual_seed(config.seed)
    model = builders.model(data.shape, data.num_classes)
    notes = weights.load(model, config.model)
    model = model.to(ranks.device)
    if config.trainer.sync_batch_norm:
        model = model_changes.synchronize_batch_norm(model, ranks)
    if config.trainer.channels_last:
        model.to(memory_format=torch.channels_last)
    builders.try_out(model, data)
    least = least_part(data.train_size, config.trainer, ranks.world_size)
    check_last_batch(data.train_size, config.trainer, ranks.world_size)
    build.check_batch_norm(model, config.model, least)
    usual = config.trainer.batch_size // ranks.world_size // config.trainer.accumulate
    notes += build.batch_norm_notes(model, usual)
    return data, model, notes


def _status_if_complete(directory: RunDirectory, trainer: Trainer) -> str | None:
    """Return the status of a complete run and report it; None if there is still work to do."""
    events = read(directory.events) if directory.events.exists() else []
    ended = next((e for e in reversed(events) if isinstance(e, RunEnded)), None)
    hit = next((e for e in reversed(events) if isinstance(e, TargetReached)), None)
    # A run that failed or was interrupted at its last step may lack its last checkpoint.
    if ended is None or ended.status in ("failed", "interrupted"):
        return None
    goal = trainer.config.target
    # A run goes on for a target that is harder than its last one, or without a target.
    at_target = (
        ended.status == "reached"
        and hit is not None
        and goal is not None
        and reached(trainer.task, hit.value, goal)
    )
    limit = trainer.config.max_train_s
    time_is_up = limit is not None and ended.train_s >= limit
    if not (at_target or time_is_up) and ended.step < trainer.length.max_steps:
        return None
    say_complete(directory, ended)
    directory.note_state(ended.status, ended.step)
    return ended.status


def open_log(
    config: TrainConfig, trainer: Trainer, directory: RunDirectory, about: Mapping[str, Any]
) -> tuple[EventLog, Callable[[str], None]]:
    """Open the record and its views on rank 0; return them and a function that prints a line."""
    metric, higher_is_better = trainer.task.metric, trainer.task.higher_is_better
    console = ConsoleSink(
        metric=metric,
        higher_is_better=higher_is_better,
        total_steps=trainer.length.max_steps,
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
    """Report the layers that K-FAC covers, the sizes of its factors, and the options that change.

    The first step on a large model takes long, because it decomposes all factors.
    """
    if trainer.kfac is None:
        return
    report = trainer.kfac.report()
    largest = report.largest_factor
    total = report.covered_params + report.skipped_params
    if report.plan.method == IDENTITY:
        trainer.say(
            f"identity factors: of K-FAC only the limits of the step, over {len(report.layers)} "
            "layers"
        )
        return
    trainer.say(
        f"K-FAC preconditions {len(report.layers)} layers ({report.covered_params:,} of {total:,} "
        f"parameters); every {trainer.kfac.update_freq} steps it decomposes "
        f"{report.matrices} matrices, the largest {largest} x {largest}"
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


def _fit(trainer: Trainer, directory: RunDirectory) -> tuple[str, int]:
    """Train, and note in the run directory how the run ends; return as :func:`train`."""
    is_main, steps = trainer.ranks.is_main, trainer.length.max_steps
    if is_main:
        directory.note_state("running", trainer.step)
    try:
        with progress.task(
            "training", lambda: (trainer.step, steps), ends="the run saves and ends then"
        ):
            status = trainer.fit()
    except BaseException as error:
        if is_main:
            directory.note_state(trainer.status_after(error), trainer.step)
        if trainer.config.compile and (line := model_changes.compile_problem(error)):
            raise OneRankError(line) from None
        # Only this rank knows of its data, so it has to print the message.
        if isinstance(error, UsageError):
            raise OneRankError(str(error)) from None
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
            # torch raises it in the handler of a signal, at any statement of this process.
            raise WorkerLostError(str(error)) from None
        raise
    if is_main:
        directory.note_state(status, trainer.step)
    return status, trainer.stop.signal
