"""Runs the plan's ops on real tensors: the part of a K-FAC step that is the same every time.

:class:`KFAC` decides which stages are due and calls :meth:`Executor.run`. The executor walks their
ops in the plan's order. The linear algebra is in ``solver.py``, messages are in ``messages.py``,
and what lasts between steps is in ``store.py``.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.execution.adam import AdamOptions, AdamRule
from kfac_bench.core.execution.background import Background, BackgroundSlices
from kfac_bench.core.execution.batch_statistics import BatchStatistics
from kfac_bench.core.execution.decomposition import Decomposition, FactorKey
from kfac_bench.core.execution.gradients import Gradients, ShardedGradients, WholeGradients
from kfac_bench.core.execution.messages import InFlight, Messenger
from kfac_bench.core.execution.solver import Solver, stack
from kfac_bench.core.execution.store import Store
from kfac_bench.core.kernels.gram import Scale
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.plan import (
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    GatherGradients,
    Message,
    Op,
    Plan,
    Precondition,
    ReduceFactors,
    ReduceProducts,
    ReduceScales,
)

MAX_IN_FLIGHT = 4
"""Messages in flight at most if gradients are sharded, so that whole gradients of few layers are in
memory at once."""


@dataclass(frozen=True)
class Request:
    """The work of one step: due ops, values of the schedules, moments from the hooks."""

    stages: Sequence[Sequence[Op]]
    """The due ones of factors, slices of decompositions, and preconditioning, in this order."""
    damping: float | None
    factor_decay: float
    collected: dict[str, Collected]
    """The moments by layer. The executor empties the dict: no moment stays beside the
    statistic made of it."""
    loss_scale: float | Tensor = 1.0
    """The factor by which the loss was multiplied before backward. It is 1 in a step without
    statistics."""
    is_scaled: bool = False
    """True if there is a loss scale, so that gradients may have overflowed."""
    adam_options: Mapping[str, AdamOptions] = field(default_factory=dict)
    """The options of each layer's parameter group, by layer; for method eigen_adam."""
    check: Callable[[], None] = lambda: None
    """Called before each slice of decompositions, when all statistics have been sent."""


@dataclass
class _Begun:
    """The progress of the factors stage while backward runs."""

    ops: int = 0
    in_flight: list[InFlight] = field(default_factory=list)
    is_void: bool = False
    stage_s: dict[str, float] = field(default_factory=dict)


