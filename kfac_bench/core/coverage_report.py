"""What a preconditioner covers and what it costs, as text for people and fields for programs."""

from collections.abc import Sequence
from dataclasses import dataclass

from kfac_bench.core.layers.base import Layer
from kfac_bench.core.layers.coverage import SkippedModule
from kfac_bench.core.planning.budget import Choice
from kfac_bench.core.planning.estimate import memory_bytes, payload_bytes
from kfac_bench.core.planning.layer_spec import FACTORS, Factor, LayerSpec
from kfac_bench.core.planning.plan import Plan, Stage


@dataclass(frozen=True)
class Report:
    """The report of :meth:`KFAC.report`: ``print(preconditioner.report())``."""

    plan: Plan
    """Who computes and sends what."""
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

    def payload_bytes(self) -> dict[str, dict[str, int]]:
        """Return the bytes of all messages each time that a stage runs, by stage and kind.

        Each message counts once, however many ranks it has.
        """
        return {stage.value: payload_bytes(self.plan, stage) for stage in Stage}

    def __str__(self) -> str:
        chosen = [] if self.choice is None else [str(self.choice)]
        return "\n".join([self.coverage(), *self._cost(), *chosen])

    def coverage(self, *, by_layer: bool = True) -> str:
        """Return what is covered and what is not, as text.

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
