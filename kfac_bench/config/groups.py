"""The groups of options with choices: their choices, and what all choices of a group share.

A group, such as ``model=``, has a base class here. The choices are subclasses in the ``options.py``
of the group's package. To add one, write a class and a row there, and one YAML file;
CONTRIBUTING.md shows an example.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import MISSING

from kfac_bench.config.options import (
    MOST_EPOCHS,
    PLACE,
    RECORD,
    RESULT,
    Section,
    check_patterns,
    option,
)
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Choices(Mapping[str, type[Any]]):
    """The choices of a group, by name: the class of the options of each choice.

    The package of the group imports the base classes below. So this file cannot import the package
    first, and reads the table of its ``options.py`` when a choice is asked for.
    """

    def __init__(self, package: str) -> None:
        self.file = f"kfac_bench/{package}/options.py"
        self._module = f"kfac_bench.{package}.options"

    @cached_property
    def _classes(self) -> Mapping[str, type[Any]]:
        classes: Mapping[str, type[Any]] = importlib.import_module(self._module).CHOICES
        return classes

    def __getitem__(self, name: str) -> type[Any]:
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


TABLES: Mapping[str, Choices] = {
    "model": Choices("models"),
    "data": Choices("data"),
    "task": Choices("tasks"),
    "optimizer": Choices("optimizers"),
    "schedule": Choices("schedules"),
    "backend": Choices("distributed"),
}
"""The choices of each group, by the group's name on the command line."""


@dataclass
class BackendConfig(Section):
    """The library that connects the ranks of a run and averages their gradients."""

    cuts_weights: ClassVar[bool] = False
    """True if ranks hold parts of weights in the usual order of their entries."""

    name: str = option(MISSING, "backend", RESULT, resumable=True, choices=TABLES["backend"])
    timeout_s: float = option(
        600.0,
        "seconds that a rank waits for the others before it gives up; horovod: only at the start",
        RECORD,
        above=0,
        at_most=1e9,  # Python's timers take no more than some 9e9 s.
    )

    def join(self, device: str) -> AbstractContextManager[Any]:
        """Join the other ranks of the run, and leave them at exit.

        Args:
            device: ``auto``, ``cpu`` or ``cuda``.

        Returns:
            A context manager whose value is the :class:`kfac_bench.distributed.backend.Backend`.
        """
        raise NotImplementedError


