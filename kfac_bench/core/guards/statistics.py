"""Notices statistics that do not belong to the gradients, and gradients without statistics."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.distributed.dtensor import local
from kfac_bench.core.guards.notices import Notices
from kfac_bench.core.layers.base import Layer

TOLERANCE = 0.2
"""Largest difference between a sum of g a^T and the gradient, as a share of the larger norm."""
HALF_TOLERANCE = 0.4
"""The same for gradients in half precision."""
IS_NOISE = 1e-5
"""A sum that is smaller than this share of its bound consists of rounding errors."""
HALF_IS_NOISE = 1e-2
CHECKS = 2
"""So often a layer is compared with a clear result."""


class StatisticsCheck:
    """Compares sums of g a^T with gradients, and looks for layers without statistics.

    Ranks add up what they saw, so all of them come to the same verdict.

    Args:
        layers: The layers that K-FAC covers.
        capture: The hooks of this rank.
        collective: The ranks of the plan.
        leave: Leaves layers, by name, to the optimizer.
        notices: Gives the warnings.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        capture: Capture,
        collective: Collective,
        leave: Callable[[set[str]], None],
        notices: Notices,
    ) -> None:
        self._layers, self._collective = {x.name: x for x in layers}, collective
        self._on_leave, self._notices = leave, notices
        self._passes, self._identity = capture.passes, capture.identity
        self._computed, self._left = capture.computed, capture.left
        self._unread = capture.unread
        self._passed = dict.fromkeys(self._layers, 0)
        self._has_new = False
        self._present: dict[str, float | Tensor] = {}
        self._idle: dict[str, Tensor] = {}

    def restart(self) -> None:
        """Compare all layers again: the model has changed."""
        self._passed = dict.fromkeys(self._layers, 0)
        if self._identity is not None:
            self._identity.due.update(self._computed - self._left)

    def leave(self, names: Collection[str]) -> None:
        """Leave layers to the optimizer, and those that share a weight with them."""
        weights = {id(self._layers[name].weight) for name in names}
        self._on_leave({name for name, x in self._layers.items() if id(x.weight) in weights})

    def see(self, collected: Mapping[str, Collected]) -> None:
        """Note which layers have statistics in this step, and which have only a gradient."""
        self._has_new = True
        for name in self._computed - self._left - self._unread:
            layer, new = self._layers[name], collected.get(name)
            if new is not None and not isinstance(new.samples, Tensor):
                self._present[name] = 1.0
                continue
            if new is not None:  # a pass was discarded, or a gradient was assigned
                self._present[name] = new.samples > 0
            # fisher="mc" may send labels back from one of several outputs only.
            is_wanted = self._identity is not None or _is_in_eval_mode(layer)
            is_wanted = is_wanted and layer.weight.requires_grad and not self._passes.had_pause
            grad = layer.weight.grad
            if grad is not None and is_wanted:
                self._idle[name] = local(grad).detach().float().square().sum()

    def judge(self) -> None:
        """Warn and leave layers to the optimizer. This reads from the device."""
        rows = self._summed_rows()
        if rows is None:
            return
        wrong: dict[str, float] = {}
        missing: list[Layer] = []
        for layer, row in zip(self._layers.values(), rows, strict=True):
            *squares, present, idle, half = row
            difference = self._difference(layer.name, squares, is_half=half > 0)
            if difference is None:
                if not present and 0 < idle < math.inf:
                    missing.append(layer)
            elif difference > (HALF_TOLERANCE if half else TOLERANCE):
                wrong[layer.name] = difference
        if missing:
            self._warn_of_missing(missing)
        if wrong:
            self._warn_of_difference(wrong)
            self.leave(wrong)

    def _summed_rows(self) -> list[list[float]] | None:
        """Return what all ranks saw since the last call, by layer; None if there is nothing."""
        if not self._has_new:
            return None
        results = {} if self._identity is None else self._identity.results
        has_several = self._collective.world_size > 1
        rows = self._rows(results) if results or self._idle or has_several else None
        results.clear()
        self._present.clear()
        self._idle.clear()
        self._has_new = False
        if rows is not None and has_several:
            ranks = tuple(range(self._collective.world_size))
            self._collective.all_reduce(rows, ranks, "check/statistics").wait()
        return None if rows is None else rows.tolist()

    def _rows(self, results: Mapping[str, Tensor]) -> Tensor:
        device = next(iter(self._layers.values())).weight.device
        rows = torch.zeros(len(self._layers), 7, device=device)
        for row, name in zip(rows, self._layers, strict=True):
            if name in results:
                row[:4] = results[name].to(row)
                row[6] = float(self._identity is not None and name in self._identity.is_half)
            if name in self._present:
                present = self._present[name]
                row[4] = present.to(row) if isinstance(present, Tensor) else present
            if name in self._idle:
                row[5] = self._idle[name].to(row)
        return rows

    def _difference(self, name: str, squares: Sequence[float], *, is_half: bool) -> float | None:
        """Return the difference as a share of the larger norm, None if the numbers are unclear."""
        total, gradient, rest, bound = squares
        size = max(total, gradient)
        noise = HALF_IS_NOISE if is_half else IS_NOISE
        if not all(map(math.isfinite, squares)) or size <= noise**2 * bound:
            return None
        self._passed[name] += 1
        if self._identity is not None and self._passed[name] >= CHECKS:
            self._identity.due.discard(name)
        return math.sqrt(rest / size)

    def _warn_of_difference(self, wrong: Mapping[str, float]) -> None:
        name, share = next(iter(wrong.items()))
        module = type(self._layers[name].modules[0]).__name__
        self._notices.give(
            f"difference of {name}",
            f"the inputs and output gradients of layer {name!r} ({module}) do not give the "
            f"gradient of its weight: they differ by {share:.0%}. The forward of {module} does "
            f"more than {type(self._layers[name]).__name__} describes, or the weight is used "
            "elsewhere, too. The optimizer trains the layer without K-FAC "
            f"(such layers: {len(wrong)}). Add it to skip, or describe it in layer_types",
        )

    def _warn_of_missing(self, missing: Sequence[Layer]) -> None:
        share = f"({len(missing)} of {len(self._layers)} layers)"
        idle = next((layer for layer in missing if _is_in_eval_mode(layer)), None)
        if idle is not None:
            self._notices.give(
                "eval",
                f"layer {idle.name!r} is trained in eval mode, where K-FAC collects no statistics "
                f"{share}. Call model.train() before the training steps",
            )
            return
        self._notices.give(
            "missing",
            f"layer {missing[0].name!r} has a gradient, but K-FAC saw no backward through its "
            f"module, so it has no statistics {share}. K-FAC cannot see gradients of torch.func, "
            "of own autograd functions, of a weight that is used outside its module, or combined "
            "by hand. Train through the module with backward(), or add the layers to skip",
        )


def _is_in_eval_mode(layer: Layer) -> bool:
    return not any(module.training for module in layer.modules)
