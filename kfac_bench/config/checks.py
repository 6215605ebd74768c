"""Options out of range, and options that clash."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from kfac_bench.config.kfac import KFACConfig
from kfac_bench.config.models import DETECTORS, BertConfig
from kfac_bench.config.optimizers import OF_WHOLE_WEIGHTS, OptimizerConfig
from kfac_bench.config.options import check_option, options
from kfac_bench.config.schedules import ScheduleConfig, StepScheduleConfig
from kfac_bench.config.train import DeepSpeedConfig, TrainConfig
from kfac_bench.errors import UsageError


def check(config: TrainConfig) -> None:
    """Raise :class:`UsageError` for the first option out of range, or options that clash."""
    if isinstance(config.backend, DeepSpeedConfig):
        _check_deepspeed(config.backend, config.optimizer)
    if config.backend.name == "fsdp2" and config.optimizer.name in ("soap", "shampoo"):
        raise UsageError(
            f"optimizer={config.optimizer.name} does not fit backend=fsdp2, whose ranks hold parts "
            "of weights: it needs whole ones; use backend=ddp"
        )
    for name, value, meta in options(config):
        if value is not None:
            check_option(name, value, meta)
    kfac, task = config.kfac, config.task
    _check_patterns("kfac.skip", kfac.skip)
    _check_patterns("optimizer.no_decay", config.optimizer.no_decay)
    _check_schedule(config.schedule)
    if kfac.enabled:
        _check_kfac(kfac)
    trainer = config.trainer
    if trainer.accumulate > trainer.batch_size:
        raise UsageError(
            f"trainer.accumulate={trainer.accumulate} is more than "
            f"trainer.batch_size={trainer.batch_size}: a part needs an example"
        )
    if trainer.clock == "cpu":
        _check_cpu_clock(config)
    if trainer.channels_last and config.backend.name in ("fsdp2", "deepspeed"):
        raise UsageError(
            f"trainer.channels_last=true does not fit backend={config.backend.name}, which cuts "
            "weights up in the usual order; use backend=ddp"
        )
    if (config.model.name == "autoencoder") != (task.name == "reconstruction"):
        raise UsageError(
            f"model={config.model.name} does not fit task={task.name}: "
            "task=reconstruction goes with model=autoencoder"
        )
    _check_together(config)
    _check_detection(config)
    _check_language(config)


def _check_cpu_clock(config: TrainConfig) -> None:
    """A processor's seconds are a run's time only where nothing else works for it."""
    for name, value, must in (
        ("trainer.threads", config.trainer.threads, 1),
        ("data.workers", config.data.workers, 0),
    ):
        if value != must:
            said = "null" if value is None else value
            raise UsageError(
                f"trainer.clock=cpu does not fit {name}={said}: it counts what one processor works "
                f"for the run; set {name}={must}, or trainer.clock=wall"
            )


TOGETHER = (
    ("unet", "lgg", "segmentation"),
    ("unet", "pictures", "denoising"),
    ("transformer", "pydoc", "language_model"),
)
"""Models with the data and the task that they are for, and those with the model."""


def _check_together(config: TrainConfig) -> None:
    given = (config.model.name, config.data.name, config.task.name)
    near = [t for t in TOGETHER if any(a == b for a, b in zip(given, t, strict=True))]
    if near and given not in near:
        model, data, task = near[0]
        raise UsageError(
            f"model={given[0]} does not fit data={given[1]} and task={given[2]}: "
            f"model={model}, data={data} and task={task} go together (model={model} sets all three)"
        )


def _check_detection(config: TrainConfig) -> None:
    model, data, task = config.model.name, config.data.name, config.task.name
    parts = (model in DETECTORS, data == "coco", task == "detection")
    if any(parts) and not all(parts):
        raise UsageError(
            f"model={model} does not fit data={data} and task={task}: model={DETECTORS[0]}, "
            "data=coco and task=detection go together (the model sets all three)"
        )
    if all(parts) and config.kfac.enabled and config.kfac.fisher != "empirical":
        raise UsageError(
            f"kfac.fisher={config.kfac.fisher} does not fit task=detection, whose losses have no "
            "one likelihood to draw labels from: use kfac.fisher=empirical"
        )


def _check_language(config: TrainConfig) -> None:
    """BERT, its data and its tasks go together; one of the tasks has two likelihoods."""
    model, data, task = config.model.name, config.data.name, config.task.name
    fits = {"text": "pretraining", "squad": "question_answering"}
    any_ = isinstance(config.model, BertConfig) or data in fits or task in fits.values()
    if any_ and not (isinstance(config.model, BertConfig) and fits.get(data) == task):
        raise UsageError(
            f"model={model} does not fit data={data} and task={task}: a model=bert_... goes with "
            "data=text task=pretraining (its own choice), or data=squad task=question_answering"
        )
    if task == "pretraining" and config.kfac.enabled and config.kfac.fisher != "empirical":
        raise UsageError(
            f"kfac.fisher={config.kfac.fisher} draws labels of one likelihood, task=pretraining is "
            "about two (masked tokens and next sentences): use kfac.fisher=empirical"
        )


def _check_patterns(name: str, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{name}: {pattern!r} is not a regular expression: {error}") from None


def _check_schedule(schedule: ScheduleConfig) -> None:
    if schedule.warmup_epochs and schedule.warmup_share:
        raise UsageError(
            f"schedule.warmup_epochs={schedule.warmup_epochs:g} and "
            f"schedule.warmup_share={schedule.warmup_share:g} are two lengths of one warm-up: "
            "set one of them to 0"
        )
    milestones = schedule.milestones if isinstance(schedule, StepScheduleConfig) else []
    if not all(0 < a < b for a, b in pairwise([*milestones, math.inf])):
        raise UsageError(
            f"schedule.milestones={milestones}: must be epochs above 0 in rising order"
        )


def _check_deepspeed(backend: DeepSpeedConfig, optimizer: OptimizerConfig) -> None:
    if backend.zero_stage == 3:
        raise UsageError(
            "backend.zero_stage=3: ZeRO 3 keeps no whole weight on a rank, which K-FAC's layers "
            "need; use backend.zero_stage=2, or backend=fsdp2, which shards weights too"
        )
    if optimizer.name in OF_WHOLE_WEIGHTS and backend.zero_stage:
        raise UsageError(
            f"optimizer={optimizer.name} does not fit backend.zero_stage={backend.zero_stage}: it "
            "looks at each weight as a whole, and ZeRO glues pieces of weights together; set "
            "backend.zero_stage=0"
        )
    if optimizer.name == "fused_lamb":
        raise UsageError(
            "optimizer=fused_lamb does not fit backend=deepspeed, which copies the optimizer; use "
            "backend=ddp or another optimizer"
        )


def _check_kfac(kfac: KFACConfig) -> None:
    if kfac.update_freq % kfac.factor_update_freq:
        raise UsageError(
            f"kfac.update_freq={kfac.update_freq} must be a multiple of "
            f"kfac.factor_update_freq={kfac.factor_update_freq}: a decomposition follows a factor "
            "update"
        )
    if kfac.factored_damping and kfac.method == "ekfac":
        raise UsageError(
            "kfac.factored_damping=true does not fit kfac.method=ekfac, whose eigenvalues are not "
            "products of A's and G's"
        )
