"""Text with masked tokens, which ``kfac-data prepare`` has made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config.options import RESULT, option
from kfac_bench.data.files import FilesConfig
from kfac_bench.data.token_inputs import VOCABULARY_SIZE, token_inputs

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.base.unreadable import Unreadable


@dataclass
class TextConfig(FilesConfig):
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
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.language import masked_text

        return masked_text.load(
            self.folder(),
            self.sequence_length,
            self.workers,
            masked=self.masked,
            max_predictions=self.max_predictions,
        )

    def shape(self) -> tuple[tuple[int, ...], int]:
        """See :meth:`DataConfig.shape`."""
        return (self.sequence_length,), self.num_classes

    def example_inputs(self, n: int) -> Any:
        """See :meth:`DataConfig.example_inputs`."""
        return token_inputs(n, self.sequence_length, self.max_predictions)

    @classmethod
    def is_at(cls, root: Path) -> bool:
        """See :meth:`FilesConfig.is_at`."""
        from kfac_bench.data.language import text_shards

        return bool(text_shards.lengths(root))

    @classmethod
    def scan(cls, root: Path) -> tuple[str, list[Unreadable]]:
        """See :meth:`FilesConfig.scan`."""
        from kfac_bench.data.language import masked_text

        return masked_text.scan(root)
