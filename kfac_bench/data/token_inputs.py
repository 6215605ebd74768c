"""Inputs of BERT without data: what a dry run passes to a model."""

from typing import Any

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
