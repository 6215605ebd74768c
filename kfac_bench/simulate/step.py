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
from kfac_bench.core.planning.plan import (
    Decompose,
    Message,
    Op,
    Plan,
    Precondition,
    ReduceFactors,
    ShareDecompositions,
    ShareGradients,
    Stage,
)
from kfac_bench.simulate.conduct import OURS, Conduct
from kfac_bench.simulate.hardware import Hardware

BACKWARD = 2 / 3
"""Share of backward in forward and backward: two of three matrix products."""
_SHARES = (ShareDecompositions, ShareGradients)


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one rank in one step, from shapes alone."""

    name: str
    layers: Sequence[LayerSpec]
    """The layers that K-FAC covers."""
    rows: Mapping[str, int]
    """Examples times shared positions, by layer."""
    step_flops: float
    """FLOPs of forward and backward."""
    parameters: int
    tensors: int
    """Number of tensors that hold the parameters."""
    examples: int
    family: str = ""
    """Key of :attr:`Rates.step_flops_per_s`: the model, or a name that a file of layers gives."""
    gradient_bytes: int = 4
    """Bytes of a gradient's element in the all-reduce."""


@dataclass(slots=True)
class StepTime:
    """The seconds of a step on its slowest rank."""

    forward_backward_s: float
    gradients_s: float
    """The part of the gradients' all-reduce that backward does not hide."""
    stages_s: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    """Seconds of one run of each stage."""
    kinds_s: dict[str, float] = field(default_factory=dict)
    """Seconds on the busiest rank in one run of the stage, by kind of op. Kinds may overlap."""

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
    """Return the time of a step on ``world_size`` ranks; without a plan, of the optimizer alone.

    Without a conduct, it is that of this package with the method of the plan.
    """
    conduct = conduct or OURS["eigen" if plan is None else plan.method]
    slowdown, rates = hardware.slowdown(world_size), hardware.rates
    computed = slowdown * rates.step(work.step_flops, work.family)
    # Only the FLOPs of backward hide messages; the constant part of a step does not.
    hidden = hardware.overlap * BACKWARD * (computed - slowdown * rates.step_s)
    if plan is not None and not conduct.sends_in_backward:
        hidden = 0.0
    size = work.parameters * work.gradient_bytes
    sent = hardware.network.all_reduce_s(size, range(world_size))
    calls_s = slowdown * conduct.tensor_calls * work.tensors * rates.op_s
    time = StepTime(computed + calls_s, max(0.0, sent - hidden))
    if plan is not None:
        for stage in Stage:
            time.stages_s[stage], kinds_s = _run(plan, stage, work, hardware, conduct)
            time.kinds_s |= kinds_s
    return time


def _run(
    plan: Plan, stage: Stage, work: Workload, hardware: Hardware, conduct: Conduct
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a stage, and how long each kind of op keeps its busiest rank."""
    # When each rank's compute lane and network lane are free again.
    compute, network = [0.0] * plan.world_size, [0.0] * plan.world_size
    # The calls of each rank for gradients that it receives: they follow at the end of the stage.
    received = [0.0] * plan.world_size
    busy: dict[str, list[float]] = defaultdict(lambda: [0.0] * plan.world_size)
    for op in plan.ops(stage):
        seconds = op_seconds(op, plan.method, work, hardware, conduct)
        lane, own = busy[type(op).__name__], _places(op.ranks)
        if isinstance(op, Message):
            # A broadcast waits for its root's result, a sum for the results of all ranks.
            if isinstance(op, _SHARES) and not conduct.sums_shares:
                ready = compute[op.root]
            else:
                ready = max(compute[own])
            network[own] = [max(ready, max(network[own])) + seconds] * len(op.ranks)
            if isinstance(op, ShareGradients):
                calls_s = len(op.members) * conduct.write_calls * hardware.rates.op_s
                of_root = received[op.root]
                received[own] = [calls + calls_s for calls in received[own]]
                received[op.root] = of_root
        else:
            seconds *= hardware.slowdown(plan.world_size)
            compute[own] = [end + seconds for end in compute[own]]
        lane[own] = [used + seconds for used in lane[own]]
    ends = [max(c, n) + r for c, n, r in zip(compute, network, received, strict=True)]
    return max(ends), {kind: max(each) for kind, each in busy.items()}


def _places(ranks: Sequence[int]) -> slice:
    """Return where these ranks are in a list of all: they are the world, or a row or column of it.

    Slices of lists are several times as fast as a loop over thousands of ranks.
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return slice(ranks[0], ranks[-1] + 1, step)


def op_seconds(
    op: Op, method: str, work: Workload, hardware: Hardware, conduct: Conduct | None = None
) -> float:
    """Return the seconds of one op on each of its ranks."""
    conduct = conduct or OURS[method]
    if isinstance(op, Message):
        seconds = _message_seconds(op, hardware, conduct)
        if isinstance(op, ShareGradients):
            seconds += conduct.share_calls * len(op.members) * hardware.rates.op_s
        return seconds
    rates = hardware.rates
    if isinstance(op, Decompose):
        # A diagonal factor needs no decomposition.
        full = [(s.groups, s.dim(f)) for s, f in op.members if not s.is_diagonal(f)]
        work_s = sum(groups * rates.decompose(n, method) for groups, n in full)
        calls = conduct.decomposition_calls * bool(full)
    elif isinstance(op, Precondition):
        work_s = flops(op, method, work.rows) / rates.precondition_flops_per_s
        calls = conduct.precondition_calls + conduct.write_calls * len(op.members)
    else:
        work_s = flops(op, method, work.rows) / rates.factor_flops_per_s
        calls = conduct.factor_calls
    calls_s = calls * rates.op_s
    return work_s + calls_s if conduct.waits else max(work_s, calls_s)


def _message_seconds(op: Message, hardware: Hardware, conduct: Conduct) -> float:
    size = float(op.numel * op.itemsize)
    if isinstance(op, ReduceFactors):
        size *= conduct.factor_traffic
    is_summed = conduct.sums_shares and isinstance(op, _SHARES)
    if is_summed or getattr(op, "root", None) is None:
        return hardware.network.all_reduce_s(size, op.ranks)
    return hardware.network.rooted_s(size, op.ranks)
