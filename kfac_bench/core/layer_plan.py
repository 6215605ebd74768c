"""The covered layers of a model, the plan of their work, and the report on both.

:mod:`.construction` calls these functions. They send nothing and put no hooks on the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from kfac_bench.core.execution.adam import AdamRule
from kfac_bench.core.execution.gradients import any_sharded
from kfac_bench.core.kernels import linalg
from kfac_bench.core.kfac_options import MAX_DIM, KFACOptions, schedules_of
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.layers.coverage import LayerTypes, SkippedModule, find_layers
from kfac_bench.core.planning.budget import Choice, Rates, Seen, choose
from kfac_bench.core.planning.estimate import memory_bytes, payload_bytes
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec
from kfac_bench.core.planning.plan import EIGEN_ADAM, IDENTITY, Plan, Stage
from kfac_bench.core.planning.planner import BATCH_NUMEL, make_plan, measured_cost
from kfac_bench.core.schedule import Schedules

SMALL_NUMEL = 1 << 16
"""Most elements that a CPU preconditions at once with method eigen_adam, whose many small
operations on small layers take more time to start than to run."""


def covered_layers(
    model: nn.Module, options: KFACOptions, layer_types: LayerTypes | None
) -> tuple[list[Layer], list[SkippedModule]]:
    """Return the layers that K-FAC covers, and the modules that it leaves to the optimizer."""
    layers, skipped = find_layers(
        model, options["skip"], layer_types=layer_types, max_dim=options["max_dim"]
    )
    for layer in layers:
        layer.spec = _within(layer, options["max_dim"], options["block_size"])
    return layers, skipped


def _within(layer: Layer, max_dim: int, block_size: int | None) -> LayerSpec:
    """Return the shapes of a layer with diagonals and blocks in place of larger factors."""
    spec = layer.spec
    spec = replace(
        spec,
        a_diagonal=spec.a_diagonal or spec.a_dim > max_dim,
        g_diagonal=spec.g_diagonal or spec.g_dim > max_dim,
    )
    return spec if block_size is None else spec.divided(block_size, layer.taps)


def choose_within_budget(
    layers: Sequence[Layer],
    world_size: int,
    options: KFACOptions,
    seen: Seen,
    rates: Rates,
) -> Choice:
    """Return the most faithful options that keep ``options["max_overhead"]``.

    Raises:
        BudgetError: The cheapest options take more than the budget.
    """
    assert options["max_overhead"] is not None
    schedules = schedules_of(options, is_eigen_adam=False)
    first = schedules.at(0)

    def plan_of(max_dim: int, block_size: int | None) -> Plan:
        specs = [_within(layer, max_dim, block_size) for layer in layers]
        return plan_for(layers, world_size, schedules, options, specs)

    return choose(
        options["max_overhead"],
        Choice(
            options["max_dim"],
            options["block_size"],
            first.factor_update_freq,
            first.update_freq,
            0.0,
        ),
        plan_of,
        seen,
        rates,
        # A function of the step already says how long intervals are.
        may_stretch=not (
            callable(options["update_freq"]) or callable(options["factor_update_freq"])
        ),
    )


def orthogonalize_hidden(
    layers: Sequence[Layer], rule: AdamRule, device: torch.device, *, has_output: bool
) -> AdamRule:
    """Mark the hidden layers whose updates method eigen_adam orthogonalizes.

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
        if layer.may_be_orthogonalized and layer.spec.g_dim <= MAX_DIM:
            layer.spec = replace(layer.spec, orthogonal_steps=rule.options["orthogonal_steps"])
    return replace(rule, has_bfloat16=linalg.has_fast_bfloat16(device))


def plan_for(
    layers: Sequence[Layer],
    world_size: int,
    schedules: Schedules,
    options: KFACOptions,
    specs: Sequence[LayerSpec] | None = None,
) -> Plan:
    """Return who computes and who sends what, for all ranks.

    Args:
        layers: The covered layers.
        world_size: The number of ranks.
        schedules: The schedules of the options.
        options: The options.
        specs: Shapes in place of those of the layers.

    Raises:
        ValueError: an option has an unknown value, or options do not fit together.
    """
    method, spread = options["method"], options["spread"]
    if spread is None:
        # One process wants short steps. Several ranks want a long step whose work they can share.
        # Beside training, work takes no time of a step, and each slice should end before the next.
        spread = world_size == 1 or options["background"]
    plan = make_plan(
        [layer.spec for layer in layers] if specs is None else specs,
        world_size,
        strategy=options["strategy"],
        grad_worker_fraction=options["grad_worker_fraction"],
        colocate_factors=options["colocate_factors"],
        balance=options["balance"],
        method="inverse" if method == IDENTITY else method,
        cost=measured_cost(method),
        spread=schedules.most_slices(len(layers)) if spread else 1,
        itemsize=options["state_dtype"].itemsize,
        batch_numel=_batch_numel(layers, method),
        sharded=world_size > 1 and any_sharded(layers),
    )
    if method == IDENTITY:
        # The control keeps only the last stage: it has no statistics and no decompositions.
        plan = replace(plan, method=IDENTITY, factors=(), slices=())
    return plan


