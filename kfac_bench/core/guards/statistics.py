"""Notices statistics that do not belong to the gradients, and gradients without statistics.

:mod:`kfac_bench.core.capture.identity` compares both. Here the ranks come to one verdict.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.distributed.dtensor import local
from kfac_bench.core.layers.base import Layer

TOLERANCE = 0.2
"""Largest difference between a sum of g a^T and the gradient, as a share of the larger norm."""
HALF_TOLERANCE = 0.4
"""The tolerance for gradients in half precision."""
IS_NOISE = 1e-5
"""A sum that is smaller than this share of its bound consists of rounding errors."""
HALF_IS_NOISE = 1e-2
CHECKS = 2
"""Number of comparisons with a clear result that each layer needs."""
MOST_UNCLEAR = 5
"""After so many comparisons without a clear result a layer is compared no more. In half precision
the gradient of a convolution is often smaller than what could be rounding errors."""


class StatisticsCheck:
    """Compares sums of g a^T with gradients; looks for layers without statistics or other layers.

    Ranks add up what they saw, so all of them come to the same verdict.

    Args:
        model: The model, without wrapper.
        layers: The layers that K-FAC covers.
        find: Returns the layers that a KFAC built now would cover, and others.
        capture: The hooks of this rank.
        collective: The ranks of the plan.
        leave: Leaves layers, by name, to the optimizer.
        warn: Gives a warning of a kind once.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        find: Callable[[], tuple[Sequence[Layer], object]],
        capture: Capture,
        collective: Collective,
        leave: Callable[[set[str]], None],
        warn: Callable[[str, str], None],
    ) -> None:
        self._layers, self._collective = {x.name: x for x in layers}, collective
        self._on_leave, self._warn = leave, warn
        self._capture, self._identity = capture, capture.identity
        self._passed = dict.fromkeys(self._layers, 0)
        self._unclear = dict.fromkeys(self._layers, 0)
        self._model, self._find = model, find
        self._before = self._parameters()
        self._has_new = False
        self._present: dict[str, float | Tensor] = {}
        self._idle: dict[str, Tensor] = {}
        self.missing: set[str] = set()
        """Names of layers that had a gradient without statistics when they were last judged."""

    def leave(self, names: Collection[str]) -> None:
        """Leave layers to the optimizer, and those that share a weight with them."""
        weights = {id(self._layers[name].weight) for name in names}
        self._on_leave({name for name, x in self._layers.items() if id(x.weight) in weights})

    def see_model(self) -> None:
        """Look for layers that were replaced, added, unfrozen or parametrized."""
        now = self._parameters()
        if now == self._before:
            return
        self._before = now
        found = self._find()[0]
        covered = {id(x.weight) for x in self._layers.values()}
        missed = [layer.name for layer in found if id(layer.weight) not in covered]
        if missed:
            what = "replaced" if missed[0] in self._layers else "added or unfrozen"
            self._warn(
                "model",
                f"layer {missed[0]!r} was {what} after KFAC was built, so K-FAC does not cover it "
                f"(such layers: {len(missed)}). To cover it, call detach() and build KFAC again",
            )
        if names := self._parametrized(found):
            self._warn(
                "parametrized",
                f"the weight of layer {names[0]!r} is computed from a parameter since KFAC was "
                "built (pruning or another parametrization), so K-FAC has no statistics any more "
                f"(such layers: {len(names)}). The optimizer trains the layer without K-FAC",
            )
            self.leave(names)
        # Compare all layers again.
        self._passed = dict.fromkeys(self._layers, 0)
        self._unclear = dict.fromkeys(self._layers, 0)
        if self._identity is not None:
            self._identity.due.update(self._capture.computed - self._capture.left)

    def _parameters(self) -> list[tuple[str, int, bool]]:
        # Pruning keeps the parameter and changes its name.
        return [(name, id(p), p.requires_grad) for name, p in self._model.named_parameters()]

    def _parametrized(self, found: Sequence[Layer]) -> list[str]:
        """Return the names of layers whose modules compute with other weights now."""
        usable, names = {id(x.weight) for x in found}, {x.name for x in found}
        is_trained = {key: requires_grad for _, key, requires_grad in self._before}
        modules = set(self._model.modules())
        return [
            name
            for name, x in self._layers.items()
            if id(x.weight) not in usable
            # Weight norm replaces the parameter. A module that is gone needs no warning.
            and is_trained.get(
                id(x.weight), name not in names and not modules.isdisjoint(x.modules)
            )
        ]

    def see(self, collected: Mapping[str, Collected]) -> None:
        """Note which layers have statistics in this step, and which have only a gradient."""
        self.see_model()
        self._has_new = True
        capture = self._capture
        for name in capture.computed - capture.left - capture.unread:
            layer, new = self._layers[name], collected.get(name)
            if new is not None and not isinstance(new.samples, Tensor):
                self._present[name] = 1.0
                continue
            if new is not None:  # a pass was discarded, or a gradient was assigned
                self._present[name] = new.samples > 0
            # fisher="mc" may send labels back from one of several outputs only.
            is_wanted = self._identity is not None or _is_in_eval_mode(layer)
            is_wanted = is_wanted and layer.weight.requires_grad and not capture.passes.had_pause
            grad = layer.weight.grad
            if grad is not None and is_wanted:
                self._idle[name] = local(grad).detach().float().square().sum()

    def judge(self) -> None:
        """Warn and leave layers to the optimizer. This reads from the device."""
        wrong: dict[str, float] = {}
        missing: list[Layer] = []
        unread: set[str] = set()
        for layer, row in zip(self._layers.values(), self._summed_rows(), strict=False):
            *squares, present, idle, half, is_unread = row
            difference = self._difference(layer.name, squares, is_half=half > 0)
            if is_unread and not present:
                unread.add(layer.name)
            if present:
                self.missing.discard(layer.name)
            if difference is None:
                if not present and 0 < idle < math.inf:
                    missing.append(layer)
            elif difference > (HALF_TOLERANCE if half else TOLERANCE):
                wrong[layer.name] = difference
        if missing:
            self.missing.update(layer.name for layer in missing)
            self._warn_of_missing(missing)
        if wrong:
            self._warn_of_difference(wrong)
            self.leave(wrong)
        if unread:  # the hooks have warned
            self.leave(unread)

    def _summed_rows(self) -> list[list[float]]:
        """Return the sums over all ranks since the last call, by layer; [] if there are none."""
        results = {} if self._identity is None else self._identity.results
        world_size = self._collective.world_size
        rows: list[list[float]] = []
        has_any = results or self._idle or self._capture.unread - self._capture.left
        if self._has_new and (has_any or world_size > 1):
            device = next(iter(self._layers.values())).weight.device
            table = torch.zeros(len(self._layers), 8, device=device)
            for row, name in zip(table, self._layers, strict=True):
                if name in results:
                    row[:4] = results[name].to(row)
                    row[6] = float(self._identity is not None and name in self._identity.is_half)
                row[4], row[5] = self._present.get(name, 0.0), self._idle.get(name, 0.0)
                row[7] = float(name in self._capture.unread - self._capture.left)
            if world_size > 1:
                ranks = tuple(range(world_size))
                self._collective.all_reduce(table, ranks, "check/statistics").wait()
            rows = table.tolist()
        self._has_new = False
        for seen in (results, self._present, self._idle):
            seen.clear()
        if self._identity is not None:
            self._identity.compared.clear()
        return rows

    def _difference(self, name: str, squares: Sequence[float], *, is_half: bool) -> float | None:
        """Return the difference as a share of the larger norm, None if the numbers are unclear."""
        total, gradient, rest, bound = squares
        size = max(total, gradient)
        noise = HALF_IS_NOISE if is_half else IS_NOISE
        if not bound or not all(map(math.isfinite, squares)):
            return None
        is_clear = size > noise**2 * bound
        counts, most = (self._passed, CHECKS) if is_clear else (self._unclear, MOST_UNCLEAR)
        counts[name] += 1
        if self._identity is not None and counts[name] >= most:
            self._identity.due.discard(name)
        return math.sqrt(rest / size) if is_clear else None

    def _warn_of_difference(self, wrong: Mapping[str, float]) -> None:
        name, share = next(iter(wrong.items()))
        module = type(self._layers[name].modules[0]).__name__
        self._warn(
            f"difference of {name}",
            f"the inputs and output gradients of layer {name!r} ({module}) do not give the "
            f"gradient of its weight: they differ by {share:.0%}. The forward of {module} does "
            f"more than {type(self._layers[name]).__name__} describes, or the weight is used "
            "elsewhere, too, or in a derivative that K-FAC cannot see. The optimizer trains the "
            f"layer without K-FAC (such layers: {len(wrong)}). Add it to skip, or describe it in "
            "layer_types",
        )

    def _warn_of_missing(self, missing: Sequence[Layer]) -> None:
        share = f"({len(missing)} of {len(self._layers)} layers)"
        idle = next((layer for layer in missing if _is_in_eval_mode(layer)), None)
        if idle is not None:
            self._warn(
                "eval",
                f"layer {idle.name!r} is trained in eval mode, where K-FAC collects no statistics "
                f"{share}. Call model.train() before the training steps",
            )
            return
        self._warn(
            "missing",
            f"layer {missing[0].name!r} has a gradient, but K-FAC saw no backward through its "
            f"module, so it has no statistics {share}. K-FAC cannot see gradients of torch.func, "
            "of own autograd functions, of a weight that is used outside its module, or combined "
            "by hand. Train through the module with backward(), or add the layers to skip",
        )


def _is_in_eval_mode(layer: Layer) -> bool:
    return not any(module.training for module in layer.modules)