@dataclass
class DataConfig(Section):
    """The dataset."""

    tasks: ClassVar[tuple[str, ...]] = ("classification", "reconstruction")
    """Names of the tasks that the dataset fits."""
    channels: ClassVar[int] = 3
    """Channels of an image."""
    num_classes: ClassVar[int] = 1000
    """Classes that a dry run assumes, because a dry run reads no data."""
    reads_folder: ClassVar[bool] = False
    """True if the dataset is read from the folder ``root``."""
    has_photographs: ClassVar[bool] = False
    """True if ``auto_augment`` fits the images."""

    name: str = option(MISSING, "dataset", RESULT, choices=TABLES["data"])
    root: str | None = option(
        None,
        "folder of the dataset; demo: a small demo, made when first used. digits, patches, "
        "pictures and pydoc read no folder; fashion_mnist without one reads Debian's package",
        PLACE,
    )
    image_size: int = option(MISSING, "side of an input image in pixels", RESULT, at_least=1)
    workers: int = option(
        0,
        "processes per rank that read files ahead; 0: none. Datasets in memory (digits, cifar10, "
        "cifar100, fashion_mnist, mnist, patches, pictures, pydoc, a problem's TensorDataset, and "
        "text_parquet with task=language_model) ignore it",
        RESULT,
        resumable=True,
        per_node=True,
        at_least=0,
    )
    augment: bool = option(
        True,
        "change training images at random (imagefolder, parquet, shards, cifar10 and cifar100: "
        "crop and flip; lgg: turn; coco: flip)",
        RESULT,
    )
    auto_augment: str | None = option(
        None,
        "method of torchvision that changes training images further, for imagefolder, parquet, "
        "shards, cifar10 and cifar100; null: none",
        RESULT,
        choices=("randaugment", "trivialaugment"),
    )
    mixup: float = option(
        0.0,
        "mix pairs of training images and their labels (mixup): alpha of the Beta distribution of "
        "the share, such as 0.2; 0: no mixing. Each rank mixes its own examples",
        RESULT,
        at_least=0,
    )
    on_error: str = option(
        "fatal",
        "what a damaged or missing file does: fatal: ends the run; skip: its examples are left out "
        "(imagefolder, shards, parquet, coco, lgg, squad and problem; other data always end the "
        "run)",
        RESULT,
        choices=("fatal", "skip"),
    )
    changed: str = option(
        "refuse",
        "what a run does that continues on data that changed since its checkpoint: refuse: it "
        "ends; accept: it continues and records the change",
        RECORD,
        choices=("refuse", "accept"),
    )

    def check(self, config: Any) -> None:
        """Refuse a folder, a random augmentation or mixup where the dataset has no use for it."""
        if self.auto_augment is not None and not (self.has_photographs and self.augment):
            fitting = [name for name, data in TABLES["data"].items() if data.has_photographs]
            raise UsageError(
                f"data.auto_augment={self.auto_augment} needs data.augment=true and data="
                f"{' or '.join(fitting)}, not data.augment={str(self.augment).lower()} and data="
                f"{self.name}; set data.auto_augment=null"
            )
        if self.mixup and config.task.name != "classification":
            raise UsageError(
                f"data.mixup={self.mixup:g} mixes classes, which task={config.task.name} does not "
                "have: use task=classification, or set data.mixup=0"
            )
        if self.root is not None and not self.reads_folder:
            raise UsageError(
                f"data.root={self.root}: data={self.name} reads no folder. Remove data.root, or "
                "choose a dataset that reads one, such as data=imagefolder"
            )

    def build(self, task: str) -> Any:
        """Return the dataset, a :class:`kfac_bench.data.base.dataset.Data`.

        Args:
            task: Name of the task; most datasets ignore it.

        Raises:
            UsageError: A folder is missing, or its layout is wrong.
        """
        raise NotImplementedError

    def shape(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of one input and the number of classes, without reading data."""
        return (self.channels, self.image_size, self.image_size), self.num_classes

    def example_inputs(self, n: int, task: str) -> Any:
        """Return the inputs of a model for ``n`` examples of a task, on torch's default device."""
        import torch

        return torch.empty(n, *self.shape()[0])


@dataclass
class ModelConfig(Section):
    """The network; its input shape and its number of classes come from the dataset."""

    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    """Names of the tasks that the model fits."""
    usual_data: ClassVar[str | None] = None
    """Dataset that ``kfac-plan simulate`` assumes if none is named; None: the default one."""

    name: str = option(MISSING, "architecture", RESULT, choices=TABLES["model"])
    weights: str | None = option(
        None,
        "weights to start from: a run directory, a file (.safetensors, or of torch.save), or a "
        "folder with model.safetensors; the state of the optimizer is not read",
        RESULT,
    )

    @classmethod
    def architectures(cls) -> Sequence[str]:
        """Return the names that the option ``model.architecture`` may have, if there is one."""
        return ()

    @classmethod
    def option_for(cls, name: str) -> str:
        """Return the option that chooses a library's network by its name there, or nothing."""
        return f"model.architecture={name}" if name in cls.architectures() else ""

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """Return the network with random weights.

        A dry run calls this method on torch's meta device, so it must not look at values.

        Args:
            shape: Shape of one input: (C, H, W) of an image, (tokens,) of a text.
            num_classes: Number of classes, or of tokens in the vocabulary.
            task: Name of the task; most models ignore it.
        """
        raise NotImplementedError


ParameterGroup = dict[str, Any]
"""A parameter group of torch.optim: ``params``, and settings that differ from the others'."""


@dataclass
class OptimizerConfig(Section):
    """The optimizer; K-FAC, if it is on, preconditions the gradients before its step."""

    is_elementwise: ClassVar[bool] = True
    """True if each entry of a weight is updated by itself; if so, ZeRO may cut weights anywhere."""
    fits_dtensors: ClassVar[bool] = True
    """True if the optimizer can step weights that FSDP2 distributes over ranks."""

    name: str = option(MISSING, "optimizer", RESULT, choices=TABLES["optimizer"])
    lr: float = option(MISSING, "learning rate", RESULT, above=0)
    weight_decay: float = option(
        0.0,
        "L2 penalty (sgd, adam, lars, shampoo), decoupled decay (adamw, muon, soap, eigen_adam) "
        "or part of the update (lamb, fused_lamb)",
        RESULT,
        at_least=0,
    )
    no_decay: list[str] = option(
        [],
        "regular expressions of parameters without decay: by name, or by the class of their layer",
        RESULT,
    )

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        """Return the optimizer.

        Args:
            groups: The trained parameters; a group without decay has its own ``weight_decay``.
            model: The model of these parameters; most optimizers ignore it.
        """
        raise NotImplementedError

    def check(self, config: Any) -> None:
        """Refuse patterns that are no regular expressions."""
        check_patterns("optimizer.no_decay", self.no_decay)


@dataclass
class ScheduleConfig(Section):
    """The learning rate over time: ``optimizer.lr`` times a factor.

    The factor is a pure function of the step, so a resumed run continues exactly.
    """

    name: str = option(MISSING, "shape after the warm-up", RESULT, choices=TABLES["schedule"])
    warmup_epochs: float = option(
        0.0,
        "epochs in which the rate rises linearly",
        RESULT,
        at_least=0,
        at_most=MOST_EPOCHS,
    )
    warmup_share: float = option(
        0.0, "share of all steps in which the rate rises linearly", RESULT, at_least=0, below=1
    )
    warmup_start: float = option(
        0.0, "factor at the start of the warm-up", RESULT, at_least=0, at_most=1
    )
    base_batch_size: int | None = option(
        None,
        "batch size that optimizer.lr is meant for: the rate is scaled linearly to "
        "trainer.batch_size; null: no scaling",
        RESULT,
        at_least=1,
    )

    def factor(self, step: int, steps_per_epoch: int, max_steps: int, batch_size: int) -> float:
        """Return the factor of ``optimizer.lr`` in the update after ``step`` updates.

        The linear scaling with the batch size and the gradual warm-up follow Goyal et al. (2017),
        sections 2.1 and 2.2. The n-th of n updates of the warm-up already has the full rate.
        """
        scale = 1.0 if self.base_batch_size is None else batch_size / self.base_batch_size
        warmup = self.warmup_steps(steps_per_epoch, max_steps)
        if step < warmup:
            rise = (1 - self.warmup_start) * (step + 1) / warmup
            return scale * (self.warmup_start + rise)
        return scale * self.after_warmup(step, warmup, steps_per_epoch, max_steps)

    def warmup_steps(self, steps_per_epoch: int, max_steps: int) -> int:
        """Return the number of updates in which the rate rises."""
        if self.warmup_share:
            return round(self.warmup_share * max_steps)
        return round(self.warmup_epochs * steps_per_epoch)

    def after_warmup(self, step: int, warmup: int, steps_per_epoch: int, max_steps: int) -> float:
        """Return the factor in the update after ``step`` updates, without the batch's scaling.

        Args:
            step: Updates done, at least ``warmup``.
            warmup: Updates of the warm-up.
            steps_per_epoch: Updates of one epoch.
            max_steps: Updates of the whole run.
        """
        raise NotImplementedError

    def notes(self, steps_per_epoch: int, max_steps: int) -> list[str]:
        """Return a line for each part of the schedule that a run of this length never reaches."""
        warmup = self.warmup_steps(steps_per_epoch, max_steps)
        if warmup <= max_steps:
            return []
        return [
            f"the warm-up of the learning rate takes {warmup} steps and the run only {max_steps}, "
            "so the rate never reaches optimizer.lr"
        ]

    def check(self, config: Any) -> None:
        """Refuse two lengths of the warm-up."""
        if self.warmup_epochs and self.warmup_share:
            raise UsageError(
                f"schedule.warmup_epochs={self.warmup_epochs:g} and "
                f"schedule.warmup_share={self.warmup_share:g} both set the length of the warm-up: "
                "set one of them to 0"
            )


@dataclass
class TaskConfig(Section):
    """The learning objective, and the validation metric that ``trainer.target`` refers to."""

    likelihood: ClassVar[str]
    """Distribution that the model's output stands for; a dry run counts labels by it."""
    share: ClassVar[str] = ""
    """The name of the metric, if it is a share of at most 1."""

    name: str = option(MISSING, "task", RESULT, choices=TABLES["task"])
    label_smoothing: float = option(
        0.0, "label smoothing of the cross-entropy", RESULT, at_least=0, below=1
    )

    def build(self, data: Any) -> Any:
        """Return the :class:`kfac_bench.tasks.task.Task` for a dataset.

        Args:
            data: The :class:`kfac_bench.data.base.dataset.Data` that is trained on.
        """
        raise NotImplementedError

    def check(self, config: Any) -> None:
        """Refuse a target in percent, and label smoothing for tasks that smooth no labels."""
        target = config.trainer.target
        if self.share and target is not None and target > 1:
            raise UsageError(
                f"trainer.target={target:g}: {self.share} is a share of at most 1. For "
                f"{target:g} % write trainer.target={target / 100:g}"
            )
        if self.label_smoothing and self.name != "classification":
            raise UsageError(
                f"task.label_smoothing={self.label_smoothing:g} has no effect on task={self.name}. "
                "Only task=classification smooths labels: set task.label_smoothing=0"
            )

    def output(self, model: Any, inputs: Any) -> Any:
        """Return the output of the model, from which a dry run counts work.

        Args:
            model: The network, on torch's meta device.
            inputs: What ``DataConfig.example_inputs`` returns.
        """
        # A detector's forward depends on values; its outline does the same work without them.
        return getattr(model, "outline", model)(inputs)

    def try_out(self, model: Any, data: Any) -> None:
        """Try one batch before a run begins. By default nothing is tried.

        Raises:
            UsageError: The model, the data and the loss do not fit.
        """