def _batch_numel(layers: Sequence[Layer], method: str) -> int:
    devices = {layer.weight.device for layer in layers}
    if len(devices) > 1:  # the layers of a batch become one tensor
        return 0
    if devices.pop().type == "cuda":
        return BATCH_NUMEL
    return SMALL_NUMEL if method == EIGEN_ADAM else 0


@dataclass(frozen=True)
class Report:
    """The report of :meth:`KFAC.report`: ``print(preconditioner.report())``."""

    plan: Plan
    """The work and the messages of each rank."""
    rank: int
    """The rank whose memory the text shows."""
    layers: Sequence[Layer]
    """The covered layers, in the order of the model."""
    skipped: Sequence[SkippedModule]
    """The modules that are left to the optimizer, each with its reason."""
    choice: Choice | None = None
    """The choice of ``max_overhead``, None before it or without."""

    @property
    def covered_params(self) -> int:
        """Number of parameters whose gradients are preconditioned."""
        return sum(layer.spec.grad_numel for layer in self.layers)

    @property
    def skipped_params(self) -> int:
        """Number of parameters that are left to the optimizer."""
        return sum(s.params for s in self.skipped)

    @property
    def largest_factor(self) -> int:
        """Rows of the largest matrix that is decomposed: a block counts, a diagonal does not."""
        specs = [layer.spec for layer in self.layers]
        dims = [spec.dim(f) for spec in specs for f in spec.factors if not spec.is_diagonal(f)]
        return max(dims, default=1)

    @property
    def matrices(self) -> int:
        """The number of matrices that are decomposed: each block counts, a diagonal does not."""
        specs = [layer.spec for layer in self.layers]
        return sum(s.groups for s in specs for f in s.factors if not s.is_diagonal(f))

    def payload_bytes(self) -> dict[str, dict[str, int]]:
        """Return the bytes of all messages each time that a stage runs, by stage and kind.

        Each message counts once, however many ranks it has.
        """
        return {stage.value: payload_bytes(self.plan, stage) for stage in Stage}

    def __str__(self) -> str:
        chosen = [] if self.choice is None else [str(self.choice)]
        return "\n".join([self.coverage(), *self._cost(), *chosen])

    def coverage(self, *, by_layer: bool = True) -> str:
        """Return the covered and the skipped modules as text.

        Args:
            by_layer: Whether to write a line for each layer and each skipped module. Otherwise the
                text is one line.
        """
        total = self.covered_params + self.skipped_params
        share = 100 * self.covered_params / total
        rows = [
            f"K-FAC covers {len(self.layers)} layers, {self.covered_params:,} of {total:,} "
            f"parameters ({share:.1f} %)"
        ]
        if not by_layer:
            return f"{rows[0]}; {len(self.skipped)} modules are left to the optimizer"
        names = [x.name for x in self.layers] + [s.name for s in self.skipped]
        width = max(map(len, names))
        for layer in self.layers:
            kind = type(layer.modules[0]).__name__
            rows.append(f"  {layer.name:{width}}  {kind:10}  {_factors(layer.spec)}")
        if self.skipped:
            rows.append(f"left to the optimizer: {len(self.skipped)} modules")
            rows += [f"  {s.name:{width}}  {s.kind:10}  {s.reason}" for s in self.skipped]
        return "\n".join(rows)

    def _cost(self) -> list[str]:
        plan = self.plan
        memory = memory_bytes(plan, self.rank)
        rows = [
            f"strategy {plan.strategy}, method {plan.method}, {plan.world_size} rank(s)",
            f"memory of rank {self.rank}: "
            + ", ".join(f"{kind} {_megabytes(n)}" for kind, n in memory.items()),
        ]
        for stage, sent in self.payload_bytes().items():
            rows += [f"sent per {stage} stage: {k} {_megabytes(n)}" for k, n in sent.items()]
        return rows


def _factors(spec: LayerSpec) -> str:
    each = [f"{side} {spec.dim(side)}{_form(spec, side)}" for side in FACTORS]
    return ", ".join(each) + (f", {spec.groups} groups" if spec.groups > 1 else "")


def _form(spec: LayerSpec, side: Factor) -> str:
    if spec.is_diagonal(side):
        return " (diagonal)"
    blocks = spec.blocks(side)
    return f" ({len(blocks)} blocks of at most {max(blocks)})" if blocks else ""


def _megabytes(n: float) -> str:
    return f"{n / 1e6:.2f} MB"
