"""The options of one training run: training loop, logger and all groups; and their checks."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from kfac_bench.config.groups import (
    TABLES,
    BackendConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TaskConfig,
)
from kfac_bench.config.kfac import KFACConfig
from kfac_bench.config.options import PLACE, RECORD, RESULT, Section, check_option, option, options
from kfac_bench.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp16")

LOGGERS = {
    "csv": "kfac_bench.record.sinks.file_views:CsvSink",
    "tensorboard": "kfac_bench.record.sinks.file_views:TensorboardSink",
    "wandb": "kfac_bench.record.sinks.wandb:WandbSink",
}
"""The views of a run by the names of ``logger=[wandb,csv]``. Each has an option of its name."""


@dataclass
class TrainerConfig(Section):
    """The training loop."""

    batch_size: int = option(256, "examples per step over all ranks", RESULT, at_least=1)
    drop_last: bool = option(True, "leave out the last batch of an epoch if it is smaller", RESULT)
    max_epochs: int | None = option(
        None,
        "passes over the training set; null: 20 if max_steps is null too",
        RESULT,
        resumable=True,
        at_least=1,
    )
    max_steps: int | None = option(
        None,
        "optimizer steps; null: only max_epochs limits them",
        RESULT,
        resumable=True,
        at_least=1,
    )
    max_train_s: float | None = option(
        None,
        "training seconds after which the next evaluation is the last; null: no limit",
        RESULT,
        resumable=True,
        above=0,
    )
    target: float | None = option(
        None,
        "stop when the validation metric reaches this value; null: never",
        RESULT,
        resumable=True,
    )
    eval_freq: int | None = option(
        None, "steps between evaluations; null: each epoch", RESULT, resumable=True, at_least=1
    )
    clock: str = option(
        "wall",
        "clock that measures training time: wall (time of day), or cpu (processor time of this "
        "process, which other programs disturb less; needs one rank, one thread and no workers)",
        RESULT,
        choices=("wall", "cpu"),
    )
    log_freq: int = option(10, "steps between Trained events", RECORD, at_least=1)
    checkpoint_freq: int | None = option(
        None,
        "steps between checkpoints; null: at the end of an epoch, at most once a minute",
        RECORD,
        at_least=1,
    )
    keep_last: int = option(2, "newest checkpoints that are kept", RECORD, at_least=1)
    keep_best: int = option(
        1,
        "checkpoints with the best validation metric that are also kept",
        RECORD,
        at_least=0,
    )
    watchdog_s: float | None = option(
        None,
        "seconds without a step or an evaluated batch after which a rank writes its stacks to the "
        "run directory and ends; null: never on one rank, soon after backend.timeout_s on several",
        RECORD,
        above=0,
        at_most=1e9,  # as of backend.timeout_s
    )
    check_ranks: bool = option(
        True,
        "end a run at an evaluation if the weights of its ranks differ in any bit; false: let "
        "unlike machines train together",
        RECORD,
    )
    eval_batch_size: int = option(
        1000, "examples per evaluation batch over all ranks", RESULT, at_least=1
    )
    predictions: int = option(
        8,
        "evaluation examples kept as pictures when a run ends; 0: none",
        RECORD,
        at_least=0,
        at_most=100,
    )
    precision: str = option(
        "fp32",
        "precision of forward and backward; weights and evaluation stay fp32 (with bf16 and fp16 a "
        "GPU multiplies fp32 in TF32); fp16 scales the loss",
        RESULT,
        choices=PRECISIONS,
    )
    accumulate: int = option(
        1,
        "parts of a rank's batch that go through the model one after the other",
        RESULT,
        at_least=1,
    )
    clip_grad_norm: float | None = option(
        None,
        "largest norm of the gradient of all weights together; null: no limit",
        RESULT,
        above=0,
    )
    clip_grad_when: str = option(
        "before",
        "when trainer.clip_grad_norm limits the gradient: before K-FAC changes it, or after",
        RESULT,
        choices=("before", "after"),
    )
    ema: float | None = option(
        None,
        "decay of an exponential moving average of the weights, which evaluations, predictions "
        "and exports use instead of the weights, such as 0.999; null: no average",
        RESULT,
        above=0,
        below=1,
    )
    compile: bool = option(
        False,
        "compile the model with torch.compile; steps that update factors run without it",
        RESULT,
    )
    checkpoint_activations: bool = option(
        False,
        "compute the activations inside the blocks of the model a second time in backward, "
        "which needs less memory; the results are the same",
        RESULT,
    )
    sync_batch_norm: bool = option(
        False, "compute batch norm over the examples of all ranks; needs GPUs", RESULT
    )
    channels_last: bool = option(
        False,
        "store images and convolution weights with channels innermost; the results are the same",
        RESULT,
    )
    device: str = option(
        "auto",
        "where to train",
        RESULT,
        resumable=True,
        per_node=True,
        choices=("auto", "cpu", "cuda"),
    )
    threads: int | None = option(
        None,
        "CPU threads per rank; null: torch decides",
        RESULT,
        resumable=True,
        per_node=True,
        at_least=1,
    )
    pin: bool = option(
        False,
        "bind each rank to trainer.threads cores that no other rank uses, if its node has enough",
        RESULT,
        resumable=True,
        per_node=True,
    )
    time_stages: bool = option(
        False,
        "wait for the GPU after each stage of K-FAC, so that each stage has its own seconds",
        RESULT,
        resumable=True,
    )

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        if self.accumulate > self.batch_size:
            raise UsageError(
                f"trainer.accumulate={self.accumulate} is more than "
                f"trainer.batch_size={self.batch_size}: a part needs an example"
            )
        if self.clip_grad_when == "after" and self.clip_grad_norm is None:
            raise UsageError(
                "trainer.clip_grad_when=after has no effect without a limit: set "
                "trainer.clip_grad_norm too"
            )
        has_clip = self.clip_grad_norm is not None and self.clip_grad_when != "after"
        if has_clip and config.kfac.enabled and config.kfac.adaptive_damping:
            raise UsageError(
                "kfac.adaptive_damping=true judges steps by whole gradients, but "
                "trainer.clip_grad_norm shortens them first: set trainer.clip_grad_when=after"
            )
        if self.compile:
            self._check_compile(config)
        for name in ("channels_last", "compile", "ema"):
            if getattr(self, name) and config.backend.cuts_weights:
                raise UsageError(
                    f"trainer.{name}={str(getattr(self, name)).lower()} does not fit "
                    f"backend={config.backend.name}, which cuts weights up; use backend=ddp"
                )
        if self.sync_batch_norm and config.backend.name == "horovod":
            raise UsageError(
                "trainer.sync_batch_norm=true does not fit backend=horovod, whose ranks torch does "
                "not know; use backend=ddp"
            )
        if self.channels_last and config.backend.name == "horovod":
            raise UsageError(
                "trainer.channels_last=true does not fit backend=horovod, which sends contiguous "
                "tensors only; use backend=ddp"
            )
        if self.sync_batch_norm and config.data.on_error == "skip":
            raise UsageError(
                "trainer.sync_batch_norm=true does not fit data.on_error=skip: a rank without a "
                "readable example would leave the others waiting"
            )
        if self.clock == "cpu":
            self._check_cpu_clock(config.data.workers)

    def _check_compile(self, config: TrainConfig) -> None:
        if config.task.name == "detection":
            raise UsageError(
                "trainer.compile=true does not fit task=detection: each batch has other sizes of "
                "images and boxes, and a graph has fixed sizes; set trainer.compile=false"
            )
        if self.checkpoint_activations:
            raise UsageError(
                "trainer.compile=true does not fit trainer.checkpoint_activations=true: "
                "torch.compile decides what backward computes again; set one of them to false"
            )

    def _check_cpu_clock(self, workers: int) -> None:
        """Allow one processor only: the seconds of a second one would not be counted."""
        for name, value, must in (
            ("trainer.threads", self.threads, 1),
            ("data.workers", workers, 0),
        ):
            if value != must:
                raise UsageError(
                    f"trainer.clock=cpu does not fit {name}={'null' if value is None else value}: "
                    "the clock counts the work of one processor; "
                    f"set {name}={must}, or trainer.clock=wall"
                )


@dataclass
class LoggerConfig(Section):
    """The views of the events of a run, besides events.jsonl and the console.

    ``logger=[wandb,csv]`` sets the options of that name to true. W&B's own variables count for
    options that are null: see :func:`kfac_bench.config.compose.from_composed`.
    """

    csv: bool = option(False, "write metrics.csv in the run directory", RECORD, per_node=True)
    tensorboard: bool = option(
        False, "write the folder tensorboard in the run directory", RECORD, per_node=True
    )
    wandb: bool = option(False, "show the run in Weights & Biases (W&B)", RECORD, per_node=True)
    mode: str = option(
        "auto",
        "W&B: auto is online if a key is set and the network answers, else offline",
        RECORD,
        per_node=True,
        choices=("auto", "online", "offline", "disabled"),
    )
    project: str | None = option(
        None, "W&B project; null: $WANDB_PROJECT, else kfac_bench", RECORD, per_node=True
    )
    entity: str | None = option(
        None, "W&B user or team; null: $WANDB_ENTITY, else your own", RECORD, per_node=True
    )
    id: str | None = option(
        None, "W&B run id; null: $WANDB_RUN_ID, else the run id", RECORD, per_node=True
    )
    group: str | None = option(
        None,
        "W&B group; null: $WANDB_RUN_GROUP, else that of --multirun if there are several runs",
        RECORD,
        per_node=True,
    )
    tags: list[str] = option([], "W&B tags; []: those of $WANDB_TAGS", RECORD, per_node=True)
    notes: str | None = option(None, "W&B notes; null: $WANDB_NOTES", RECORD, per_node=True)


def logger_class(name: str) -> type[Any]:
    """Import and return the sink of a logger, which is made from a ``ShownRun``."""
    module, _, class_name = LOGGERS[name].partition(":")
    sink: type[Any] = getattr(importlib.import_module(module), class_name)
    return sink


@dataclass
class TrainConfig:
    """One training run: ``kfac-train``."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    task: TaskConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    schedule: ScheduleConfig = MISSING
    kfac: KFACConfig = MISSING
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    backend: BackendConfig = MISSING
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: int = option(
        0, "seed of weights, data order and augmentation", RESULT, at_least=0, below=2**32
    )
    label: str | None = option(
        None,
        "name of the setting in tables; null: the name of the optimizer",
        RECORD,
    )
    run_id: str | None = option(
        None, "name of the run directory; null: hash of the configuration", RECORD
    )
    runs_dir: str = option("runs", "where run directories are made", RECORD, per_node=True)
    resume: str | None = option(None, "run directory or checkpoint to start from", PLACE)
    new_phase: bool = option(
        False,
        "begin at step 0, with the weights, the momenta and the state of K-FAC of resume",
        RESULT,
    )
    dry_run: bool = option(False, "print what would be trained and what it costs, and stop", RECORD)


