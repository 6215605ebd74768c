"""Send the plan's messages: pack a bucket, start the collective, unpack the bucket on arrival.

A bucket is a flat tensor. Each kind of message has a function that packs it and one that unpacks
it. Both divide the bucket with :func:`bucket_views`, in the order of the op's members, so that they
meet the same elements.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kfac_bench.core.distributed.collective import Collective, Work
from kfac_bench.core.execution.batch_statistics import BatchStatistics, SecondMoments, Statistics
from kfac_bench.core.execution.decomposition import Decomposition, FactorKey, type_of
from kfac_bench.core.execution.gradients import Gradients, ShardedGradients
from kfac_bench.core.execution.store import Store
from kfac_bench.core.kernels.linalg import pack_triangle, unpack_triangle
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.estimate import decomposition_parts, packed_numel
from kfac_bench.core.planning.layer_spec import Factor, LayerSpec
from kfac_bench.core.planning.plan import (
    GatherGradients,
    Message,
    Plan,
    ReduceFactors,
    ReduceProducts,
    ReduceScales,
    ReduceSecondMoments,
    ShareDecompositions,
    ShareGradients,
)

Member = TypeVar("Member")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A message that was started and has not been unpacked."""

    op: Message
    work: Work
    bucket: Tensor


class Messenger:
    """Moves messages between the ranks and what this rank holds."""

    def __init__(
        self,
        plan: Plan,
        collective: Collective,
        layers: Sequence[Layer],
        store: Store,
        statistics: BatchStatistics,
        gradients: Gradients,
    ) -> None:
        self._collective, self._layers = collective, layers
        self._store, self._statistics, self._gradients = store, statistics, gradients
        self._preconditioned_here = {
            p.layer.name for p in plan.placements if collective.rank in p.grad_workers
        }

    def send(self, op: Message) -> InFlight:
        """Pack a message and start it."""
        device = self._layers[0].weight.device
        dtype = self._store.half if op.itemsize < 4 else torch.float32
        bucket = torch.empty(op.numel, device=device, dtype=dtype)
        self._pack(op, bucket)
        return InFlight(op, self._start(op, bucket), bucket)

    def _start(self, op: Message, bucket: Tensor) -> Work:
        match op:
            case ShareDecompositions(root=root) | ShareGradients(root=root):
                return self._collective.broadcast(bucket, root, op.ranks, op.name)
            case ReduceFactors(root=int(root)) | GatherGradients(root=int(root)):
                return self._collective.reduce(bucket, root, op.ranks, op.name)
        return self._collective.all_reduce(bucket, op.ranks, op.name)

    def _pack(self, op: Message, bucket: Tensor) -> None:
        rank, factors = self._collective.rank, self._statistics.factors
        match op:
            case ReduceScales():
                pack_scales(op, factors, bucket)
            case ReduceFactors():
                pack_factors(op, factors, bucket)
                if op.root not in (None, rank):  # only the root will need these statistics
                    for spec, factor in op.members:
                        del factors[spec.name, factor]
            case ReduceSecondMoments():
                pack_second_moments(op, self._statistics.second_moments, bucket)
            case ShareDecompositions():
                if op.root == rank:
                    decompositions, method = self._store.decompositions, self._store.method
                    pack_decompositions(op, decompositions, method, bucket)
            case ShareGradients():
                if op.root == rank:
                    pack_gradients(op, self._gradients.preconditioned, bucket)
            case GatherGradients():
                bucket.zero_()
                for spec, part in gradient_parts(op, bucket):
                    self._sharded().add_part(spec.name, part)
            case ReduceProducts():
                self._sharded().sum_products(bucket)
            case _:
                raise TypeError(op)

    def unpack(self, sent: InFlight) -> None:
        """Unpack the content of a message, after its work has ended.

        The root unpacks what it sent, too: with equal bits in equal memory layouts, all ranks
        compute equal bits from them, and their weights never drift apart.
        """
        op, bucket = sent.op, sent.bucket
        factors = self._statistics.factors
        match op:
            case ReduceScales():
                unpack_scales(op, bucket, factors)
            case ReduceFactors():
                if op.root in (None, self._collective.rank):
                    unpack_factors(op, bucket, factors)
            case ReduceSecondMoments():
                unpack_second_moments(op, bucket, self._statistics.second_moments)
            case ShareDecompositions():
                method = self._store.method
                self._store.receive(unpack_decompositions(op, method, bucket))
            case ShareGradients():
                received = gradient_parts(op, bucket)
                self._gradients.preconditioned.update({s.name: x for s, x in received})
                self._gradients.keep(op.members)
            case GatherGradients():
                wanted = self._preconditioned_here.intersection(self._gradients.names)
                gathered = gradient_parts(op, bucket)
                self._gradients.whole.update({s.name: x for s, x in gathered if s.name in wanted})
            case ReduceProducts():
                self._sharded().keep_products(bucket)
            case _:
                raise TypeError(op)

    def _sharded(self) -> ShardedGradients:
        # Only a plan for sharded gradients has messages that ask for them.
        assert isinstance(self._gradients, ShardedGradients)
        return self._gradients


