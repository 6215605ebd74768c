"""Questions about paragraphs: SQuAD v1.1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config.options import RESULT, option
from kfac_bench.data.files import FilesConfig, by_split
from kfac_bench.data.token_inputs import VOCABULARY_SIZE, token_inputs

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.unreadable import Unreadable


@dataclass
class SquadConfig(FilesConfig):
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
        """See :meth:`DataConfig.build`."""
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

    def shape(self) -> tuple[tuple[int, ...], int]:
        """See :meth:`DataConfig.shape`."""
        return (self.sequence_length,), self.num_classes

    def example_inputs(self, n: int) -> Any:
        """See :meth:`DataConfig.example_inputs`."""
        return token_inputs(n, self.sequence_length)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        """See :meth:`FilesConfig.is_at`."""
        return any(root.glob("*-v1.1.json"))

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """See :meth:`FilesConfig.scan`."""
        from kfac_bench.data.language import squad

        counts, faults = squad.scan(root)
        return by_split(counts, "question"), faults
