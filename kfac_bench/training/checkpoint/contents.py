"""The content of a shard: plain tensors. kfac_bench.torch_archive checks the file first.

torch.load with weights_only runs no code, but it reads tensors that no checkpoint of ours has and
that training cannot use. A file from somebody else may hold such tensors on purpose.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOST_LEVELS = 100
"""Most levels of containers in a shard. A state of ours has about 6."""
MOST_PARTS = 1_000_000
"""Most entries of all containers in a shard together."""


def check_tensors(shard: Any) -> None:
    """Check that all tensors in nested containers are plain, and that the containers are small.

    Raises:
        ValueError: A tensor is sparse, quantized, complex or of another unusual kind, or several
            of its elements share one place in memory. The message names the tensor. Or a container
            occurs in itself or so often that no program could read all of it.
    """
    remaining: list[tuple[tuple[Any, ...], Any]] = [((), shard)]
    count = 0
    while remaining:
        keys, value = remaining.pop()
        count += 1
        if len(keys) > MOST_LEVELS or count > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_LEVELS} levels or {MOST_PARTS} parts")
        if isinstance(value, Tensor):
            if oddity := _oddity(value):
                raise ValueError(f"{'.'.join(map(str, keys))} {oddity}")
        elif isinstance(value, dict | list | tuple):
            parts: Iterable[tuple[Any, Any]]
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            remaining += [((*keys, key), part) for key, part in parts]


def _oddity(x: Tensor) -> str | None:
    """Return why a tensor is not plain, as the rest of a sentence; None if it is plain."""
    if x.layout is not torch.strided:
        return f"is sparse ({x.layout})"
    if x.is_quantized:
        return f"is quantized ({x.dtype})"
    if x.is_complex():
        return f"is complex ({x.dtype})"
    if type(x) not in (Tensor, nn.Parameter) or x.is_nested or x.device.type != "cpu":
        return f"is no plain tensor ({type(x).__name__} on {x.device})"
    if _overlaps(x):
        return f"has the shape {list(x.shape)} with the strides {list(x.stride())}, which overlap"
    return None


def _overlaps(x: Tensor) -> bool:
    """Return whether two elements may share one place in memory, as after `expand`."""
    if x.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
