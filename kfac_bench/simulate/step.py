"""The time of one training step: a plan, run on a :class:`Hardware` by the executor's rules.

Each rank has a compute lane and a network lane, and both follow the plan's order. A message starts
when its senders have computed and the network lanes of all its ranks are free. A stage ends when
its messages have arrived. Stages do not overlap with forward and backward.
"""

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
"""Share of backward in forward and backward: two of three matrix products."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one rank in one step, from shapes alone."""

    name: str
    layers: Sequence[LayerSpec]
    """The layers that K-FAC covers."""
    rows: Mapping[str, int]
    """By layer: examples times shared positions."""
    step_flops: float
    """FLOPs of forward and backward."""
    parameters: int
    tensors: int
    """Number of tensors that hold the parameters."""
    examples: int
    family: str = ""
    """Key of :attr:`Rates.step_flops_per_s`."""
    gradient_bytes: int = 4
    """Bytes of a gradient's element in the all-reduce."""


@dataclass(frozen=True, slots=True)
class Conduct:
    """How an implementation sends its messages; the defaults are those of this package."""

    factor_traffic: float = 1.0
    """Bytes of a factor's message over those of its packed triangle. 2: full matrices are sent."""
    tensors_per_decomposition: int = 1
    """2 if eigenvectors and eigenvalues are sent separately."""


@dataclass(slots=True)
class StepTime:
    """The seconds of a step on its slowest rank."""

    forward_backward_s: float
    gradients_s: float
    """The part of the gradients' all-reduce that backward does not hide."""
    stages_s: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    """Seconds of one run of each stage."""
    kinds_s: dict[str, float] = field(default_factory=dict)
    """By kind of op: seconds on the busiest rank in one run of the stage. Kinds may overlap."""

    @property
    def sgd_s(self) -> float:
        """The seconds of a step without K-FAC."""
        return self.forward_backward_s + self.gradients_s

    def average_s(self, factor_update_freq: float, update_freq: float) -> float:
        """Return the mean seconds of a step in which K-FAC's stages run at their intervals."""
        each = {Stage.FACTORS: factor_update_freq, Stage.DECOMPOSE: update_freq}
        return self.sgd_s + sum(s / each.get(stage, 1) for stage, s in self.stages_s.items())


def step_time(
    work: Workload,
    world_size: int,
    hardware: Hardware,
    plan: Plan | None = None,
    conduct: Conduct | None = None,
) -> StepTime:
    """Return the time of a step on ``world_size`` ranks; without a plan, of the optimizer alone."""
    slowdown = hardware.slowdown(world_size)
    computed = slowdown * hardware.rates.step(work.step_flops, work.family)
    # Only the FLOPs of backward hide messages; the constant part of a step does not.
    hidden = hardware.overlap * BACKWARD * (computed - slowdown * hardware.rates.step_s)
    # The gradients' all-reduce is the same with and without K-FAC.
    size = work.parameters * work.gradient_bytes
    sent = hardware.network.all_reduce_s(size, range(world_size), work.tensors)
    time = StepTime(computed, max(0.0, sent - hidden))
    if plan is not None:
        for stage in Stage:
            time.stages_s[stage], kinds_s = _run(plan, stage, work, hardware, conduct or Conduct())
            time.kinds_s |= kinds_s
    return time


def _run(
    plan: Plan, stage: Stage, work: Workload, hardware: Hardware, conduct: Conduct
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a stage, and how long each kind of op keeps its busiest rank."""
    # When each rank's compute lane and network lane are free again.
    compute, network = [0.0] * plan.world_size, [0.0] * plan.world_size
    busy: dict[str, list[float]] = defaultdict(lambda: [0.0] * plan.world_size)
    for op in plan.ops(stage):
        seconds = op_seconds(op, plan.method, work, hardware, conduct)
        lane = busy[type(op).__name__]
        if isinstance(op, Message):
            root = getattr(op, "root", None)
            is_share = isinstance(op, (ShareDecompositions, ShareGradients))
            # A broadcast waits for its root's result, a reduction for the results of all ranks.
            ready = compute[root] if is_share and root is not None else 0.0
            if not is_share:
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
    return max(0.0, *compute, *network), {kind: max(each) for kind, each in busy.items()}


def op_seconds(
    op: Op, method: str, work: Workload, hardware: Hardware, conduct: Conduct | None = None
) -> float:
    """Return the seconds of one op on each of its ranks."""
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
        # A diagonal factor needs no decomposition.
        full = [(s.groups, s.dim(f)) for s, f in op.members if not s.is_diagonal(f)]
        return rates.op_s + sum(groups * rates.decompose(n, method) for groups, n in full)
    done = flops(op, method, work.rows)
    if isinstance(op, Precondition):
        return rates.op_s * len(op.members) + done / rates.precondition_flops_per_s
    return rates.op_s + done / rates.factor_flops_per_s
