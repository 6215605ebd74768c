"""Find places where the host waits for the device, without a GPU.

On a GPU the host queues work and goes on. A read of a value stops the host until all queued work is
done. So does a copy from ordinary memory of the host to the device. Two contexts raise
:class:`WaitError` at these places.

* :func:`refuse_reads`: the steps are real steps on the CPU.
* :func:`refuse_waits_on_meta`: the model is on torch's meta device. Tensors there have no values,
  so no read can succeed, and the code takes the way that it takes on a GPU.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_bench.core.guards.guards import Guards
from kfac_bench.core.kernels import linalg

READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""PyTorch's tags of operations whose result needs values, not only shapes, on the host."""
READING_METHODS = (Tensor.tolist, Tensor.numpy, Tensor.cpu)
"""Reads that use no such operation if the tensor is on the CPU."""
FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
"""Functions that copy Python numbers to the device."""


class WaitError(AssertionError):
    """The host would wait for the device here."""


@contextmanager
def refuse_reads(host: Callable[[], Iterable[Tensor]] = tuple) -> Iterator[None]:
    """Raise :class:`WaitError` where the block reads a tensor on the CPU.

    Args:
        host: Returns the tensors that are on the host even if the model is on a GPU.
    """
    with _RefuseMethods(), _RefuseReads(host):
        yield


@contextmanager
def refuse_waits_on_meta() -> Iterator[None]:
    """Raise :class:`WaitError` where the block reads a meta tensor, or copies to one and waits."""
    try:
        with _RefuseNumbers(), _RefuseCopies():
            yield
    except (NotImplementedError, RuntimeError, TypeError) as error:
        # What torch says where a meta tensor would have to have values.
        if any(word in str(error) for word in ("meta", "Meta", "nonzero")):
            raise WaitError(str(error)) from error
        raise


@contextmanager
def steps_on_meta() -> Iterator[None]:
    """Let K-FAC and the trainer take whole steps on the meta device.

    A decomposition of a meta tensor becomes a tensor of the same shape, and the guards do not judge
    what they saw. Autocast does not know the meta device, and does nothing there.
    """
    autocast, judge = torch.autocast, Guards.judge
    is_enabled = torch.is_autocast_enabled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linalg, "eigendecompose", _unless_meta(linalg.eigendecompose, _eigen))
        patch.setattr(linalg, "damped_inverse", _unless_meta(linalg.damped_inverse, _inverse))
        patch.setattr(
            Guards, "judge", lambda self: None if self._layers[0].weight.is_meta else judge(self)
        )
        patch.setattr(
            torch,
            "is_autocast_enabled",
            lambda device="cpu": device != "meta" and is_enabled(device),
        )
        patch.setattr(
            torch,
            "autocast",
            lambda device, *a, **k: (
                nullcontext() if device == "meta" else autocast(device, *a, **k)
            ),
        )
        yield


def _unless_meta(function: Callable[..., Any], on_meta: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *more: on_meta(x) if x.is_meta else function(x, *more)


def _eigen(factor: Tensor) -> tuple[Tensor, Tensor]:
    return factor[..., 0].clone(), factor.clone()


def _inverse(factor: Tensor) -> Tensor:
    return factor.clone()


_is_allowed: list[bool] = []


@contextmanager
def allowed() -> Iterator[None]:
    """Refuse nothing inside the block."""
    _is_allowed.append(True)
    try:
        yield
    finally:
        _is_allowed.pop()


class _RefuseReads(TorchDispatchMode):
    def __init__(self, host: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__()
        self._host = host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = not READS.isdisjoint(func.tags)
        # A mask as an index selects as many elements as it has ones.
        if func is torch.ops.aten.index.Tensor:
            reads = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if reads and not _is_allowed and not any(x is args[0] for x in self._host()):
            raise WaitError(f"{func} reads a tensor of shape {list(args[0].shape)}")
        return func(*args, **(kwargs or {}))


class _RefuseMethods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING_METHODS and not _is_allowed:
            raise WaitError(f"{func.__name__} reads a tensor of shape {list(args[0].shape)}")
        return func(*args, **(kwargs or {}))


class _RefuseCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        source = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}.get(func)
        if source is not None and out.is_meta and not args[source].is_meta:
            blocks = not (kwargs or {}).get("non_blocking", len(args) > 2 and args[2])
            if blocks:
                raise WaitError(f"a copy to the device of a tensor of shape {list(out.shape)}")
        return out


class _RefuseNumbers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in FROM_NUMBERS and out.is_meta:
            raise WaitError(f"{func.__name__} copies numbers to the device")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list) for i in index):
                raise WaitError("a list as index is copied to the device")
        return out
