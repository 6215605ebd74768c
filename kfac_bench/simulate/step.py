"""One training step of a plan on a :class:`Hardware`, by the rules of the executor.

Each rank has a compute lane and a network lane, both in the plan's order. A message starts once
those that send it have computed and its ranks' network lanes are free; a stage ends when its
messages have arrived. Stages are not overlapped with forward and backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kfac_bench.core.planning.estimate import flops
from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.ops import (
    Decompose,
    Message,
    Op,
    Precondition,
    ReduceFactors,
    ShareDecompositions,
    ShareGradients,
)
from kfac_bench.core.planning.plan import Plan, Stage
from kfac_bench.simulate.hardware import Hardware

BACKWARD = 2 / 3
"""Of forward and backward: two of three products."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What each rank does in a step, from shapes alone."""

    name: str
    layers: Sequence[LayerSpec]
    """Those that K-FAC covers."""
    rows: Mapping[str, int]
    """By layer: examples times shared positions, of a rank and step."""
    step_flops: float
    """Forward and backward of a rank."""
    parameters: int
    tensors: int
    """That the parameters are."""
    examples: int
    """Of a rank and step."""
    family: str = ""
    """Key of :attr:`Rates.step_flops_per_s`."""
    gradient_bytes: int = 4
    """Of an element, as it is reduced."""


@dataclass(frozen=True, slots=True)
class Conduct:
    """How an implementation does it; the defaults are this one's."""

    factor_traffic: float = 1.0
    """Bytes of factors sent, against packed triangles: 2 where full matrices are."""
    tensors_per_decomposition: int = 1
    """2 where eigenvectors and eigenvalues go apart."""


@dataclass(slots=True)
class StepTime:
    """Seconds, of the slowest rank."""

    forward_backward_s: float
    gradients_s: float
    """Of the gradients' all-reduce, what backward does not hide."""
    stages_s: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    """Each time the stage runs."""
    kinds_s: dict[str, float] = field(default_factory=dict)
    """By kind of op, the busiest rank, each time the stage runs; they overlap."""

    @property
    def sgd_s(self) -> float:
        """A step without K-FAC."""
        return self.forward_backward_s + self.gradients_s

    def average_s(self, factor_update_freq: float, update_freq: float) -> float:
        """A step's mean, K-FAC's stages at their intervals."""
        each = {Stage.FACTORS: factor_update_freq, Stage.DECOMPOSE: update_freq}
        return self.sgd_s + sum(s / each.get(stage, 1) for stage, s in self.stages_s.items())


def step_time(
    work: Workload,
    world_size: int,
    hardware: Hardware,
    plan: Plan | None = None,
    conduct: Conduct | None = None,
) -> StepTime:
    """Seconds of a step on ``world_size`` ranks; without a plan those of the optimizer alone."""
    slowdown = hardware.slowdown(world_size)
    computed = slowdown * hardware.rates.step(work.step_flops, work.family)
    hidden = hardware.overlap * BACKWARD * (computed - slowdown * hardware.rates.step_s)
    size = work.parameters * work.gradient_bytes
    sent = hardware.network.all_reduce_s(size, range(world_size), work.tensors)
    time = StepTime(computed, max(0.0, sent - hidden))
    for stage in Stage if plan is not None else ():
        assert plan is not None
        time.stages_s[stage] = _run(plan, stage, work, hardware, conduct or Conduct(), time.kinds_s)
    return time


def _run(
    plan: Plan,
    stage: Stage,
    work: Workload,
    hardware: Hardware,
    conduct: Conduct,
    kinds_s: dict[str, float],
) -> float:
    """Makespan of a stage; enters into ``kinds_s`` how long each kind keeps its busiest rank."""
    compute, network = [0.0] * plan.world_size, [0.0] * plan.world_size
    busy: dict[str, list[float]] = defaultdict(lambda: [0.0] * plan.world_size)
    for op in plan.ops(stage):
        seconds = op_seconds(op, plan.method, work, hardware, conduct)
        lane = busy[type(op).__name__]
        if isinstance(op, Message):
            root = getattr(op, "root", None)
            sends = isinstance(op, (ShareDecompositions, ShareGradients))
            ready = compute[root] if sends and root is not None else 0.0
            if not sends:
                ready = max(compute[rank] for rank in op.ranks)
            end = max(ready, max(network[rank] for rank in op.ranks)) + seconds
            for rank in op.ranks:
                network[rank] = end
                lane[rank] += seconds
        else:
            seconds *= hardware.slowdown(plan.world_size)
            for rank in op.ranks:
                compute[rank] += seconds
                lane[rank] += seconds
    kinds_s |= {kind: max(each) for kind, each in busy.items()}
    return max(0.0, *compute, *network)


def op_seconds(
    op: Op, method: str, work: Workload, hardware: Hardware, conduct: Conduct | None = None
) -> float:
    """Seconds of one op on each of its ranks."""
    rates, network = hardware.rates, hardware.network
    if isinstance(op, Message):
        size = float(op.numel * op.itemsize)
        tensors = len(getattr(op, "members", (op,)))
        if isinstance(op, ReduceFactors) and conduct is not None:
            size *= conduct.factor_traffic
        if isinstance(op, ShareDecompositions) and conduct is not None:
            tensors *= conduct.tensors_per_decomposition
        rooted = getattr(op, "root", None) is not None
        return (network.rooted_s if rooted else network.all_reduce_s)(size, op.ranks, tensors)
    if isinstance(op, Decompose):
        full = [(s.groups, s.dim(f)) for s, f in op.members if not s.diagonal(f)]
        return rates.op_s + sum(groups * rates.decompose(n, method) for groups, n in full)
    done = flops(op, method, work.rows)
    if isinstance(op, Precondition):
        return rates.op_s * len(op.members) + done / rates.precondition_flops_per_s
    return rates.op_s + done / rates.factor_flops_per_s
