"""Tensors of which each rank holds a part: DTensor, as FSDP2 and tensor parallelism make them.

Only this file knows DTensor. A model without DTensors never imports ``torch.distributed.tensor``.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Index = tuple[slice, ...]


def is_sharded(x: Tensor) -> bool:
    """Return whether ``x`` is a DTensor. If one exists, its module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_offloaded(x: Tensor) -> bool:
    """Return whether this rank holds its part on another kind of device than it computes on."""
    return is_sharded(x) and x.device_mesh.device_type != x.device.type  # type: ignore[attr-defined]


def any_tensor_parallel(model: nn.Module) -> bool:
    """Return whether the model computes with parts of parameters.

    FSDP2 alone does not: it gathers whole parameters before they are used. On a mesh of two
    dimensions FSDP2 divides parameters along one of them, and copies them along the other one.
    """
    placements = [p.placements for p in model.parameters() if is_sharded(p)]  # type: ignore[attr-defined]
    if not placements:
        return False
    from torch.distributed.fsdp import FSDPModule

    fsdp = any(isinstance(m, FSDPModule) for m in model.modules())
    return not fsdp or any(sum(not p.is_replicate() for p in each) > 1 for each in placements)


def full(x: Tensor) -> Tensor:
    """Return the whole tensor. All ranks that hold a part of it must call this."""
    whole: Tensor = x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]
    return whole


def local(x: Tensor) -> Tensor:
    """Return the part that this rank holds, in the same memory."""
    part: Tensor = x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]
    return part


def version_of(x: Tensor) -> int:
    """Return a number that grows by one with each change in place."""
    if not is_sharded(x):
        return x._version
    with torch.no_grad():
        # Operations count at the DTensor, and FSDP2's sums at the rank's part.
        return x._version + local(x)._version


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of ``whole``, laid out as ``like``, without a message.

    Every rank has the same ``whole``.
    """
    if not is_sharded(like) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    given: Any = like
    # Torch 2.6 sends the tensor of the first rank.
    no_message: Any = {"src_data_rank": None} if torch.__version__ >= "2.7" else {}
    return distribute_tensor(
        whole.to(like.device), given.device_mesh, given.placements, **no_message
    )


def lay_out_grad(param: Tensor) -> None:
    """Bring the gradient of ``param`` into the layout of ``param``.

    Autograd leaves a gradient as it arrives. If activations are split, the sum over ranks is
    missing (the scale of a norm). If they are not, the gradient is whole (an embedding). All ranks
    that hold a part must call this.
    """
    grad: Any = param.grad
    if grad is not None and is_sharded(param) and grad.placements != param.placements:  # type: ignore[attr-defined]
        param.grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Part:
    """The block of a tensor that this rank holds."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    share: float
    """1 divided by the number of ranks that hold the same block."""

    def within(self, rows: slice) -> tuple[Index, Index]:
        """Return the overlap of the part and ``rows``: its index in ``rows`` and in the part."""
        start = rows.start or 0
        stop = sys.maxsize if rows.stop is None else rows.stop
        first = max(self.offsets[0], start)
        last = max(first, min(self.offsets[0] + self.sizes[0], stop))
        others = [slice(o, o + n) for o, n in zip(self.offsets[1:], self.sizes[1:], strict=True)]
        there = (slice(first - start, last - start), *others)
        return there, (slice(first - self.offsets[0], last - self.offsets[0]),)


def part_of(param: Tensor, world_size: int) -> Part:
    """Return this rank's part of ``param``. A rank without a part holds the whole.

    ``world_size`` is the number of ranks of the plan.

    Raises:
        ValueError: The plan lacks ranks that hold parts.
    """
    if not is_sharded(param):
        return Part((0,) * param.ndim, tuple(param.shape), 1 / world_size)
    given: Any = param
    mesh = given.device_mesh
    if world_size % mesh.size():
        raise ValueError(
            f"parameters are spread over {mesh.size()} ranks, K-FAC over {world_size}: give it a "
            "collective of all ranks that hold parts"
        )
    (chunk,) = given.__create_chunk_list__()
    # Replicated dimensions of the mesh hold the same block, so several ranks share it.
    blocks = math.prod(
        mesh.size(i) for i, placement in enumerate(given.placements) if not placement.is_replicate()
    )
    return Part(tuple(chunk.offsets), tuple(chunk.sizes), blocks / world_size)


def own_samples(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return some samples of a tensor-parallel layer's input and gradient, with all features.

    Ranks share out the samples, so that everything later sees them as data-parallel ranks. If there
    are few samples, some ranks get none. A layout that splits features costs an all-to-all message.
    A single sample [d] goes to all ranks.
    """
    from torch.distributed.tensor import Replicate, Shard

    pair: tuple[Any, Any] = x, g
    layout = [Replicate() if g.ndim < 2 else Shard(0)] * pair[1].device_mesh.ndim
    mine, mine_g = (t.redistribute(placements=layout).to_local() for t in pair)
    return mine, mine_g
