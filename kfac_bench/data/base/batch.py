"""Examples that go through a model together, whatever they are made of."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

Batch = tuple[Any, ...]
"""Inputs, then targets. Examples come first: a tensor's first dimension and a list's items are
the n examples; tuples and dictionaries hold such things.

Images of one size are [n, C, H, W], float32 for a model, perhaps uint8 before `Data.prepare`; their
targets are int64 labels [n], or uint8 masks
[n, 1, H, W] of 0 and 1, in evaluation followed by int64 [n], the number of the volume that each
image is a slice of.
"""


def size(batch: Any) -> int:
    """How many examples there are; may be none."""
    if isinstance(batch, Tensor | list):
        return len(batch)
    parts = batch.values() if isinstance(batch, dict) else batch
    return size(next(iter(parts)))


def split(batch: Batch, parts: int) -> list[Batch]:
    """Consecutive parts whose sizes differ by one at most; some are empty if examples are few."""
    n = size(batch)
    cuts = [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]
    return [_map(batch, itemgetter(cut), on_lists=True) for cut in cuts]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """All tensors there; without waiting, where they come from pinned memory."""
    moved: Batch = _map(batch, lambda x: x.to(device, non_blocking=True))
    return moved


def channels_last(batch: Batch) -> Batch:
    """Images of one size with their channels innermost in memory; all else as it is."""
    images = batch[0]
    if isinstance(images, Tensor) and images.ndim == 4:
        return images.contiguous(memory_format=torch.channels_last), *batch[1:]
    return batch


def _map(x: Any, function: Callable[[Any], Any], on_lists: bool = False) -> Any:
    """``function`` of each tensor, or of tensors and lists as a whole."""
    if isinstance(x, Tensor) or (on_lists and isinstance(x, list)):
        return function(x)
    if isinstance(x, dict):
        return {k: _map(v, function, on_lists) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_map(v, function, on_lists) for v in x)
    return x
