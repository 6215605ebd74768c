"""A copy of a state that the training does not touch: what is written while it goes on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

Key = tuple[Any, ...]


def snapshot(state: Any) -> Any:
    """Tensors on the host, apart from ``state``'s; equal views of one memory stay one tensor.

    A view is copied alone: ``torch.save`` would write all of the memory that it looks at.
    """
    return _copy(state, {})


def _copy(x: Any, seen: dict[Key, Tensor]) -> Any:
    if isinstance(x, Tensor):
        key = (x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype)
        if key not in seen:
            made = x.detach().to("cpu", copy=True)
            seen[key] = made
        return seen[key]
    if isinstance(x, dict):
        made_dict = copy.copy(x)  # of its own type, with what hangs on it: versions of modules
        for k, v in x.items():
            made_dict[k] = _copy(v, seen)
        return made_dict
    if isinstance(x, list | tuple):
        return type(x)(_copy(v, seen) for v in x)
    return copy.deepcopy(x)


def nbytes(state: Any) -> int:
    """Bytes of all tensors in a snapshot, each once."""
    return sum({id(t): t.nbytes for t in _tensors(state)}.values())


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [t for part in parts for t in _tensors(part)]
