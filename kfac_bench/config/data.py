"""What all datasets have in common: the base class of a dataset's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from kfac_bench.config.options import PLACE, RESULT, Section, option
from kfac_bench.config.registry import DATASETS


@dataclass
class DataConfig(Section):
    """The dataset."""

    tasks: ClassVar[tuple[str, ...]] = ("classification", "reconstruction")
    """Names of the tasks that the dataset fits."""
    channels: ClassVar[int] = 3
    """Channels of an image."""
    num_classes: ClassVar[int] = 1000
    """Classes that a dry run assumes, because a dry run reads no data."""

    name: str = option(MISSING, "dataset", RESULT, choices=DATASETS)
    root: str | None = option(
        None,
        "its folder (digits, pydoc, pictures ship in packages); demo: a small one, made when first "
        "used",
        PLACE,
    )
    image_size: int = option(MISSING, "side of an input image in pixels", RESULT, at_least=1)
    workers: int = option(
        0,
        "loader processes per rank (imagefolder, shards, lgg, coco)",
        RESULT,
        resumable=True,
        per_node=True,
        at_least=0,
    )
    augment: bool = option(
        True,
        "random changes while training (cifar10: crops, flips; lgg: turns; coco: flips)",
        RESULT,
    )
    on_error: str = option(
        "fatal",
        "an example whose file is damaged or missing (sets of files): left out and named, or not",
        RESULT,
        choices=("fatal", "skip"),
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


@dataclass
class PydocConfig(DataConfig):
    """Python's language reference, by character."""

    tasks: ClassVar[tuple[str, ...]] = ("language_model",)

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(64, "characters of an example", RESULT, at_least=1)

    def shape(self) -> tuple[tuple[int, ...], int]:
        """See :meth:`DataConfig.shape`."""
        return (self.sequence_length,), SYMBOLS

    def example_inputs(self, n: int) -> Any:
        """See :meth:`DataConfig.example_inputs`."""
        import torch

        return torch.zeros(n, self.sequence_length, dtype=torch.int64)


@dataclass
class PicturesConfig(DataConfig):
    """Noisy patches of scikit-image's pictures; ``image_size`` is a patch's side."""

    tasks: ClassVar[tuple[str, ...]] = ("denoising",)
    channels: ClassVar[int] = 1
    num_classes: ClassVar[int] = 1

    noise: float = option(0.15, "its standard deviation, of pixels in [0, 1]", RESULT, above=0)


@dataclass
class LGGConfig(DataConfig):
    """Volumes of MRI slices with tumour masks."""

    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    num_classes: ClassVar[int] = 1

    eval_share: float = option(
        0.1,
        "of the patients, for evaluation; the same ones for all seeds",
        RESULT,
        above=0,
        below=1,
    )


@dataclass
class COCOConfig(DataConfig):
    """Pictures with boxes and masks; ``image_size`` is the shorter side in evaluation."""

    tasks: ClassVar[tuple[str, ...]] = ("detection",)
    num_classes: ClassVar[int] = 81

    max_size: int = option(1333, "longer side of an image in pixels, at most", RESULT, at_least=1)
    min_sizes: list[int] = option(
        [], "shorter sides in training, of which one is drawn each time; []: image_size", RESULT
    )
    year: int | None = option(None, "2014, 2017: which one, where a folder has several", RESULT)

    def shape(self) -> tuple[tuple[int, ...], int]:
        """See :meth:`DataConfig.shape`."""
        return (self.channels, self.image_size, self.max_size), self.num_classes


@dataclass
class TextConfig(DataConfig):
    """Prepared text with masked tokens."""

    tasks: ClassVar[tuple[str, ...]] = ("pretraining",)

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(128, "tokens of an example", RESULT, at_least=8)
    masked: float = option(0.15, "share of the tokens that are predicted", RESULT, above=0, below=1)
    max_predictions: int = option(
        20, "tokens of an example that are predicted, at most", RESULT, at_least=1
    )

    def shape(self) -> tuple[tuple[int, ...], int]:
        """See :meth:`DataConfig.shape`."""
        return (self.sequence_length,), VOCABULARY

    def example_inputs(self, n: int) -> Any:
        """See :meth:`DataConfig.example_inputs`."""
        return text_inputs(n, self.sequence_length, self.max_predictions)


@dataclass
class SquadConfig(DataConfig):
    """Questions about paragraphs."""

    tasks: ClassVar[tuple[str, ...]] = ("question_answering",)

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(
        384, "tokens of a question and a window of its paragraph", RESULT, at_least=8
    )
    stride: int = option(
        128, "tokens from one window of a paragraph to the next", RESULT, at_least=1
    )
    question_length: int = option(64, "tokens of a question, at most", RESULT, at_least=1)
    vocabulary_file: str | None = option(
        None, "the model's vocab.txt; null: the one in data.root", RESULT
    )

    def shape(self) -> tuple[tuple[int, ...], int]:
        """See :meth:`DataConfig.shape`."""
        return (self.sequence_length,), VOCABULARY

    def example_inputs(self, n: int) -> Any:
        """See :meth:`DataConfig.example_inputs`."""
        return text_inputs(n, self.sequence_length)


VOCABULARY = 30522
"""Tokens that a dry run assumes: those of the published uncased models."""
SYMBOLS = 96
"""Symbols of pydoc."""


def text_inputs(n: int, length: int, predictions: int | None = None) -> Any:
    """Return BERT's inputs of the right shapes, on torch's default device."""
    import torch

    ids = torch.zeros(n, length, dtype=torch.int64)
    inputs = {"input_ids": ids, "token_type_ids": ids, "attention_mask": ids == 0}
    if predictions is not None:
        inputs["positions"] = torch.zeros(n, predictions, dtype=torch.int64)
    return inputs
