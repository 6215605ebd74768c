"""What all datasets have in common: the base class of a dataset's options."""

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from kfac_bench.config.options import PLACE, RECORD, RESULT, Section, option
from kfac_bench.config.registry import DATASETS
from kfac_bench.errors import UsageError


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
    """Whether the dataset is read from the folder ``root``."""

    name: str = option(MISSING, "dataset", RESULT, choices=DATASETS)
    root: str | None = option(
        None,
        "folder of the dataset; demo: a small demo, made when first used. digits, patches, "
        "pictures and pydoc read no folder; fashion_mnist without one reads Debian's package",
        PLACE,
    )
    image_size: int = option(MISSING, "side of an input image in pixels", RESULT, at_least=1)
    workers: int = option(
        0,
        "processes per rank that read files ahead; 0: none. Datasets that fit in memory (digits, "
        "cifar10, fashion_mnist, patches, pictures and pydoc) ignore it",
        RESULT,
        resumable=True,
        per_node=True,
        at_least=0,
    )
    augment: bool = option(
        True,
        "change training images at random (imagefolder, shards and cifar10: crop and flip; lgg: "
        "turn; coco: flip)",
        RESULT,
    )
    on_error: str = option(
        "fatal",
        "what a damaged or missing file does: fatal: ends the run; skip: its examples are left out",
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
        """See :meth:`Section.check`."""
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

    def example_inputs(self, n: int) -> Any:
        """Return what a model takes for ``n`` examples, on torch's default device."""
        import torch

        return torch.empty(n, *self.shape()[0])
