"""Notices layers so wide that preconditioning takes longer than forward and backward."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.guards.notices import Notices
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.estimate import flops
from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.ops import Precondition
from kfac_bench.core.planning.plan import Plan

MIN_FLOPS = 1e9
"""Less work than this is over in some milliseconds on one core, so nobody has to know of it."""


class WidthCheck:
    """Compares the operations of preconditioning on this rank with those of training.

    A linear layer takes 2 g a operations per row for forward and 4 g a for backward. With
    eigenvectors, preconditioning takes 4 g a (g + a), however many rows there are. So it takes
    longer if g + a is more than 1.5 times the rows.
    """

    def __init__(self, layers: Sequence[Layer], plan: Plan, rank: int) -> None:
        self._specs = [layer.spec for layer in layers]
        # max_dim does not save the orthogonalization of updates, so it does not count.
        self._work = sum(
            flops(replace(op, members=_not_orthogonalized(op.members)), plan.method, {})
            for op in plan.precondition
            if isinstance(op, Precondition) and rank in op.ranks
        )
        self._is_done = self._work < MIN_FLOPS

    def see(self, collected: Mapping[str, Collected], notices: Notices) -> None:
        """Look at the first statistics that have the rows of all layers."""
        if self._is_done or any(spec.name not in collected for spec in self._specs):
            return
        rows = {spec.name: collected[spec.name].rows for spec in self._specs}
        # If a pass was discarded, only the device knows how many rows are left.
        if not all(isinstance(number, int | float) and number > 0 for number in rows.values()):
            return
        self._is_done = True
        training = {
            spec.name: 0.0 if spec.is_lookup else 6.0 * float(rows[spec.name]) * spec.grad_numel
            for spec in self._specs
        }
        ratio = self._work / sum(training.values())
        if ratio > 1:
            widest = max(self._specs, key=lambda s: (s.g_dim + s.a_dim) / float(rows[s.name]))
            own = float(rows[widest.name])
            notices.give(
                "width",
                f"preconditioning takes about {ratio:.1f} times the operations of forward and "
                f"backward, because layers are wide for this batch: layer {widest.name} has "
                f"{widest.g_dim} x {widest.a_dim} weights and {own:.0f} rows per step. Set "
                "max_overhead=0.5, which limits the time of K-FAC to half a step, or use a larger "
                "batch",
            )


def _not_orthogonalized(specs: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    return tuple(replace(spec, orthogonal_steps=0) for spec in specs)