def bucket_views(
    bucket: Tensor, members: Sequence[Member], numels: Iterable[int]
) -> Iterator[tuple[Member, Tensor]]:
    """Yield each member with its part of the bucket: a view of ``numels`` elements."""
    return zip(members, torch.split(bucket, list(numels)), strict=True)


def pack_scales(op: ReduceScales, statistics: Statistics, bucket: Tensor) -> None:
    """Write the weight of each statistic, and its weight times its largest element."""
    for (spec, factor), part in bucket_views(bucket, op.members, [2] * len(op.members)):
        statistic, weight = statistics[spec.name, factor]
        part[0] = weight
        part[1] = weight * statistic.abs().amax()


def unpack_scales(op: ReduceScales, bucket: Tensor, statistics: Statistics) -> None:
    """Scale the statistics so that their sum over ranks is of order 1, as half precision needs.

    The second entry of a statistic becomes its total weight and its mean size over ranks, with
    which :func:`unpack_factors` undoes the scaling.
    """
    tiny, most = torch.finfo(bucket.dtype).tiny, torch.finfo(bucket.dtype).max
    for (spec, factor), part in bucket_views(bucket, op.members, [2] * len(op.members)):
        total, size = part[0], part[1]  # the size is the mean size times the total weight
        statistic, weight = statistics[spec.name, factor]
        # A statistic of zeros must stay zeros: a factor of infinity would make them NaN.
        statistic.mul_((weight / size.clamp_min(tiny)).clamp_max(most))
        mean_size = size / total.clamp_min(tiny)
        statistics[spec.name, factor] = statistic, torch.stack([total, mean_size])


def pack_factors(op: ReduceFactors, statistics: Statistics, bucket: Tensor) -> None:
    """Write statistics times their weights, so that a sum over ranks is a weighted sum.

    In half precision :func:`unpack_scales` has multiplied them by their weights already.
    """
    for (spec, factor), part in _factor_parts(op, bucket):
        statistic, weight = statistics[spec.name, factor]
        values = part if op.itemsize < 4 else part[:-1]
        if spec.is_diagonal(factor):
            values.copy_(statistic.flatten())
        else:
            pack_triangle(statistic, values)
        if op.itemsize == 4:
            part[:-1] *= weight
            part[-1] = weight


def unpack_factors(op: ReduceFactors, bucket: Tensor, statistics: Statistics) -> None:
    """Replace statistics by their weighted mean over ranks, weights by their sum."""
    for (spec, factor), part in _factor_parts(op, bucket):
        if op.itemsize < 4:
            weight, scale = statistics[spec.name, factor][1]
            values = part.float() * scale
        else:
            values, weight = _weighted_mean(part)
        shape = spec.factor_shape(factor)
        full = values.view(shape) if spec.is_diagonal(factor) else unpack_triangle(values, shape)
        statistics[spec.name, factor] = full, weight


