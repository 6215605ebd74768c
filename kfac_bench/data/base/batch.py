"""A batch: examples that go through a model together.

The functions here count, split and move batches. They work for every task, because they look only
at tensors, lists, tuples and dictionaries.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

Batch = tuple[Any, ...]
"""The inputs, then the targets of n examples.

The first dimension of a tensor counts the examples; so do the items of a list. Tuples and
dictionaries contain tensors and lists.

Images of one size are [n, C, H, W]. A model gets them as float32; before `Data.prepare` they may
be uint8. Their targets are int64 labels [n], or uint8 masks [n, 1, H, W] of 0 and 1. In evaluation
the masks are followed by int64 [n], the number of the volume that each image belongs to.
"""


def size(batch: Any) -> int:
    """Return the number of examples, which may be 0. Parts such as a number do not count."""
    if isinstance(batch, Tensor | list):
        return len(batch)
    parts = batch.values() if isinstance(batch, dict) else batch
    return next(size(part) for part in parts if isinstance(part, Tensor | list | tuple | dict))


def split(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into consecutive parts, whose sizes differ by at most one.

    Some parts are empty if there are fewer examples than parts.
    """
    n = size(batch)
    cuts = [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]
    return [_map(batch, itemgetter(cut), on_lists=True) for cut in cuts]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move all tensors to the device. The host does not wait for the copies."""
    moved: Batch = _map(batch, lambda x: _pinned(x, device).to(device, non_blocking=True))
    return moved


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor from which a copy to a GPU does not wait for the GPU's queued work."""
    return x.pin_memory() if device.type == "cuda" and x.is_cpu and not x.is_pinned() else x


def channels_last(batch: Batch) -> Batch:
    """Store images of one size with the channels innermost; leave all other inputs unchanged."""
    images = batch[0]
    if isinstance(images, Tensor) and images.ndim == 4:
        return images.contiguous(memory_format=torch.channels_last), *batch[1:]
    return batch


def _map(x: Any, function: Callable[[Any], Any], on_lists: bool = False) -> Any:
    """Apply `function` to each tensor and, if `on_lists`, to each list as a whole."""
    if isinstance(x, Tensor) or (on_lists and isinstance(x, list)):
        return function(x)
    if isinstance(x, dict):
        return {k: _map(v, function, on_lists) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_map(v, function, on_lists) for v in x)
    return x
