"""One training run: build its parts, continue where it stopped, train, record.

``kfac-train`` calls :func:`start` on every rank. The training loop itself is in
:mod:`kfac_bench.training.trainer`, the construction of its parts in
:mod:`kfac_bench.training.build`.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kfac_bench import distributed
from kfac_bench.config import KFACConfig, TrainConfig, options
from kfac_bench.config.options import PLACE
from kfac_bench.core.planning.plan import IDENTITY
from kfac_bench.data.base.dataset import Data
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import OneRankError, UsageError, WorkerLostError
from kfac_bench.record.event_log import EventLog, JsonlSink, Sink
from kfac_bench.record.events import DataChanged, RunEnded, RunStarted, TargetReached, read
from kfac_bench.record.progress import progress
from kfac_bench.record.sinks.console import ConsoleSink
from kfac_bench.tasks.task import reached
from kfac_bench.training import (
    build,
    checkpoint,
    early_answer,
    environment,
    same_data,
    weights,
)
from kfac_bench.training.blueprint import Blueprint
from kfac_bench.training.checkpoint import Checkpoint
from kfac_bench.training.course import Course
from kfac_bench.training.record_check import RecordCheck
from kfac_bench.training.run_directory import RunDirectory
from kfac_bench.training.trainer import Trainer
from kfac_bench.training.update import least_part


def start(config: TrainConfig) -> int:
    """Connect the ranks and :func:`train`; return the exit code of ``kfac-train``."""
    with distributed.join(config.backend, config.trainer.device) as backend:
        status, signal = train(config, backend)
    return {"failed": 1, "interrupted": 128 + signal}.get(status, 0)


def train(
    config: TrainConfig, backend: Backend, blueprint: Blueprint | None = None
) -> tuple[str, int]:
    """Start or continue the run of this configuration; all ranks call this.

    Args:
        config: The configuration of the run.
        backend: The backend that connects the ranks.
        blueprint: The builders of model, data and task; None: as the configuration says.

    Returns:
        The status of the run's last event, and the signal that stopped the run (0: none).

    Raises:
        UsageError: Something that the user can fix.
    """
    ranks = backend.ranks
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    environment.try_threads(torch.get_num_threads())
    if config.trainer.clock == "cpu" and (ranks.world_size > 1 or ranks.device.type != "cpu"):
        raise UsageError(
            f"trainer.clock=cpu does not fit {ranks.world_size} rank(s) on {ranks.device.type}: it "
            "counts what one processor works for the run; use one rank and trainer.device=cpu, or "
            "trainer.clock=wall"
        )
    pinned = config.trainer.pin and environment.pin(config.trainer.threads or 1)
    if ranks.device.type == "cpu":
        environment.keep_freed_memory()
    # Before anything else: ranks with other options would wait for each other's messages.
    _check_same_options(config, ranks)
    directory = RunDirectory(config)
    about = environment.describe() | {"world_size": ranks.world_size, "device": str(ranks.device)}
    about["pinned"] = pinned
    with ExitStack() as stack:
        if_main = directory.open(config, about) if ranks.is_main else nullcontext()
        # An error on rank 0 alone would leave the others waiting: together() raises it on all.
        ranks.together(lambda: stack.enter_context(if_main))
        ranks.together(directory.check_is_here)
        with progress.task("reading the data and building the model"):
            trainer = _build_trainer(config, backend, directory, blueprint)
        complete = ranks.together(
            lambda: _status_if_complete(directory, trainer) if ranks.is_main else None
        )
        # Only rank 0 reads the event file; its answer is every rank's answer.
        if ranks.any(complete is not None):
            if ranks.is_main:
                directory.note_state(complete or "finished", trainer.course.max_steps)
            return complete or "finished", 0
        with progress.task("opening the log"):
            opened = ranks.together(
                lambda: _open_log(config, trainer, directory, about) if ranks.is_main else None
            )
        if opened is not None:
            trainer.log, trainer.say = opened
            stack.callback(trainer.log.close)
        for line in (*trainer.data.notes, *trainer.notes):
            trainer.say(line)
        _start(config, trainer, directory, about)
        _say_what_kfac_does(config.kfac, trainer)
        if ranks.is_main:
            directory.note_state("running", trainer.step)
        steps = trainer.course.max_steps
        try:
            with progress.task(
                "training", lambda: (trainer.step, steps), ends="the run saves and ends then"
            ):
                status = trainer.fit()
        except BaseException as error:
            if ranks.is_main:
                directory.note_state(trainer.status_after(error), trainer.step)
            # Only this rank knows of its data, so it has to print the message.
            if isinstance(error, UsageError):
                raise OneRankError(str(error)) from None
            if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
                # torch raises it in the handler of a signal, at any statement of this process.
                raise WorkerLostError(str(error)) from None
            raise
        if ranks.is_main:
            directory.note_state(status, trainer.step)
        return status, trainer.stop.signal


def _check_same_options(config: TrainConfig, ranks: Ranks) -> None:
    """Raise :class:`UsageError` if ranks differ in an option that all ranks must share."""
    common = {
        name: value
        for name, value, meta in options(config)
        if meta["role"] is not PLACE and not meta["per_node"]
    }
    if others := ranks.unlike_main(json.dumps(common, sort_keys=True)):
        raise UsageError(f"ranks {others} have other options than rank 0. Use one command for all")


def _data_and_model(
    config: TrainConfig, blueprint: Blueprint, ranks: Ranks
) -> tuple[Data, nn.Module, list[str]]:
    data = blueprint.data()
    torch.manual_seed(config.seed)
    model = blueprint.model(data.shape, data.num_classes)
    notes = weights.load(model, config.model)
    model = model.to(ranks.device)
    if config.trainer.channels_last:
        model.to(memory_format=torch.channels_last)
    blueprint.try_out(model, data)
    least = least_part(data.train_size, config.trainer, ranks.world_size)
    build.check_batch_norm(model, config.model, least)
    return data, model, notes


def _build_trainer(
    config: TrainConfig,
    backend: Backend,
    directory: RunDirectory,
    blueprint: Blueprint | None = None,
) -> Trainer:
    blueprint = blueprint or Blueprint.of(config)
    ranks = backend.ranks
    data, model, notes = ranks.together(lambda: _data_and_model(config, blueprint, ranks))
    about = f"{data.train_size} {data.eval_size} {data.shape} {data.num_classes}"
    if others := ranks.unlike_main(about):
        raise UsageError(
            f"ranks {others} read other data than rank 0. Copy the same dataset to every node"
        )
    model = backend.shard(model)
    optimizer = build.build_optimizer(config.optimizer, model)
    steps = Course.of(config.trainer, data.train_size).steps_per_epoch
    kfac = build.build_kfac(config.kfac, model, optimizer, backend.collective(), steps)
    model, optimizer = backend.wrap(model, optimizer)
    return Trainer(
        blueprint.task(data),
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
        timeout_s=config.backend.timeout_s,
    )


def _status_if_complete(directory: RunDirectory, trainer: Trainer) -> str | None:
    """Return how the run ended and say so; None if there is still something to do."""
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
    if not (at_target or time_is_up) and ended.step < trainer.course.max_steps:
        return None
    early_answer.say_complete(directory, ended)
    return ended.status


def _open_log(
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
    sinks: list[Sink] = [JsonlSink(directory.events), console]
    logger = config.logger
    if logger.name == "wandb":
        from kfac_bench.record.sinks.wandb import WandbSink

        wandb = WandbSink(
            directory.path,
            directory.run_id,
            logger.project,
            logger.entity,
            asdict(config) | {"environment": about},
            mode=logger.mode,
            metric=metric,
            higher_is_better=higher_is_better,
            say=console.say,
        )
        sinks.append(wandb)
    elif logger.name == "tensorboard":
        from kfac_bench.record.sinks.tensorboard import TensorboardSink

        sinks.append(TensorboardSink(directory.path, say=console.say))
    return EventLog(sinks), console.say


def _say_what_kfac_does(config: KFACConfig, trainer: Trainer) -> None:
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
        f"parameters); every {config.update_freq} steps it decomposes "
        f"{2 * len(report.layers)} factors, the largest {largest} x {largest}"
    )
    for change in config.changes():
        trainer.say(change)


def _start(
    config: TrainConfig, trainer: Trainer, directory: RunDirectory, about: Mapping[str, Any]
) -> None:
    """Write the first event, or restore the newest good checkpoint."""
    ranks = trainer.ranks
    saved, bad = ranks.together(lambda: _find(config, directory))
    if others := ranks.unlike_main(f"{saved and (saved.step, len(saved.shards))}"):
        raise UsageError(
            f"ranks {others} do not see the checkpoint that rank 0 sees. Set runs_dir to a folder "
            "that all nodes share"
        )
    # With resume=PATH the first checkpoint is another run's, and this run only starts.
    own = saved is not None and saved.path.is_relative_to(directory.path)
    for line in bad:
        trainer.say(f"{line}; an older one is used, if there is one")
    changed = ranks.together(
        lambda: same_data.check(config, trainer, saved, is_own=own) if ranks.is_main else None
    )
    check: RecordCheck | None = None
    changed_options: dict[str, Any] = {}
    if own and saved is not None:
        check = ranks.together(lambda: _check_record(trainer, directory, saved))
        changed_options = ranks.together(lambda: directory.changed_options(config) if check else {})
    if not own or (check is not None and check.lacks_start):
        task = trainer.task
        trainer.log.emit(
            RunStarted(
                step=0,
                train_s=0.0,
                run_id=directory.run_id,
                metric=task.metric,
                higher_is_better=task.higher_is_better,
                config=asdict(config),
                environment=about,
                payload_bytes=_payload_bytes(trainer),
                data=trainer.fingerprint,
            )
        )
    trainer.report_faults()
    if saved is not None:
        try:
            trainer.restore(saved, about, changed_options)
        except ValueError as error:
            raise UsageError(f"resume: {error}") from None
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise UsageError(
                f"resume: {saved.path} does not hold the state of a run ({error!r})"
            ) from None
    if changed is not None:
        trainer.log.emit(
            DataChanged(trainer.step, trainer.clock.train_s(), changed, trainer.fingerprint)
        )
    if check is not None:
        check.complete(trainer.log, trainer.clock.train_s(), about, trainer.say)


def _check_record(
    trainer: Trainer, directory: RunDirectory, saved: Checkpoint
) -> RecordCheck | None:
    """Return what the record lacks; None on ranks that have no record."""
    record = trainer.log.record
    return None if record is None else RecordCheck(directory.events, record, saved)


def _payload_bytes(trainer: Trainer) -> dict[str, dict[str, int]]:
    if trainer.kfac is None:
        return {}
    return trainer.kfac.report().payload_bytes()


def _find(config: TrainConfig, directory: RunDirectory) -> tuple[Checkpoint | None, list[str]]:
    """Return the run's own newest good checkpoint, else that of ``resume``.

    The second value has a line for each damaged checkpoint that was passed over.
    """
    saved, bad = checkpoint.find(directory.path)
    if saved is None and config.resume is not None:
        saved, more_bad = checkpoint.find(Path(config.resume))
        bad += more_bad
        if saved is None:
            reason = f" ({more_bad[0]})" if more_bad else ""
            raise UsageError(f"resume={config.resume}: there is no good checkpoint{reason}")
    return saved, bad
