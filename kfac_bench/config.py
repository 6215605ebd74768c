"""Every option of a training run, typed, with its range and its meaning: the schema of conf/.

Values live in YAML, names and types here; ``kfac-train --help`` prints this file's help texts.
Nothing past :func:`kfac_bench.compose.load` sees a DictConfig.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from kfac_bench.core.plan import BALANCES, METHODS, STRATEGIES
from kfac_bench.errors import UsageError

# The core's own, which need torch; tests/test_config.py holds them against it.
CONVENTIONS = ("kfc", "sc20", "kaisa")
FISHERS = ("empirical", "mc", "type2")
WEIGHT_SHARING = ("expand", "reduce")

BACKENDS = ("ddp", "fsdp2", "horovod", "deepspeed", "apex")
PRECISIONS = ("fp32", "bf16", "fp16")
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
CIFAR_RESNETS = ("resnet8", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110")
MODELS = (*RESNETS, *CIFAR_RESNETS, "autoencoder", "unet")


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with its meaning and its range, both read by people and by :func:`check`."""
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    metadata = {
        "help": help,
        "bounds": {k: v for k, v in bounds.items() if v is not None},
        "choices": choices,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """The network; its input channels and classes come from the data."""

    name: str = option(MISSING, "architecture", choices=MODELS)


@dataclass
class AutoencoderConfig(ModelConfig):
    """A deep autoencoder of fully connected layers."""

    hidden: list[int] = option([128, 64, 32, 12], "widths down to the code; mirrored on the way up")
    activation: str = option("tanh", "between layers", choices=("tanh", "relu", "sigmoid"))


@dataclass
class UNetConfig(ModelConfig):
    """A U-Net, which gives each pixel a logit."""

    width: int = option(
        32, "channels of the first level; twice as many at each further", at_least=1
    )
    depth: int = option(4, "times that the image is halved", at_least=1, at_most=10)


@dataclass
class DataConfig:
    """The data set."""

    name: str = option(MISSING, "data set", choices=("digits", "cifar10", "imagefolder", "lgg"))
    root: str | None = option(None, "folder of the data set on disk (digits ships in a package)")
    image_size: int = option(MISSING, "side of an input image in pixels", at_least=1)
    workers: int = option(0, "loader processes per rank (imagefolder, lgg)", at_least=0)
    augment: bool = option(
        True, "random changes while training (cifar10: crops, flips; lgg: turns)"
    )


@dataclass
class LGGConfig(DataConfig):
    """Volumes of MRI slices with tumour masks."""

    eval_share: float = option(
        0.1, "of the patients, for evaluation; the same ones for all seeds", above=0, below=1
    )
    on_error: str = option(
        "fatal", "a slice that is damaged or lacks its mask", choices=("fatal", "skip")
    )


@dataclass
class TaskConfig:
    """What is learned, and the validation figure that a target is about."""

    name: str = option(
        MISSING, "task", choices=("classification", "reconstruction", "segmentation")
    )
    label_smoothing: float = option(0.0, "of the cross-entropy", at_least=0, below=1)


@dataclass
class SegmentationConfig(TaskConfig):
    """Dice loss of a mask."""

    smooth: float = option(1.0, "pixels added to both sides of an image's Dice ratio", above=0)
    bce: float = option(
        1.0,
        "weight of the binary cross entropy, mean over pixels, beside the Dice loss",
        at_least=0,
    )


@dataclass
class OptimizerConfig:
    """The first-order optimizer, with or without a preconditioner before it."""

    name: str = option(MISSING, "optimizer", choices=("sgd", "adam", "adamw", "fused_lamb"))
    lr: float = option(MISSING, "learning rate", above=0)
    weight_decay: float = option(
        0.0, "L2 penalty (sgd, adam) or decoupled decay (adamw)", at_least=0
    )


@dataclass
class SGDConfig(OptimizerConfig):
    """SGD with momentum."""

    momentum: float = option(0.9, "heavy-ball momentum", at_least=0, below=1)
    nesterov: bool = option(False, "Nesterov's variant")


@dataclass
class AdamConfig(OptimizerConfig):
    """Adam and AdamW."""

    beta1: float = option(0.9, "decay of the first moment", at_least=0, below=1)
    beta2: float = option(0.999, "decay of the second moment", at_least=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment", above=0)


@dataclass
class KFACConfig:
    """K-FAC preconditioning; kfac=none turns it off."""

    enabled: bool = option(True, "precondition gradients")
    strategy: str = option("comm_opt", "who computes what on several ranks", choices=STRATEGIES)
    grad_worker_fraction: float | None = option(
        None,
        "share of ranks that precondition a layer (hybrid_opt, null: 0.5; owner_reduce and "
        "local_factors, null: one rank)",
        above=0,
        at_most=1,
    )
    colocate_factors: bool | None = option(
        None, "one rank decomposes both factors of a layer; null: not in comm_opt"
    )
    balance: str = option(
        "compute", "what ranks get about equal shares of: time or bytes", choices=BALANCES
    )
    overlap: bool = option(False, "send statistics while backward runs; the results are the same")
    method: str = option(
        "eigen", "eigendecomposition, Cholesky inverse, or George et al.'s EKFAC", choices=METHODS
    )
    update_freq: int = option(100, "steps between decompositions", at_least=1)
    factor_update_freq: int = option(10, "steps between factor updates", at_least=1)
    spread: bool | None = option(
        None, "decompose in slices at different steps, so that none is long; null: on one rank"
    )
    damping: float = option(1e-3, "Tikhonov damping gamma; where it adapts, the first", above=0)
    factored_damping: bool = option(False, "split gamma between A and G by their mean eigenvalues")
    adaptive_damping: bool = option(False, "let Levenberg and Marquardt's rule change gamma")
    damping_freq: int = option(5, "steps between changes of an adaptive gamma", at_least=1)
    kl_clip: float | None = option(1e-3, "kappa of eq. 16; null: no clip", above=0)
    factor_decay: float = option(
        0.95, "weight of the old factor in the running average", at_least=0, below=1
    )
    factor_convention: str = option("kfc", "how factors are scaled", choices=CONVENTIONS)
    fisher: str = option(
        "empirical",
        "G of the loss' gradients, or of labels from the model: a sample, all",
        choices=FISHERS,
    )
    weight_sharing: str = option(
        "expand", "positions that share a weight: samples, or reduced first", choices=WEIGHT_SHARING
    )
    state_dtype: str = option(
        "fp32", "what factors and decompositions are kept and sent in", choices=PRECISIONS
    )
    skip: list[str] = option(
        ["Norm", "Embedding"],
        "regular expressions of layers, by name or class, left to the optimizer; []: none",
    )
    max_dim: int = option(8192, "a factor of more rows is kept as a diagonal", at_least=1)


@dataclass
class TrainerConfig:
    """The training loop."""

    batch_size: int = option(256, "examples per step over all ranks", at_least=1)
    drop_last: bool = option(True, "leave out the last batch of an epoch where it is smaller")
    max_epochs: int | None = option(
        None, "passes over the training set; null: 20 if max_steps is null too", at_least=1
    )
    max_steps: int | None = option(None, "optimizer steps; null: no limit of their own", at_least=1)
    target: float | None = option(None, "stop when the validation figure reaches this; null: never")
    eval_freq: int | None = option(None, "steps between evaluations; null: each epoch", at_least=1)
    log_freq: int = option(10, "steps between Trained events", at_least=1)
    checkpoint_freq: int | None = option(
        None,
        "steps between checkpoints; null: at an epoch's end, at most once a minute",
        at_least=1,
    )
    keep_last: int = option(2, "checkpoints kept", at_least=1)
    eval_batch_size: int = option(1000, "examples per evaluation batch on a rank", at_least=1)
    precision: str = option(
        "fp32",
        "of forward and backward; weights and evaluation stay fp32, fp16 scales the loss",
        choices=PRECISIONS,
    )
    accumulate: int = option(
        1, "parts of a rank's batch that go through the model one by one", at_least=1
    )
    device: str = option("auto", "where to train", choices=("auto", "cpu", "cuda"))
    threads: int | None = option(None, "CPU threads per rank; null: torch decides", at_least=1)


@dataclass
class BackendConfig:
    """Who connects the ranks of a run and averages their gradients."""

    name: str = option(MISSING, "backend", choices=BACKENDS)
    timeout_s: float = option(
        600.0, "seconds that a rank waits for the others before it gives up (ddp)", above=0
    )


@dataclass
class DeepSpeedConfig(BackendConfig):
    """DeepSpeed's engine."""

    zero_stage: int = option(
        1,
        "what ZeRO cuts up over ranks: 0 nothing, 1 optimizer state, 2 gradients too",
        at_least=0,
        at_most=2,
    )


@dataclass
class LoggerConfig:
    """Where the event stream is shown beside events.jsonl and the console."""

    name: str = option("wandb", "view", choices=("wandb", "tensorboard", "none"))
    mode: str = option(
        "auto",
        "W&B: auto is online if a key is set and the network answers, else offline",
        choices=("auto", "online", "offline", "disabled"),
    )
    project: str = option("kfac_bench", "W&B project")
    entity: str | None = option(None, "W&B user or team")


@dataclass
class TrainConfig:
    """One training run: ``kfac-train``."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    task: TaskConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    kfac: KFACConfig = MISSING
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    backend: BackendConfig = MISSING
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: int = option(0, "of weights, data order and augmentation", at_least=0, below=2**32)
    run_id: str | None = option(None, "name of the run directory; null: hash of the configuration")
    runs_dir: str = option("runs", "where run directories are made")
    resume: str | None = option(None, "run directory or checkpoint to start from")
    dry_run: bool = option(False, "print what would be trained and what it costs, and stop")


VARIANTS: dict[str, dict[str, type]] = {
    "model": {"base": ModelConfig, "autoencoder": AutoencoderConfig, "unet": UNetConfig},
    "data": {"base": DataConfig, "lgg": LGGConfig},
    "task": {"base": TaskConfig, "segmentation": SegmentationConfig},
    "optimizer": {"sgd": SGDConfig, "adam": AdamConfig},
    "kfac": {"base": KFACConfig},
    "backend": {"base": BackendConfig, "deepspeed": DeepSpeedConfig},
    "logger": {"base": LoggerConfig},
}
"""Schema of each config group; a YAML file names the one it fills in."""


def options(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(dotted name, value, metadata) of every option below ``config``."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from options(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value, dict(f.metadata)


def check(config: TrainConfig) -> None:
    """Raise :class:`UsageError` for the first option out of range, or options that clash."""
    if isinstance(config.backend, DeepSpeedConfig):
        _check_deepspeed(config.backend, config.optimizer)
    for name, value, meta in options(config):
        if value is not None:
            _check_option(name, value, meta)
    kfac, task = config.kfac, config.task
    for pattern in kfac.skip:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"kfac.skip: {pattern!r} is not a regular expression: {error}"
            ) from None
    if kfac.enabled:
        _check_kfac(kfac)
    trainer = config.trainer
    if trainer.accumulate > trainer.batch_size:
        raise UsageError(
            f"trainer.accumulate={trainer.accumulate} is more than "
            f"trainer.batch_size={trainer.batch_size}: a part needs an example"
        )
    if (config.model.name == "autoencoder") != (task.name == "reconstruction"):
        raise UsageError(
            f"model={config.model.name} does not fit task={task.name}: "
            "task=reconstruction goes with model=autoencoder"
        )
    masks = (config.model.name == "unet", config.data.name == "lgg", task.name == "segmentation")
    if any(masks) and not all(masks):
        raise UsageError(
            f"model={config.model.name} does not fit data={config.data.name} and task={task.name}: "
            "model=unet, data=lgg and task=segmentation go together (model=unet sets all three)"
        )


def _check_deepspeed(backend: DeepSpeedConfig, optimizer: OptimizerConfig) -> None:
    if backend.zero_stage == 3:
        raise UsageError(
            "backend.zero_stage=3: ZeRO 3 keeps no whole weight on a rank, which K-FAC's layers "
            "need; use backend.zero_stage=2, or backend=fsdp2, which shards weights too"
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


def _check_option(name: str, value: Any, meta: dict[str, Any]) -> None:
    choices, bounds = meta.get("choices", ()), meta.get("bounds", {})
    if choices and value not in choices:
        raise UsageError(f"{name}={value}: choose one of {', '.join(choices)}")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not math.isfinite(value) and not bounds:
        raise UsageError(f"{name}={value}: must be a finite number ({meta['help']})")
    holds = {
        "at least": lambda bound: value >= bound,
        "above": lambda bound: value > bound,
        "at most": lambda bound: value <= bound,
        "below": lambda bound: value < bound,
    }
    for word, bound in bounds.items():
        if not holds[word](bound) or value in (float("inf"), float("-inf")):
            said = " and ".join(f"{w} {b:g}" for w, b in bounds.items())
            raise UsageError(f"{name}={value}: must be {said} ({meta['help']})")
