"""The construction of a :class:`KFAC` in three steps: validate, plan, connect.

``KFAC.__init__`` calls :func:`build`. Nothing here decides anything about the algorithm itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from kfac_bench.core import layer_plan, validation
from kfac_bench.core.attachment import check_free
from kfac_bench.core.capture.counted_passes import EarlySender
from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.capture.identity import AssignedGradients
from kfac_bench.core.capture.moments import Moments
from kfac_bench.core.damping import adaptive
from kfac_bench.core.distributed.collective import (
    Collective,
    PlansDifferError,
    check_same_on_all_ranks,
    ranks_unlike_first,
)
from kfac_bench.core.eigen_adam_optimizer import Coverage, EigenAdam, find_eigen_adam
from kfac_bench.core.execution.adam import AdamRule
from kfac_bench.core.execution.background import Background, BackgroundMoments
from kfac_bench.core.execution.executor import Executor
from kfac_bench.core.execution.write_back import WriteBack
from kfac_bench.core.guards.guards import Guards
from kfac_bench.core.kernels.gram import CONVENTIONS
from kfac_bench.core.kfac_options import OPTIONS, KFACOptions, schedules_of
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.layers.coverage import LayerTypes, SkippedModule, find_layers, unwrap
from kfac_bench.core.planning.plan import ComputeFactor, Plan, ReduceFactors
from kfac_bench.core.schedule import Schedules


@dataclass(frozen=True)
class KFACParts:
    """The parts of a :class:`KFAC`. No part refers to the KFAC."""

    model: nn.Module
    """The model without its wrappers."""
    wrapped: ref[nn.Module]
    """The model as the user passed it. A weak reference: hooks must not keep a wrapper alive."""
    layers: list[Layer]
    skipped: list[SkippedModule]
    schedules: Schedules
    plan: Plan
    executor: Executor
    write_back: WriteBack
    capture: Capture
    guards: Guards
    coverage: Coverage | None
    """The parameters that EigenAdam updates along directions from this KFAC. None with another
    optimizer."""


def build(
    model: nn.Module,
    optimizer: Optimizer,
    options: KFACOptions,
    layer_types: LayerTypes | None,
    collective: Collective,
    model_parallel: Collective | None,
    before: WriteBack | None = None,
) -> KFACParts:
    """Build all parts of a KFAC; see :class:`KFAC` for the arguments and the errors.

    ``before`` is the part of a KFAC that is built again.
    """
    # Step 1, validate: refuse what cannot work, before anything is built.
    validation.check_model(model)
    validation.check_optimizer(optimizer)
    validation.check_collective("collective", collective)
    if model_parallel is not None:
        validation.check_collective("model_parallel", model_parallel)
    validation.check_options(options)
    if options["max_overhead"] is not None and model_parallel is not None:
        raise ValueError(
            "max_overhead with model_parallel: stages would choose different intervals; set "
            "block_size and the intervals instead"
        )
    adam = find_eigen_adam(optimizer)
    validation.check_eigen_adam(options, None if adam is None else adam.rule)
    bare = unwrap(model)
    layers, skipped = layer_plan.covered_layers(bare, options, layer_types)
    if before is not None:  # the optimizer may lack a layer that was unfrozen since then
        layers = [layer for layer in layers if layer.name in before.names]
    validation.check_layers(layers, skipped, bare, collective.world_size, options)
    check_free(layers)
    write_back = WriteBack(
        layers,
        optimizer,
        model_parallel,
        grafting=options["grafting"],
        trust_ratio=options["trust_ratio"],
        before=before,
    )

    # Step 2, plan: who computes and who sends what. Every rank makes the same plan.
    rule = _mark_hidden(layers, adam, model_parallel)
    schedules = schedules_of(options, is_eigen_adam=adam is not None)
    plan = layer_plan.plan_for(layers, collective.world_size, schedules, options)
    validation.check_damping(plan, options, is_pipeline=model_parallel is not None)

    # Step 3, connect: to the other ranks, to the tensors, and to the model.
    device = layers[0].weight.device
    what = _what_ranks_share(plan, schedules, options, rule)
    _connect_ranks(plan, collective, what, device, overlap=options["overlap"])
    if model_parallel is not None:
        limits = f"{schedules.at(0).kl_clip} {options['trust_ratio']}"
        _connect_stages(model_parallel, limits, device)
    executor = Executor(
        plan,
        collective,
        layers,
        CONVENTIONS[options["factor_convention"]],
        of_sums=options["fisher"] != "empirical",
        from_identity=options["factor_init"] == "identity",
        factored_damping=options["factored_damping"],
        state_dtype=options["state_dtype"],
        background=Background(device) if options["background"] else None,
        adam=rule,
    )
    capture = _connect_layers(model, bare, executor, options)
    coverage = None if adam is None else Coverage((x.weight, x.bias) for x in layers)
    leave = partial(_leave, executor, capture, coverage)
    # Not the options as a whole: a schedule may refer to the KFAC, which no guard must keep alive.
    find = partial(
        find_layers,
        bare,
        options["skip"],
        layer_types=layer_types,
        max_dim=options["max_dim"],
    )
    guards = Guards(
        bare,
        layers,
        plan,
        find,
        capture,
        collective,
        leave,
        sees_moments=not options["overlap"],
        checks_width=options["weight_sharing"] == "expand" and options["max_overhead"] is None,
        can_limit=not options["background"] and model_parallel is None,
    )
    return KFACParts(
        bare,
        ref(model),
        layers,
        skipped,
        schedules,
        plan,
        executor,
        write_back,
        capture,
        guards,
        coverage,
    )


def _mark_hidden(
    layers: list[Layer], adam: EigenAdam | None, model_parallel: Collective | None
) -> AdamRule | None:
    """Return the rule of method eigen_adam, None for other methods; mark the layers it needs."""
    if adam is None or adam.rule.options["orthogonalize"] != "linear":
        return None if adam is None else adam.rule
    has_output = model_parallel is None or model_parallel.rank == model_parallel.world_size - 1
    device = layers[0].weight.device
    return layer_plan.orthogonalize_hidden(layers, adam.rule, device, has_output=has_output)


def _what_ranks_share(
    plan: Plan, schedules: Schedules, options: KFACOptions, rule: AdamRule | None
) -> str:
    """Return the plan, and all options that it does not contain, as one text to compare."""
    values: Mapping[str, object] = options
    others = [values[name] for name, option in OPTIONS.items() if option.is_compared]
    return f"{plan.digest()} {schedules.at(0)} {adaptive(options['damping'])} {others} {rule}"


def _connect_ranks(
    plan: Plan,
    collective: Collective,
    what: str,
    device: torch.device,
    *,
    overlap: bool,
) -> None:
    """Check that all ranks have the same plan and options, then make the groups of the plan.

    The check comes first: ranks with different plans would wait for each other forever.

    Raises:
        PlansDifferError: a rank has another plan, or other options, than rank 0.
    """
    check_same_on_all_ranks(collective, what, device)
    # Backends need the same groups in the same order on every rank. Rows of the grid of ranks come
    # before columns, so that each rank makes as many groups before a group as the other members:
    # torch counts them to name the groups of a part of the ranks.
    found = {op.ranks for op in plan.ops() if len(op.ranks) > 1}
    groups = sorted(found, key=lambda ranks: (ranks[1] - ranks[0], ranks))
    collective.prepare(groups, apart=overlap)


def _connect_stages(stages: Collective, limits: str, device: torch.device) -> None:
    """Make the group of the pipeline's stages, and check that all have the same limits of a step.

    A stage with a limit would wait forever for the sums of a stage without one.

    Raises:
        PlansDifferError: A stage has other limits than stage 0.
    """
    stages.prepare([tuple(range(stages.world_size))])
    if others := ranks_unlike_first(stages, limits, device):
        raise PlansDifferError(
            f"stages {others} of the pipeline have another kl_clip or trust_ratio than stage 0: "
            "these limits sum over all layers, so every stage must pass the same ones"
        )


def _connect_layers(
    wrapped: nn.Module, model: nn.Module, executor: Executor, options: KFACOptions
) -> Capture:
    """Put hooks on the layers whose statistics this rank computes."""
    plan, rank = executor.plan, executor.collective.rank
    computed = {
        op.layer.name for op in plan.factors if isinstance(op, ComputeFactor) and rank in op.ranks
    }
    # local_factors sends no statistics, so there is nothing to overlap.
    sends = any(isinstance(op, ReduceFactors) for op in plan.factors)
    reduce = options["weight_sharing"] == "reduce"
    moments = Moments(reduce=reduce, eigenbasis=executor.store.eigenbasis)
    assigned = None
    if options["fisher"] == "empirical" and executor.collective.world_size == 1:
        # On several ranks a gradient is an average, which no rank can compare with its own sums.
        assigned = AssignedGradients(Moments(reduce=reduce, eigenbasis=executor.store.eigenbasis))
    if executor.background is not None:
        moments = BackgroundMoments(executor.background, moments)
    sender = None
    if options["overlap"] and sends:
        sender = EarlySender(
            moments,
            executor.begin_factors,
            executor.void_factors,
            ref(wrapped),  # the hooks on a model must not keep the wrapper of that model alive
        )
        executor.sends_early = True
    return Capture(
        model,
        [layer for name, layer in executor.layers.items() if name in computed],
        moments=moments,
        sampled=options["fisher"] != "empirical",
        sender=sender,
        assigned=assigned,
        # The other conventions repeat codes that count samples by the input of each layer.
        counts_examples=options["factor_convention"] == "kfc",
    )


def _leave(
    executor: Executor, capture: Capture, coverage: Coverage | None, names: set[str]
) -> None:
    """Leave layers to the optimizer: no statistics any more, and gradients as they are."""
    capture.left |= names
    executor.gradients.leave(names)
    if coverage is not None:
        layers = [executor.layers[name] for name in names]
        coverage.leave(p for layer in layers for p in (layer.weight, layer.bias))
