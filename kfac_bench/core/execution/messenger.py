"""Send the plan's messages: pack the bucket, start the collective, unpack on arrival."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_bench.core.distributed.collective import Collective, Work
from kfac_bench.core.execution import messages
from kfac_bench.core.execution.batch_statistics import BatchStatistics
from kfac_bench.core.execution.gradients import Gradients
from kfac_bench.core.execution.sharded_gradients import ShardedGradients
from kfac_bench.core.execution.store import Store
from kfac_bench.core.layers.base import Layer
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
                messages.pack_scales(op, factors, bucket)
            case ReduceFactors():
                messages.pack_factors(op, factors, bucket)
                if op.root not in (None, rank):  # only the root will need these statistics
                    for spec, factor in op.members:
                        del factors[spec.name, factor]
            case ReduceSecondMoments():
                messages.pack_second_moments(op, self._statistics.second_moments, bucket)
            case ShareDecompositions():
                if op.root == rank:
                    decompositions, method = self._store.decompositions, self._store.method
                    messages.pack_decompositions(op, decompositions, method, bucket)
            case ShareGradients():
                if op.root == rank:
                    messages.pack_gradients(op, self._gradients.preconditioned, bucket)
            case GatherGradients():
                bucket.zero_()
                for spec, part in messages.gradient_parts(op, bucket):
                    self._sharded().add_part(spec.name, part)
            case ReduceProducts():
                self._sharded().sum_products(bucket)
            case _:
                raise TypeError(op)

    def unpack(self, sent: InFlight) -> None:
        """Take over what a message brought, after its work has ended.

        The root unpacks what it sent, too: with equal bits in equal memory layouts, all ranks
        compute equal bits from them, and their weights never drift apart.
        """
        op, bucket = sent.op, sent.bucket
        factors = self._statistics.factors
        match op:
            case ReduceScales():
                messages.unpack_scales(op, bucket, factors)
            case ReduceFactors():
                if op.root in (None, self._collective.rank):
                    messages.unpack_factors(op, bucket, factors)
            case ReduceSecondMoments():
                messages.unpack_second_moments(op, bucket, self._statistics.second_moments)
            case ShareDecompositions():
                method = self._store.method
                self._store.receive(messages.unpack_decompositions(op, method, bucket))
            case ShareGradients():
                received = messages.gradient_parts(op, bucket)
                self._gradients.preconditioned.update({s.name: x for s, x in received})
                self._gradients.keep(op.members)
            case GatherGradients():
                wanted = self._preconditioned_here.intersection(self._gradients.names)
                gathered = messages.gradient_parts(op, bucket)
                self._gradients.whole.update({s.name: x for s, x in gathered if s.name in wanted})
            case ReduceProducts():
                self._sharded().keep_products(bucket)
            case _:
                raise TypeError(op)

    def _sharded(self) -> ShardedGradients:
        # Only a plan for sharded gradients has messages that ask for them.
        assert isinstance(self._gradients, ShardedGradients)
        return self._gradients
