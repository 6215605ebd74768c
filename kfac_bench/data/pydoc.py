"""Python's language reference, character by character."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config.data import DataConfig
from kfac_bench.config.options import RESULT, option

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data


@dataclass
class PydocConfig(DataConfig):
    """Python's language reference, character by character."""

    tasks: ClassVar[tuple[str, ...]] = ("language_model",)
    num_classes: ClassVar[int] = 96

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(64, "characters of an example", RESULT, at_least=1)

    def build(self, task: str) -> Data:
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.language import pydoc

        return pydoc.load(self.sequence_length)

    def shape(self) -> tuple[tuple[int, ...], int]:
        """See :meth:`DataConfig.shape`."""
        return (self.sequence_length,), self.num_classes

    def example_inputs(self, n: int) -> Any:
        """See :meth:`DataConfig.example_inputs`."""
        import torch

        return torch.zeros(n, self.sequence_length, dtype=torch.int64)
