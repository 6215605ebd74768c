"""An LSTM that models language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.models import ModelConfig
from kfac_bench.config.options import RESULT, option

if TYPE_CHECKING:
    from torch import nn


@dataclass
class LSTMConfig(ModelConfig):
    """An LSTM that gives each symbol of a text the logits of the next symbol."""

    tasks: ClassVar[tuple[str, ...]] = ("language_model",)

    embedding: int = option(64, "width of a symbol's embedding", RESULT, at_least=1)
    width: int = option(128, "units of a layer", RESULT, at_least=1)
    layers: int = option(1, "LSTM layers, one above the other", RESULT, at_least=1)

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        from kfac_bench.models.networks.lstm import LSTMLanguageModel

        return LSTMLanguageModel(num_classes, self.embedding, self.width, self.layers)
