"""Snapshots: copies of a state, which are written to disk while training changes the original."""

import copy
from typing import Any

from torch import Tensor


def snapshot(state: Any) -> Any:
    """Return a copy of `state` whose tensors are on the CPU and share no memory with `state`.

    Two tensors that are the same view of one memory (tied weights) stay one tensor.
    """
    return _copy(state, {})


def _copy(x: Any, seen: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(x, Tensor):
        view = (x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype)
        if view not in seen:
            # A copy of the view alone: torch.save writes the whole memory behind a tensor, which
            # may be much larger than the view.
            seen[view] = x.detach().to("cpu", copy=True)
        return seen[view]
    if isinstance(x, dict):
        # copy.copy keeps the dict's own type and attributes: state_dict() keeps versions there.
        copied = copy.copy(x)
        for k, v in x.items():
            copied[k] = _copy(v, seen)
        return copied
    if isinstance(x, list | tuple):
        return type(x)(_copy(v, seen) for v in x)
    return copy.deepcopy(x)


def nbytes(state: Any) -> int:
    """Return the bytes of all tensors in a snapshot. A tensor that occurs twice counts once."""
    return sum({id(t): t.nbytes for t in _tensors(state)}.values())


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [t for part in parts for t in _tensors(part)]
