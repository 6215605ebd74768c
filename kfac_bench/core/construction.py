"""How a :class:`KFAC` is built after its options are valid: plan the work, then connect.

``KFAC.__init__`` calls these functions. They decide nothing about the algorithm itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from kfac_bench.core.capture.handover import Handover
from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.capture.moments import Moments
from kfac_bench.core.distributed.collective import Collective, check_same_on_all_ranks
from kfac_bench.core.execution.adam import AdamRule
from kfac_bench.core.execution.background_moments import BackgroundMoments
from kfac_bench.core.execution.executor import Executor
from kfac_bench.core.execution.sharded_gradients import any_sharded
from kfac_bench.core.kernels import linalg
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.layers.coverage import MAX_DIM
from kfac_bench.core.planning.cost import measured_cost
from kfac_bench.core.planning.ops import ComputeFactor, ReduceFactors
from kfac_bench.core.planning.plan import EIGEN_ADAM, IDENTITY, Plan
from kfac_bench.core.planning.planner import make_plan
from kfac_bench.core.schedule import Schedules

BATCH_NUMEL = 1 << 22
"""Most elements of equally shaped layers that a GPU preconditions, or decomposes, at once.

A CPU gains nothing from batches (docs/explanation/what_was_tried.md).
"""


SMALL_NUMEL = 1 << 16
"""Most elements that a CPU preconditions at once with method eigen_adam, whose many small
operations on small layers take more time to start than to run."""


def _batch_numel(layers: Sequence[Layer], method: str) -> int:
    devices = {layer.weight.device for layer in layers}
    if len(devices) > 1:  # the layers of a batch become one tensor
        return 0
    if devices.pop().type == "cuda":
        return BATCH_NUMEL
    return SMALL_NUMEL if method == EIGEN_ADAM else 0


def plan_for(
    layers: Sequence[Layer],
    world_size: int,
    schedules: Schedules,
    *,
    strategy: str,
    grad_worker_fraction: float | None,
    colocate_factors: bool | None,
    balance: str,
    method: str,
    spread: bool | None,
    background: bool,
    state_dtype: torch.dtype,
) -> Plan:
    """Return who computes and who sends what, for all ranks; see :class:`KFAC` for the options.

    Raises:
        ValueError: an option has an unknown value, or options do not fit together.
    """
    if spread is None:
        # One process wants short steps. Several ranks want a long step whose work they can share.
        # Beside training, work takes no time of a step, and each slice should end before the next.
        spread = world_size == 1 or background
    plan = make_plan(
        [layer.spec for layer in layers],
        world_size,
        strategy=strategy,
        grad_worker_fraction=grad_worker_fraction,
        colocate_factors=colocate_factors,
        balance=balance,
        method="inverse" if method == IDENTITY else method,
        cost=measured_cost(method),
        spread=schedules.most_slices(len(layers)) if spread else 1,
        itemsize=state_dtype.itemsize,
        batch_numel=_batch_numel(layers, method),
        sharded=world_size > 1 and any_sharded(layers),
    )
    if method == IDENTITY:
        # The control keeps only the last stage: it has no statistics and no decompositions.
        plan = replace(plan, method=IDENTITY, factors=(), slices=())
    return plan


def orthogonalize_hidden(
    layers: Sequence[Layer], rule: AdamRule, device: torch.device, *, has_output: bool
) -> AdamRule:
    """Mark the hidden linear layers, whose updates method eigen_adam orthogonalizes.

    The last layer of the model counts as its output layer. Muon leaves the output layer out as well
    (Jordan et al. 2024). A layer with more outputs than the default ``max_dim`` of KFAC is a
    vocabulary head, so it is left out, too.

    Args:
        layers: The covered layers of this process, in the order of the model.
        rule: The options of the optimizer.
        device: That of the model.
        has_output: False on a pipeline stage that is not the last one: its last layer is hidden.

    Returns:
        The options with the precision that suits the device.
    """
    for layer in layers[:-1] if has_output else layers:
        if layer.is_linear and layer.spec.g_dim <= MAX_DIM:
            layer.spec = replace(layer.spec, orthogonal_steps=rule.orthogonal_steps)
    return replace(rule, has_bfloat16=linalg.has_fast_bfloat16(device))


def divide_factors(layers: Sequence[Layer], block_size: int) -> None:
    """Divide the dense factors of the layers into blocks of at most ``block_size`` rows."""
    for layer in layers:
        layer.spec = layer.spec.divided(block_size, layer.taps)


def connect_ranks(
    plan: Plan,
    collective: Collective,
    model_parallel: Collective | None,
    *,
    options: str,
    device: torch.device,
    overlap: bool,
) -> None:
    """Check that all ranks have the same plan and options, then make the groups of the plan.

    The check comes first: ranks with different plans would wait for each other forever.

    Raises:
        PlansDifferError: a rank has another plan, or other ``options``, than rank 0.
    """
    check_same_on_all_ranks(collective, f"{plan.digest()} {options}", device)
    if model_parallel is not None:
        model_parallel.prepare([tuple(range(model_parallel.world_size))])
    # Backends need the same groups in the same order on every rank, so the set is sorted.
    groups = sorted({op.ranks for op in plan.ops() if len(op.ranks) > 1})
    collective.prepare(groups, apart=overlap)


def connect_layers(
    model: nn.Module,
    executor: Executor,
    *,
    weight_sharing: str,
    fisher: str,
    overlap: bool,
    is_last: Callable[[], bool],
) -> Capture:
    """Put hooks on the layers whose statistics this rank computes.

    ``is_last`` tells whether the running backward is the last one of the step.
    """
    plan, rank = executor.plan, executor.collective.rank
    computed = {
        op.layer.name for op in plan.factors if isinstance(op, ComputeFactor) and rank in op.ranks
    }
    # local_factors sends no statistics, so there is nothing to overlap.
    sends = any(isinstance(op, ReduceFactors) for op in plan.factors)
    moments = Moments(reduce=weight_sharing == "reduce", eigenbasis=executor.store.eigenbasis)
    if executor.background is not None:
        moments = BackgroundMoments(executor.background, moments)
    handover = None
    if overlap and sends:
        handover = Handover(moments, executor.begin_factors, executor.void_factors, is_last)
    return Capture(
        model,
        [layer for name, layer in executor.layers.items() if name in computed],
        moments=moments,
        sampled=fisher != "empirical",
        handover=handover,
    )
