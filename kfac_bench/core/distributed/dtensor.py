"""Tensors of which each rank holds a part: DTensor, as FSDP2 and tensor parallel make them.

The only place that knows of it; a model without them never imports ``torch.distributed.tensor``.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Index = tuple[slice, ...]


def is_sharded(x: Tensor) -> bool:
    """Whether it is a DTensor; whoever made one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def any_tensor_parallel(model: nn.Module) -> bool:
    """Whether parts of parameters also compute as parts; FSDP2's alone are put together first."""
    meshes = [p.device_mesh for p in model.parameters() if is_sharded(p)]  # type: ignore[attr-defined]
    if not meshes:
        return False
    from torch.distributed.fsdp import FSDPModule

    fsdp = any(isinstance(m, FSDPModule) for m in model.modules())
    return not fsdp or any(mesh.ndim > 1 for mesh in meshes)


def full(x: Tensor) -> Tensor:
    """The whole tensor. All ranks that hold a part of it must call."""
    whole: Tensor = x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]
    return whole


def local(x: Tensor) -> Tensor:
    """The part that this rank holds, the same memory."""
    part: Tensor = x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]
    return part


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """What every rank has whole as the part this rank has, laid out as ``like``; no message."""
    if not is_sharded(like) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    given: Any = like
    return distribute_tensor(
        whole.to(like.device), given.device_mesh, given.placements, src_data_rank=None
    )


def lay_out_grad(param: Tensor) -> None:
    """Bring a gradient into its parameter's layout.

    Autograd leaves it as it came: a sum not yet taken where activations are split (the scale of a
    norm), whole where they are not (an embedding). All ranks that hold a part must call.
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
    """One over the number of ranks that hold this very block."""

    def within(self, rows: slice) -> tuple[Index, Index]:
        """What of it lies in ``rows`` of the whole: where there, and where in the part."""
        start = rows.start or 0
        stop = sys.maxsize if rows.stop is None else rows.stop
        first = max(self.offsets[0], start)
        last = max(first, min(self.offsets[0] + self.sizes[0], stop))
        others = [slice(o, o + n) for o, n in zip(self.offsets[1:], self.sizes[1:], strict=True)]
        there = (slice(first - start, last - start), *others)
        return there, (slice(first - self.offsets[0], last - self.offsets[0]),)


def part_of(param: Tensor, world_size: int) -> Part:
    """Of the ``world_size`` ranks of a plan; whoever has no part holds the whole.

    Raises ``ValueError`` if the plan lacks ranks that hold parts.
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
    blocks = math.prod(
        mesh.size(i) for i, placement in enumerate(given.placements) if not placement.is_replicate()
    )
    return Part(tuple(chunk.offsets), tuple(chunk.sizes), blocks / world_size)


def own_samples(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Of a tensor-parallel layer's input and gradient: some samples with all their features.

    Ranks share out the samples, so that they are further data-parallel ranks to what follows; none
    is left for a rank if there are few. A message to and from all where a layout splits features.
    One sample [d] goes to all ranks.
    """
    from torch.distributed.tensor import Replicate, Shard

    pair: tuple[Any, Any] = x, g
    layout = [Replicate() if g.ndim < 2 else Shard(0)] * pair[1].device_mesh.ndim
    mine, mine_g = (t.redistribute(placements=layout).to_local() for t in pair)
    return mine, mine_g
