"""The datasets: a table of all, and the options of texts and of a user's own problem.

:mod:`kfac_bench.data.image_options` and :mod:`kfac_bench.data.folder_options` have the options of
the others. The three files import no torch: ``kfac-train --help`` and the completion read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config import problem_file
from kfac_bench.config.groups import DataConfig
from kfac_bench.config.options import PLACE, RESULT, option
from kfac_bench.data.folder_options import (
    FilesConfig,
    ImageFolderConfig,
    ParquetConfig,
    ShardsConfig,
    TableConfig,
    by_split,
)
from kfac_bench.data.image_options import (
    CIFAR10Config,
    CIFAR100Config,
    COCOConfig,
    DigitsConfig,
    FashionMNISTConfig,
    LGGConfig,
    MNISTConfig,
    PatchesConfig,
    PicturesConfig,
)
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config.train import TrainConfig
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.files import Unreadable
    from kfac_bench.data.problem_data import ProblemData


VOCABULARY_SIZE = 30522
"""Tokens that a dry run assumes: those of the published uncased models."""


def token_inputs(n: int, length: int, predictions: int | None = None) -> Any:
    """Return inputs of the right shapes, on torch's default device.

    Args:
        n: Number of examples.
        length: Tokens of an example.
        predictions: Tokens of an example that are predicted; None if the task predicts no tokens.
    """
    import torch

    ids = torch.zeros(n, length, dtype=torch.int64)
    inputs = {"input_ids": ids, "token_type_ids": ids, "attention_mask": ids == 0}
    if predictions is not None:
        inputs["positions"] = torch.zeros(n, predictions, dtype=torch.int64)
    return inputs


@dataclass
class ProblemDataConfig(DataConfig):
    """The data of a user's own problem; choose it with problem=FILE."""

    tasks: ClassVar[tuple[str, ...]] = ("problem",)

    image_size: int = option(0, "the problem decides", RESULT, at_least=0, at_most=0)
    file: str | None = option(None, "Python file of the problem; problem=FILE sets it", PLACE)
    arguments: str = option(
        "", "arguments of the file's function; problem.NAME=VALUE sets them", RESULT
    )
    sha256: str = option("", "hash of the problem's file; problem=FILE sets it", RESULT)

    def build(self, task: str) -> ProblemData:
        from kfac_bench.data.problem_data import ProblemData

        return ProblemData(self._named(), self.workers, self.on_error)

    def shape(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of the first tensor of an example, which is read from the data."""
        return self.build("problem").shape, 0

    def example_inputs(self, n: int, task: str) -> Any:
        """Return a batch of ``n`` examples with the shapes of the first examples."""
        return self.build("problem").example_batch(n)

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        file = self._named()
        for group, section in (("model", config.model), ("task", config.task)):
            own = (getattr(section, "file", None), getattr(section, "arguments", None))
            if own != (self.file, self.arguments):
                raise UsageError(
                    f"{group}={section.name} does not belong to {self.file}. Choose model, data "
                    "and task together with problem=FILE"
                )
        if self.sha256 != file.sha256:
            raise UsageError(
                f"data.sha256={self.sha256} is not the hash of {self.file}, which is "
                f"{file.sha256}. Remove data.sha256: problem=FILE sets it"
            )
        examples = len(file.problem.train)
        if config.trainer.drop_last and config.trainer.batch_size > examples:
            raise UsageError(
                f"trainer.batch_size={config.trainer.batch_size} is larger than the training set "
                f"of {self.file}, which has {examples} examples. Choose a smaller batch_size"
            )

    def _named(self) -> problem_file.ProblemFile:
        return problem_file.named(self.file, "data.file", self.arguments)


class _TokenSequences:
    """A dataset whose inputs are sequences of tokens."""

    num_classes: ClassVar[int]
    sequence_length: int

    def shape(self) -> tuple[tuple[int, ...], int]:
        return (self.sequence_length,), self.num_classes


@dataclass
class PydocConfig(_TokenSequences, DataConfig):
    """Python's language reference, character by character."""

    tasks: ClassVar[tuple[str, ...]] = ("language_model",)
    num_classes: ClassVar[int] = 96

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(64, "characters of an example", RESULT, at_least=1)

    def build(self, task: str) -> Data:
        from kfac_bench.data.language import pydoc

        return pydoc.load(self.sequence_length)

    def example_inputs(self, n: int, task: str) -> Any:
        import torch

        return torch.zeros(n, self.sequence_length, dtype=torch.int64)


@dataclass
class SquadConfig(_TokenSequences, FilesConfig):
    """Questions about paragraphs: SQuAD v1.1."""

    tasks: ClassVar[tuple[str, ...]] = ("question_answering",)
    num_classes: ClassVar[int] = VOCABULARY_SIZE

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(
        384, "tokens of a question and a window of its paragraph", RESULT, at_least=8
    )
    stride: int = option(
        128, "tokens from the start of a window of a paragraph to the next", RESULT, at_least=1
    )
    question_length: int = option(64, "tokens after which a question is cut", RESULT, at_least=1)
    vocabulary_file: str | None = option(
        None, "the model's vocab.txt; null: the one in data.root", RESULT
    )

    def build(self, task: str) -> Data:
        from kfac_bench.data.language import squad_windows

        return squad_windows.load(
            self.folder(),
            self.sequence_length,
            self.workers,
            vocabulary_file=Path(self.vocabulary_file) if self.vocabulary_file else None,
            stride=self.stride,
            question_length=self.question_length,
            on_error=self.on_error,
        )

    def example_inputs(self, n: int, task: str) -> Any:
        return token_inputs(n, self.sequence_length)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        return any(root.glob("*-v1.1.json"))

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.language import squad

        counts, faults = squad.scan(root)
        return by_split(counts, "question"), faults


@dataclass
class TextConfig(_TokenSequences, FilesConfig):
    """Text with masked tokens, which ``kfac-data prepare`` has made."""

    tasks: ClassVar[tuple[str, ...]] = ("pretraining",)
    num_classes: ClassVar[int] = VOCABULARY_SIZE

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(128, "tokens of an example", RESULT, at_least=8)
    masked: float = option(0.15, "share of the tokens that are predicted", RESULT, above=0, below=1)
    max_predictions: int = option(
        20, "largest number of tokens of an example that are predicted", RESULT, at_least=1
    )

    def build(self, task: str) -> Data:
        from kfac_bench.data.language import masked_text

        return masked_text.load(
            self.folder(),
            self.sequence_length,
            self.workers,
            masked=self.masked,
            max_predictions=self.max_predictions,
        )

    def example_inputs(self, n: int, task: str) -> Any:
        return token_inputs(n, self.sequence_length, self.max_predictions)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        from kfac_bench.data.language import text_shards

        return bool(text_shards.lengths(root))

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.language import masked_text

        return masked_text.scan(root)


@dataclass
class TextParquetConfig(TextConfig, TableConfig):
    """Text in Parquet or Arrow files, which is tokenized when first used."""

    tasks: ClassVar[tuple[str, ...]] = ("language_model", "pretraining")

    text_column: str | None = option(None, "column of text; null: text or content", RESULT)
    vocabulary_file: str | None = option(
        None,
        "vocab.txt of a WordPiece vocabulary; null: the one in data.root, or else a new one",
        RESULT,
    )
    vocabulary_size: int = option(
        VOCABULARY_SIZE, "largest number of tokens of a new vocabulary", RESULT, at_least=8
    )

    def build(self, task: str) -> Data:
        from kfac_bench.data.language import table_text

        table = table_text.TextTable(
            self.folder(),
            self.text_column,
            self.train_split,
            self.eval_split,
            self.eval_share,
            self.sequence_length,
            Path(self.vocabulary_file) if self.vocabulary_file else None,
            self.vocabulary_size,
        )
        if task == "language_model":
            return table_text.load_windows(table)
        return table_text.load_masked(table, self.workers, self.masked, self.max_predictions)

    def shape(self) -> tuple[tuple[int, ...], int]:
        return (self.sequence_length,), self.vocabulary_size

    def example_inputs(self, n: int, task: str) -> Any:
        import torch

        if task == "language_model":
            return torch.zeros(n, self.sequence_length, dtype=torch.int64)
        return super().example_inputs(n, task)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        from kfac_bench.data.base import tables

        return tables.is_at(root)

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        from kfac_bench.data.language import table_text

        return table_text.scan(root), []


CHOICES: Mapping[str, type[DataConfig]] = {
    "cifar10": CIFAR10Config,
    "cifar100": CIFAR100Config,
    "coco": COCOConfig,
    "digits": DigitsConfig,
    "fashion_mnist": FashionMNISTConfig,
    "imagefolder": ImageFolderConfig,
    "lgg": LGGConfig,
    "mnist": MNISTConfig,
    "parquet": ParquetConfig,
    "patches": PatchesConfig,
    "pictures": PicturesConfig,
    "problem": ProblemDataConfig,
    "pydoc": PydocConfig,
    "shards": ShardsConfig,
    "squad": SquadConfig,
    "text": TextConfig,
    "text_parquet": TextParquetConfig,
}


def verify(root: Path) -> tuple[str, list[Unreadable]]:
    """Read every file of the dataset in `root`.

    Returns:
        The name of the dataset and what it has, in words; and its faults.

    Raises:
        UsageError: The folder does not exist, has an unknown layout, or nothing in it can be used.
    """
    if not root.exists():
        raise UsageError(f"{root}: no such folder")
    # A folder has one layout; if it has several, the first one in the table counts.
    for name, dataset in CHOICES.items():
        if issubclass(dataset, FilesConfig) and dataset.is_at(root):
            content, faults = dataset.scan(root)
            return f"{name}: {content}", faults
    names = ", ".join(name for name, dataset in CHOICES.items() if issubclass(dataset, FilesConfig))
    raise UsageError(
        f"{root} has the layout of no known dataset ({names}). "
        "kfac-data make-demo writes an example of each layout"
    )
