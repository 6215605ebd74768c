"""BERT (Devlin et al. 2019) from transformers, with the heads and the inputs of our tasks.

Parameters have the names of transformers' own checkpoints.
"""

from collections.abc import Mapping

import transformers
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertForPreTraining, BertForQuestionAnswering

SIZES = {"bert_tiny": (2, 128), "bert_base": (12, 768), "bert_large": (24, 1024)}
"""Layers and hidden size. A head has 64 units, a feed-forward layer 4 times the hidden size."""

MAX_POSITIONS = 512

Inputs = Mapping[str, Tensor]
"""int64 `input_ids` and `token_type_ids` [n, L], bool `attention_mask` [n, L]."""


def config(
    name: str, vocabulary_size: int, dropout: float, width: int | None, depth: int | None
) -> BertConfig:
    """Return the configuration of a size by name; `width` and `depth` replace the named sizes."""
    layers, hidden = SIZES[name]
    layers, hidden = depth or layers, width or hidden
    made = BertConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        intermediate_size=4 * hidden,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=MAX_POSITIONS,
    )
    # torch's scaled dot-product attention takes masks of True and False.
    made._attn_implementation = "sdpa"
    return made


class PretrainingBert(nn.Module):
    """Masked-token logits [n, P, V] at `positions` (int64 [n, P]), and next-sentence logits [n, 2].

    The head computes logits at these places alone, which saves most of its memory and time.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        made = BertForPreTraining(config)
        self.bert, self.cls = made.bert, made.cls

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return both logits; the first next-sentence logit means that the second part follows."""
        hidden, pooled = _encode(self.bert, inputs)
        places = inputs["positions"][..., None].expand(-1, -1, hidden.shape[-1])
        logits, next_logits = self.cls(hidden.gather(1, places), pooled)
        return logits, next_logits


class QuestionAnsweringBert(nn.Module):
    """Logits [n, 2, L] of the tokens where an answer begins and ends."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        made = BertForQuestionAnswering(config)
        self.bert, self.qa_outputs = made.bert, made.qa_outputs

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.qa_outputs(_encode(self.bert, inputs)[0])
        return logits.transpose(1, 2)


def _encode(bert: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the hidden states [n, L, H], and the first one after the pooler, if any."""
    # transformers would read the values of a mask of two dimensions, and the CPU would wait for
    # the GPU. Version 5 takes a mask of four dimensions as it is, version 4 one of three.
    mask = inputs["attention_mask"][:, None]
    is_old = transformers.__version__.startswith("4.")
    mask = mask.expand(-1, mask.shape[-1], -1) if is_old else mask[:, None]
    encoded = bert(
        inputs["input_ids"], token_type_ids=inputs["token_type_ids"], attention_mask=mask
    )
    return encoded.last_hidden_state, encoded.pooler_output
