"""Notices layers that were replaced, added or unfrozen after a KFAC was built."""

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
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        find: Callable[[], tuple[Sequence[Layer], object]],
    ) -> None:
        self._model, self._layers, self._find = model, layers, find
        self._before = self._parameters()

    def _parameters(self) -> list[tuple[int, bool]]:
        return [(id(p), p.requires_grad) for p in self._model.parameters()]

    def look(self, notices: Notices) -> None:
        """Warn if K-FAC misses layers that it could cover."""
        now = self._parameters()
        if now == self._before:
            return
        self._before = now
        covered, names = {id(x.weight) for x in self._layers}, {x.name for x in self._layers}
        missed = [layer.name for layer in self._find()[0] if id(layer.weight) not in covered]
        if missed:
            what = "replaced" if missed[0] in names else "added or unfrozen"
            notices.give(
                "model",
                f"layer {missed[0]!r} was {what} after KFAC was built, so K-FAC does not cover it "
                f"(such layers: {len(missed)}). To cover it, call detach() and build KFAC again",
            )
