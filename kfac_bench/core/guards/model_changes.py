"""Notices layers that were replaced, added, unfrozen or pruned after a KFAC was built."""

from collections.abc import Callable, Sequence

from torch import nn

from kfac_bench.core.guards.notices import Notices
from kfac_bench.core.layers.base import Layer


class ModelChanges:
    """Compares the model with what it was when K-FAC was built.

    Args:
        model: The model, without wrapper.
        layers: The layers that K-FAC covers.
        find: Returns the layers that a KFAC built now would cover, and others.

    Attributes:
        parametrized: The names of layers whose weight is now computed from the parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        find: Callable[[], tuple[Sequence[Layer], object]],
    ) -> None:
        self._model, self._layers, self._find = model, layers, find
        self._before = self._parameters()
        self.parametrized: list[str] = []

    def _parameters(self) -> list[tuple[str, int, bool]]:
        # Pruning keeps the parameter and changes its name.
        return [(name, id(p), p.requires_grad) for name, p in self._model.named_parameters()]

    def look(self, notices: Notices) -> bool:
        """Warn of layers that K-FAC misses; return whether the model has changed."""
        now = self._parameters()
        if now == self._before:
            return False
        self._before = now
        found = self._find()[0]
        self._warn_of_missed(found, notices)
        usable, trained = {id(x.weight) for x in found}, {key for _, key, used in now if used}
        self.parametrized = [
            layer.name
            for layer in self._layers
            if id(layer.weight) in trained and id(layer.weight) not in usable
        ]
        if self.parametrized:
            notices.give(
                "parametrized",
                f"the weight of layer {self.parametrized[0]!r} is computed from a parameter since "
                "KFAC was built (pruning or another parametrization), so K-FAC has no statistics "
                f"any more (such layers: {len(self.parametrized)}). The optimizer trains the layer "
                "without K-FAC",
            )
        return True

    def _warn_of_missed(self, found: Sequence[Layer], notices: Notices) -> None:
        covered, names = {id(x.weight) for x in self._layers}, {x.name for x in self._layers}
        missed = [layer.name for layer in found if id(layer.weight) not in covered]
        if missed:
            what = "replaced" if missed[0] in names else "added or unfrozen"
            notices.give(
                "model",
                f"layer {missed[0]!r} was {what} after KFAC was built, so K-FAC does not cover it "
                f"(such layers: {len(missed)}). To cover it, call detach() and build KFAC again",
            )