class Executor:
    """Executes the ops of a plan that this rank takes part in, as the contract of ``Plan`` says.

    Attributes:
        store: What lasts between steps.
        solver: The linear algebra.
        batch_statistics: The statistics of the current step.
        gradients: The gradients of the current step, before and after :meth:`run`.
        stage_s: Seconds of the last run by kind of op. Messages count where they are waited for,
            and so does work beside training.
        background: The thread beside training, if there is one.
        background_slices: The decompositions that were begun on it.
        decomposed: Factors that this rank has decomposed in the current run so far.
        synchronize: Waits for the device. If set, it is called where a kind of op starts and ends.
    """

    def __init__(
        self,
        plan: Plan,
        collective: Collective,
        layers: Sequence[Layer],
        scale: Scale,
        *,
        of_sums: bool = False,
        from_identity: bool = False,
        factored_damping: bool = False,
        state_dtype: torch.dtype = torch.float32,
        background: Background | None = None,
        adam: AdamRule | None = None,
    ) -> None:
        self.plan, self.collective = plan, collective
        self.layers = {layer.name: layer for layer in layers}
        self.store = Store((layer.spec for layer in layers), plan.method, state_dtype)
        self.solver = Solver(self.store, factored_damping=factored_damping, adam=adam)
        self.batch_statistics = BatchStatistics(scale, of_sums=of_sums, from_identity=from_identity)
        self.gradients: Gradients = (
            ShardedGradients(layers, plan.world_size) if plan.sharded else WholeGradients(layers)
        )
        self.stage_s: dict[str, float] = {}
        self.decomposed = 0
        self.synchronize: Callable[[], None] | None = None
        self._messenger = Messenger(
            plan, collective, layers, self.store, self.batch_statistics, self.gradients
        )
        self._begun = _Begun()
        self.sends_early = False
        """Whether hooks call :meth:`begin_factors` while backward runs."""
        self.background = background
        self.background_slices: BackgroundSlices | None = None
        if background is not None:
            self.background_slices = BackgroundSlices(
                plan, collective.rank, self.solver, background
            )

    def begin_factors(self, collected: Mapping[str, Collected | None]) -> None:
        """Start the factors stage while backward runs; :meth:`run` continues where this stops.

        It stops at the first op whose statistics are not in ``collected`` yet, and is called again
        with more of them. All ranks thus follow the plan's order, whatever the order in which
        their hooks fire. Messages in half precision wait for the scales of all ranks, so they are
        left to :meth:`run`.
        """
        begun = self._begun
        if begun.is_void:
            return
        for op in islice(self.plan.factors, begun.ops, None):
            if self.collective.rank in op.ranks:
                match op:
                    case ComputeFactor(_, spec, factor) if spec.name in collected:
                        layer, new = self.layers[spec.name], collected[spec.name]
                        with _timed(begun.stage_s, "ComputeFactor"):
                            self.batch_statistics.compute_factor(layer, factor, new)
                    case ReduceFactors():
                        with _timed(begun.stage_s, "ReduceFactors"):
                            begun.in_flight.append(self._messenger.send(op))
                    case _:  # the statistics of this op are not there yet
                        return
            begun.ops += 1

    def void_factors(self) -> None:
        """Let :meth:`run` repeat what :meth:`begin_factors` started: its gradients were discarded.

        All ranks must call it, also those that have started nothing.
        """
        self._begun.is_void = True

    def abandon_factors(self) -> None:
        """Forget what :meth:`begin_factors` started, once its messages have arrived.

        If factors are sent early, all ranks must call it together.
        """
        begun, self._begun = self._begun, _Begun()
        if self.sends_early:
            self._send_rest(begun, Request((), None, 0.0, {}))
        self.batch_statistics.factors.clear()

    def _send_rest(self, begun: _Begun, request: Request) -> None:
        """Send, without statistics, what other ranks may have sent of a stage that is repeated."""
        rest = islice(self.plan.factors, begun.ops, None)
        self._run_stage(rest, begun.in_flight, replace(request, collected={}))

    def run(self, request: Request) -> None:
        """Run one step's stages; ``gradients`` has the preconditioned gradients afterwards."""
        begun, self._begun = self._begun, _Begun()
        self.stage_s = begun.stage_s
        self.decomposed = 0
        self.gradients.begin()
        for ops in request.stages:
            if ops is not self.plan.factors and ops is not self.plan.precondition:
                request.check()
            if ops is self.plan.factors and begun.is_void:
                self._send_rest(begun, request)
                self.batch_statistics.factors.clear()
                self._run_stage(ops, [], request)
            # While backward ran, begin_factors may have executed the first ops of this stage.
            elif ops is self.plan.factors:
                self._run_stage(islice(ops, begun.ops, None), begun.in_flight, request)
            else:
                self._run_stage(ops, [], request)
            self.store.change_bases()
            # The next stage decomposes the running factors, so they take up the batch now. A rank
            # that owns no factor may still have second moments of the batch.
            if ops is self.plan.factors:
                with self.timed("ComputeFactor"):
                    self.batch_statistics.fold(
                        self.store, self.layers, request.factor_decay, request.loss_scale
                    )

    def _run_stage(self, ops: Iterable[Op], in_flight: list[InFlight], request: Request) -> None:
        """Run ops in order, until all messages have arrived."""
        for op in ops:
            if self.collective.rank not in op.ranks:
                continue
            while in_flight and self._must_wait(op, in_flight):
                self._receive(in_flight.pop(0))
            with self.timed(type(op).__name__):
                if isinstance(op, Message):
                    in_flight.append(self._messenger.send(op))
                else:
                    self._compute(op, request)
            if isinstance(op, ReduceScales):  # the messages after it are packed by these scales
                self._receive_all(in_flight)
        # Messages hold most memory now: the raw moments must not be there as well.
        request.collected.clear()
        self._receive_all(in_flight)

    def _receive_all(self, in_flight: list[InFlight]) -> None:
        while in_flight:
            self._receive(in_flight.pop(0))

    def _receive(self, sent: InFlight) -> None:
        """Wait for a message and unpack it."""
        with self.timed(type(sent.op).__name__):
            sent.work.wait()
            self._messenger.unpack(sent)

    def _must_wait(self, op: Op, in_flight: Sequence[InFlight]) -> bool:
        """Return whether the first message in flight has to arrive before ``op``."""
        if not self.plan.sharded:
            return False
        match op:
            case Precondition():
                return isinstance(in_flight[0].op, GatherGradients)
            case ReduceProducts():
                return True
        return isinstance(op, Message) and len(in_flight) >= MAX_IN_FLIGHT

    def timed(self, kind: str) -> AbstractContextManager[None]:
        """Add the host's seconds inside the block to ``stage_s[kind]``."""
        return _timed(self.stage_s, kind, self.synchronize)

    def _compute(self, op: Op, request: Request) -> None:
        match op:
            case ComputeFactor(_, spec, factor):
                layer, new = self.layers[spec.name], request.collected.get(spec.name)
                self.batch_statistics.compute_factor(layer, factor, new)
            case ComputeSecondMoment(_, spec):
                layer, new = self.layers[spec.name], request.collected.get(spec.name)
                self.batch_statistics.compute_second_moment(layer, new)
            case Decompose(members=members):
                self.solver.keep(members, self._solve(op, request.damping))
                self.decomposed += len(members)
            case Precondition(_, specs):
                self._precondition(specs, request)
                if len(op.ranks) == self.plan.world_size:  # no message shares the result
                    self.gradients.keep(specs)
            case _:
                raise TypeError(op)

    def _solve(self, op: Decompose, damping: float | None) -> Mapping[FactorKey, Decomposition]:
        """Return decompositions that were begun beside training, or make them now."""
        made = None if self.background_slices is None else self.background_slices.pop(op)
        if made is None:
            made = self.solver.solve(self.solver.batch(op.members, damping))
        return made

    def _precondition(self, specs: Sequence[LayerSpec], request: Request) -> None:
        grads = self.gradients.whole
        reached = [spec for spec in specs if spec.name in grads]
        if not reached:
            return
        batch = stack([grads[spec.name] for spec in reached])
        done = self.solver.precondition(
            reached,
            batch,
            request.damping,
            adam_options=request.adam_options,
            is_scaled=request.is_scaled,
        )
        if done is batch:  # a layer without a decomposition keeps its gradient
            parts: Sequence[Tensor] = [grads[spec.name] for spec in reached]
        else:
            parts = torch.split(done, [spec.groups for spec in reached])
        for spec, grad in zip(reached, parts, strict=True):
            self.gradients.preconditioned[spec.name] = grad


@contextmanager
def _timed(
    stage_s: dict[str, float], kind: str, synchronize: Callable[[], None] | None = None
) -> Iterator[None]:
    if synchronize is not None:
        synchronize()
    start = time.perf_counter()
    yield
    if synchronize is not None:
        synchronize()
    stage_s[kind] = stage_s.get(kind, 0.0) + time.perf_counter() - start
