"""Runs the plan's ops on real tensors: the part of a K-FAC step that is the same every time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.distributed.collective import Collective, Work
from kfac_bench.core.execution import messages
from kfac_bench.core.execution.batch_statistics import Fresh
from kfac_bench.core.execution.sharded_gradients import Shards
from kfac_bench.core.execution.solver import Solver, stack
from kfac_bench.core.execution.store import Store
from kfac_bench.core.kernels.conventions import Scale
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.ops import (
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    GatherGradients,
    Message,
    Op,
    Precondition,
    ReduceFactors,
    ReduceProducts,
    ReduceScales,
    ReduceSecondMoments,
    ShareDecompositions,
    ShareGradients,
)
from kfac_bench.core.planning.plan import Plan

UnderWay = tuple[str, Work, Callable[[], None]]
"""A message that was started: its kind, and what to do when it has arrived."""
UNDER_WAY = 4
"""Messages that a stage has under way at most where ranks hold parts of gradients: their whole
gradients shall not be in memory at once."""


@dataclass(frozen=True)
class Request:
    """What one step asks for: due ops, values of the schedules, what the hooks collected."""

    stages: Sequence[Sequence[Op]]
    """Factors, slices of the decompositions, preconditioning: those that are due, in order."""
    damping: float
    factor_decay: float
    collected: dict[str, Collected]
    """By layer; emptied, so that no moment is kept beside the statistic that it becomes."""
    grads: Mapping[str, Tensor]
    """By layer, [groups, g_dim, a_dim]; a layer that backward did not reach is missing. Empty
    where ranks hold parts: then gradients are gathered."""
    loss_scale: float | Tensor = 1.0
    """What multiplied the loss before backward."""


@dataclass
class _Begun:
    """The factors stage, as far as backward has brought it."""

    ops: int = 0
    under_way: list[UnderWay] = field(default_factory=list)
    stage_s: dict[str, float] = field(default_factory=dict)


class Executor:
    """Executes the ops of a plan that this rank takes part in; see the contract at ``Plan``.

    What lasts between steps is in its ``store``.
    """

    def __init__(
        self,
        plan: Plan,
        collective: Collective,
        layers: Sequence[Layer],
        scale: Scale,
        *,
        of_sums: bool = False,
        factored_damping: bool = False,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.plan, self.collective = plan, collective
        self.layers = {layer.name: layer for layer in layers}
        self.store = Store((layer.spec for layer in layers), plan.method, state_dtype)
        self.solver = Solver(self.store, factored_damping=factored_damping)
        self.fresh = Fresh(scale, of_sums=of_sums)
        self.shards = Shards(layers, plan.world_size) if plan.sharded else None
        """Where ranks hold parts of the gradients: they are there, before and after a run."""
        self.stage_s: dict[str, float] = {}
        """Seconds of the last run by kind of op; messages count where they are waited for."""
        self.settle: Callable[[], None] | None = None
        """Called where a kind of op starts and ends: waits for the device."""
        self._grads: dict[str, Tensor] = {}
        self._preconditioned: dict[str, Tensor] = {}
        self._begun = _Begun()

    def begin_factors(self, collected: Mapping[str, Collected | None]) -> None:
        """Start the factors stage before :meth:`run`, which goes on from where this stops.

        At the first op that needs what is not in ``collected`` yet; to be called again then. The
        order is the plan's on every rank, whenever which rank comes by. Messages in half precision
        wait for the scales of all, so they are left to ``run``.
        """
        begun = self._begun
        for op in islice(self.plan.factors, begun.ops, None):
            if self.collective.rank in op.ranks:
                match op:
                    case ComputeFactor(_, spec) if spec.name in collected:
                        with _timed(begun.stage_s, "ComputeFactor"):
                            self.fresh.compute_factor(
                                self.layers[spec.name], op.factor, collected[spec.name]
                            )
                    case ReduceFactors():
                        with _timed(begun.stage_s, "ReduceFactors"):
                            begun.under_way.append((type(op).__name__, *self._send(op)))
                    case _:
                        return
            begun.ops += 1

    def abandon_factors(self) -> None:
        """Forget what :meth:`begin_factors` started, when it has arrived."""
        for _, work, _ in self._begun.under_way:
            work.wait()
        self._begun = _Begun()
        self.fresh.factors.clear()

    def run(self, request: Request) -> dict[str, Tensor]:
        """One step's stages; the preconditioned gradients by layer, [groups, g_dim, a_dim].

        None where ranks hold parts: they are in ``shards``.
        """
        begun, self._begun = self._begun, _Begun()
        self.stage_s, self._preconditioned = begun.stage_s, {}
        self._grads = dict(request.grads)
        if self.shards is not None:
            self.shards.begin()
        for ops in request.stages:
            first, under_way = 0, list[UnderWay]()
            if ops is self.plan.factors:
                first, under_way = begun.ops, begun.under_way
            for op in islice(ops, first, None):
                if self.collective.rank not in op.ranks:
                    continue
                while self._must_wait(op, [kind for kind, _, _ in under_way]):
                    self._arrive(under_way, 1)
                with self.timed(type(op).__name__):
                    if isinstance(op, Message):
                        under_way.append((type(op).__name__, *self._send(op)))
                    else:
                        self._compute(op, request)
                if isinstance(op, ReduceScales):
                    self._arrive(under_way)
            request.collected.clear()
            self._arrive(under_way)
            if self.fresh.factors:
                with self.timed("ComputeFactor"):
                    self.fresh.fold(
                        self.store, self.layers, request.factor_decay, request.loss_scale
                    )
        self._grads = {}
        done, self._preconditioned = self._preconditioned, {}  # not kept until the next step
        return done

    def _arrive(self, under_way: list[UnderWay], most: int | None = None) -> None:
        """Wait for messages and unpack them; buckets go, but for what is a view of one."""
        for _ in range(len(under_way) if most is None else most):
            kind, work, unpack = under_way.pop(0)
            with self.timed(kind):
                work.wait()
                unpack()

    def _must_wait(self, op: Op, under_way: Sequence[str]) -> bool:
        """Whether the first message under way has to arrive before ``op``."""
        if self.shards is None or not under_way:
            return False
        match op:
            case Precondition():
                return under_way[0] == GatherGradients.__name__
            case ReduceProducts():
                return True
        return isinstance(op, Message) and len(under_way) >= UNDER_WAY

    def timed(self, kind: str) -> AbstractContextManager[None]:
        """Add the host's seconds inside the block to ``stage_s[kind]``."""
        return _timed(self.stage_s, kind, self.settle)

    def _compute(self, op: Op, request: Request) -> None:
        match op:
            case ComputeFactor(_, spec, factor):
                layer, new = self.layers[spec.name], request.collected.get(spec.name)
                self.fresh.compute_factor(layer, factor, new)
            case ComputeSecondMoment(_, spec):
                layer, new = self.layers[spec.name], request.collected.get(spec.name)
                self.fresh.compute_second_moment(layer, new)
            case Decompose(_, members):
                self.solver.decompose(members, request.damping)
            case Precondition(_, specs):
                self._precondition([s for s in specs if s.name in self._grads], request)
                if len(op.ranks) == self.plan.world_size:  # none is shared
                    self._keep_shards(specs)
            case _:
                raise TypeError(op)

    def _send(self, op: Message) -> tuple[Work, Callable[[], None]]:
        """Start a message; what to do with its bucket when it has arrived.

        The root unpacks what it sent, too: with equal bits in equal memory layouts, all ranks
        compute equal bits from them, and their weights never drift apart.
        """
        device = next(iter(self.layers.values())).weight.device
        dtype = self.store.half if op.itemsize < 4 else torch.float32
        bucket, method = torch.empty(op.numel, device=device, dtype=dtype), self.plan.method
        match op:
            case ReduceScales():
                messages.pack_scales(op, self.fresh.factors, bucket)
                work = self.collective.all_reduce(bucket, op.ranks, op.name)
                return work, lambda: messages.unpack_scales(op, bucket, self.fresh.factors)
            case ReduceFactors(root=root):
                messages.pack_factors(op, self.fresh.factors, bucket)
                if root is None:
                    work = self.collective.all_reduce(bucket, op.ranks, op.name)
                else:
                    work = self.collective.reduce(bucket, root, op.ranks, op.name)
                if root in (None, self.collective.rank):
                    return work, lambda: messages.unpack_factors(op, bucket, self.fresh.factors)
                for spec, factor in op.members:  # only the root folds them
                    del self.fresh.factors[spec.name, factor]
                return work, lambda: None
            case ReduceSecondMoments():
                messages.pack_second_moments(op, self.fresh.second_moments, bucket)
                work = self.collective.all_reduce(bucket, op.ranks, op.name)
                return work, lambda: messages.unpack_second_moments(
                    op, bucket, self.fresh.second_moments
                )
            case ShareDecompositions(root=root):
                if root == self.collective.rank:
                    messages.pack_decompositions(op, self.store.decompositions, method, bucket)
                work = self.collective.broadcast(bucket, root, op.ranks, op.name)
                return work, lambda: self.store.receive(
                    messages.unpack_decompositions(op, method, bucket)
                )
            case ShareGradients(root=root):
                if root == self.collective.rank:
                    messages.pack_gradients(op, self._preconditioned, bucket)
                work = self.collective.broadcast(bucket, root, op.ranks, op.name)
                return work, lambda: self._receive_gradients(op, bucket)
            case GatherGradients(root=root):
                return self._gather(op, root, bucket)
            case ReduceProducts():
                assert self.shards is not None
                self.shards.sum_products(bucket)
                work = self.collective.all_reduce(bucket, op.ranks, op.name)
                return work, partial(self.shards.keep_products, bucket)
        raise TypeError(op)

    def _gather(
        self, op: GatherGradients, root: int | None, bucket: Tensor
    ) -> tuple[Work, Callable[[], None]]:
        assert self.shards is not None
        bucket.zero_()
        for spec, part in messages.gradient_parts(op, bucket):
            self.shards.give(spec.name, part)
        if root is None:
            work = self.collective.all_reduce(bucket, op.ranks, op.name)
        else:
            work = self.collective.reduce(bucket, root, op.ranks, op.name)
        workers = {p.layer.name: p.grad_workers for p in self.plan.placements}
        mine = [s.name for s in op.members if self.collective.rank in workers[s.name]]
        wanted = set(mine) & set(self.shards.names)
        return work, lambda: self._grads.update(
            {s.name: x for s, x in messages.gradient_parts(op, bucket) if s.name in wanted}
        )

    def _receive_gradients(self, op: ShareGradients, bucket: Tensor) -> None:
        received = messages.gradient_parts(op, bucket)
        self._preconditioned.update({spec.name: part for spec, part in received})
        self._keep_shards(op.members)

    def _keep_shards(self, specs: Sequence[LayerSpec]) -> None:
        """Where ranks hold parts: of preconditioned gradients only this rank's."""
        if self.shards is None:
            return
        for spec in specs:
            if spec.name in self._preconditioned:
                self._grads.pop(spec.name, None)
                self.shards.take(spec.name, self._preconditioned.pop(spec.name))

    def _precondition(self, specs: Sequence[LayerSpec], request: Request) -> None:
        if not specs:
            return
        grads = [self._grads[spec.name] for spec in specs]
        done = self.solver.precondition(specs, stack(grads), request.damping)
        for spec, grad in zip(
            specs, torch.split(done, [spec.groups for spec in specs]), strict=True
        ):
            self._preconditioned[spec.name] = grad


@contextmanager
def _timed(
    stage_s: dict[str, float], kind: str, settle: Callable[[], None] | None = None
) -> Iterator[None]:
    if settle is not None:
        settle()
    start = time.perf_counter()
    yield
    if settle is not None:
        settle()
    stage_s[kind] = stage_s.get(kind, 0.0) + time.perf_counter() - start