def check(config: TrainConfig) -> None:
    """Raise :class:`UsageError` for the first option out of range, or options that clash."""
    for name, value, meta in options(config):
        if value is not None:
            check_option(name, value, meta)
    # The checks below compute with options, so each option must be in its range by then.
    for name in TABLES:
        _check_name(name, getattr(config, name))
    for group in dataclasses.fields(config):
        section = getattr(config, group.name)
        if isinstance(section, Section):
            section.check(config)
    _check_fits_task("model", config.model, config.task.name)
    _check_fits_task("data", config.data, config.task.name)
    _check_new_phase(config)


def _check_new_phase(config: TrainConfig) -> None:
    """Refuse options that do not fit a run that begins at step 0 with the state of another run."""
    if not config.new_phase:
        return
    if config.resume is None:
        raise UsageError(
            "new_phase=true needs a run to start from: set resume=runs/RUN_ID, or new_phase=false"
        )
    if config.kfac.damping_decay_epochs or config.kfac.interval_growth_epochs:
        raise UsageError(
            "new_phase=true does not fit kfac.damping_decay_epochs or kfac.interval_growth_epochs: "
            "K-FAC counts its steps on from the checkpoint. Set both to []"
        )


def _check_name(group: str, section: Any) -> None:
    """Refuse ``model.name=unet`` where another choice of the group set the other options."""
    if type(section) is not TABLES[group][section.name]:
        raise UsageError(
            f"{group}.name={section.name}: the other options of the group belong to another "
            f"choice; write {group}={section.name}"
        )


def _check_fits_task(group: str, section: Any, task: str) -> None:
    """Refuse a model or a dataset that is for other tasks."""
    if task in section.tasks:
        return
    own_tasks = " or ".join(section.tasks)
    if group == "data":
        own_tasks += f", with model={_names('model', section.tasks)}"
    raise UsageError(
        f"{group}={section.name} does not fit task={task}: {group}={section.name} is for "
        f"task={own_tasks}; for task={task} choose {group}={_names(group, (task,))}"
    )


def _names(group: str, tasks: Sequence[str]) -> str:
    """Return the choices of a group that fit one of the tasks."""
    fitting = [name for name, choice in TABLES[group].items() if {*tasks} & {*choice.tasks}]
    return " or ".join(fitting)
