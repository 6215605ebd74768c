"""BERT in three sizes, from transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.models import ModelConfig
from kfac_bench.config.options import RESULT, option
from kfac_bench.errors import MissingPackageError, UsageError

if TYPE_CHECKING:
    from torch import nn


@dataclass
class BertConfig(ModelConfig):
    """BERT; its head comes from the task, its vocabulary from the dataset."""

    tasks: ClassVar[tuple[str, ...]] = ("pretraining", "question_answering")

    dropout: float = option(
        0.1, "dropout of hidden states and of attention", RESULT, at_least=0, below=1
    )
    hidden: int | None = option(
        None, "hidden size; null: the size that belongs to the name", RESULT, at_least=1
    )
    layers: int | None = option(
        None, "encoder layers; null: the number that belongs to the name", RESULT, at_least=1
    )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        try:
            from kfac_bench.models.networks import bert
        except ImportError:
            raise MissingPackageError("transformers", f"model={self.name}") from None
        if shape[0] > bert.MAX_POSITIONS:
            raise UsageError(
                f"data.sequence_length={shape[0]}: model={self.name} has {bert.MAX_POSITIONS} "
                "positions; set a smaller data.sequence_length"
            )
        sizes = bert.config(self.name, num_classes, self.dropout, self.hidden, self.layers)
        if sizes.hidden_size % sizes.num_attention_heads:
            raise UsageError(
                f"model.hidden={sizes.hidden_size}: {sizes.num_attention_heads} heads of 64 units "
                f"cannot share it. Set a multiple of 64, such as {64 * sizes.num_attention_heads}"
            )
        heads = {
            "pretraining": bert.PretrainingBert,
            "question_answering": bert.QuestionAnsweringBert,
        }
        return heads[task](sizes)