def _factor_parts(
    op: ReduceFactors, bucket: Tensor
) -> Iterator[tuple[tuple[LayerSpec, Factor], Tensor]]:
    weight = 0 if op.itemsize < 4 else 1
    return bucket_views(
        bucket, op.members, (packed_numel(*member) + weight for member in op.members)
    )


def _weighted_mean(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and weight of a part [values..., weight], dividing in place."""
    weight = part[-1]
    part[:-1] /= weight.clamp_min(torch.finfo(part.dtype).tiny)
    return part[:-1], weight


def pack_second_moments(op: ReduceSecondMoments, moments: SecondMoments, bucket: Tensor) -> None:
    """Write second moments times their weights, and the weights."""
    for spec, part in _second_moment_parts(op, bucket):
        moment, weight = moments[spec.name]
        part[:-1] = moment.flatten()
        part[:-1] *= weight
        part[-1] = weight


def unpack_second_moments(op: ReduceSecondMoments, bucket: Tensor, moments: SecondMoments) -> None:
    """Replace second moments by their weighted mean over ranks, views into the bucket."""
    for spec, part in _second_moment_parts(op, bucket):
        mean, weight = _weighted_mean(part)
        moments[spec.name] = mean.view(spec.grad_shape), weight


def _second_moment_parts(
    op: ReduceSecondMoments, bucket: Tensor
) -> Iterator[tuple[LayerSpec, Tensor]]:
    return bucket_views(bucket, op.members, (spec.grad_numel + 1 for spec in op.members))


def pack_decompositions(
    op: ShareDecompositions,
    decompositions: Mapping[FactorKey, Decomposition],
    method: str,
    bucket: Tensor,
) -> None:
    """Write decompositions in the precision in which ranks keep them."""
    for (spec, factor), numbers, matrix in _decomposition_parts(op, method, bucket):
        decompositions[spec.name, factor].pack(numbers, matrix)


def unpack_decompositions(
    op: ShareDecompositions, method: str, bucket: Tensor
) -> dict[FactorKey, Decomposition]:
    """Return decompositions: new tensors, or views that keep the bucket's memory alive."""
    received: dict[FactorKey, Decomposition] = {}
    for (spec, factor), numbers, matrix in _decomposition_parts(op, method, bucket):
        kind = type_of(method, is_diagonal=spec.is_diagonal(factor))
        received[spec.name, factor] = kind.unpack(numbers, matrix, spec.factor_shape(factor))
    return received


def _decomposition_parts(
    op: ShareDecompositions, method: str, bucket: Tensor
) -> Iterator[tuple[tuple[LayerSpec, Factor], Tensor, Tensor]]:
    """Yield, for each member, its parts for fp32 numbers and for the matrix.

    In a bucket of half precision, fp32 numbers travel as their bits: nothing computes with them.
    All numbers come before all matrices, so that they are aligned and can be viewed as fp32.
    """
    sizes = [decomposition_parts(*member, method, op.itemsize) for member in op.members]
    numbers, matrices = zip(*sizes, strict=True)
    twice = bucket_views(bucket, (*op.members, *op.members), (*numbers, *matrices))
    views = [view for _, view in twice]
    count = len(op.members)
    return zip(op.members, views[:count], views[count:], strict=True)


def pack_gradients(op: ShareGradients, grads: Mapping[str, Tensor], bucket: Tensor) -> None:
    """Write preconditioned gradients, and zeros for a layer that backward did not reach."""
    for spec, part in gradient_parts(op, bucket):
        if spec.name in grads:
            part.copy_(grads[spec.name])
        else:
            part.zero_()


def gradient_parts(
    op: ShareGradients | GatherGradients, bucket: Tensor
) -> Iterator[tuple[LayerSpec, Tensor]]:
    """Yield each layer with its gradient [groups, g_dim, a_dim], a view into the bucket."""
    for spec, part in bucket_views(bucket, op.members, (spec.grad_numel for spec in op.members)):
        yield spec, part.view(spec.grad_shape)
