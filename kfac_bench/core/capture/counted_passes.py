"""Which backward passes count; statistics of other passes are not computed, or are discarded."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import Node

from kfac_bench.core.capture.gradient_watch import GradientWatch, will_run
from kfac_bench.core.capture.handover import Handover
from kfac_bench.core.capture.moments import Moments
from kfac_bench.core.layers.base import Layer


class CountedPasses:
    """Lets a pass count if its gradient is added to ``.grad`` of the weight and stays there.

    Args:
        layers: All layers, by name.
        moments: Their sums.
        handover: What has left during backward already, or None.
    """

    def __init__(
        self, layers: Mapping[str, Layer], moments: Moments, handover: Handover | None
    ) -> None:
        self._layers, self._moments, self._handover = layers, moments, handover
        self._watch = GradientWatch()
        self._pauses = 0
        self._has_paused = False
        self.had_pause = False
        """Whether a pass was left out in the step that has ended."""

    @property
    def paused(self) -> bool:
        """Whether the program is inside :meth:`pause`."""
        return self._pauses > 0

    @property
    def has_gradients(self) -> bool:
        """Whether a backward that counts has left gradients since the last :meth:`end`."""
        return self._watch.has_marks

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let forwards and backwards inside the block leave nothing."""
        # A backward inside the block may make a new .grad, which hides that an old one is gone.
        self.forget_discarded(self._layers.values())
        self._pauses += 1
        self._has_paused = True
        try:
            yield
        finally:
            self._pauses -= 1

    def includes(self, name: str, g: Tensor | None, weight_node: Node) -> bool:
        """Return whether the running backward counts for a layer that it has reached with ``g``.

        This is called before the gradient is added to ``.grad``.
        """
        if g is None or self._pauses or not will_run(weight_node):
            return False
        layer = self._layers[name]
        self.forget_discarded([layer])
        self._watch.expect(layer)
        return True

    def forget_discarded(self, layers: Iterable[Layer]) -> None:
        """Forget the moments of layers whose ``.grad`` was discarded after their last backward."""
        for layer in layers:
            if self._watch.is_removed(layer):
                self._forget(layer)
            elif (zeroed := self._watch.zeroed(layer)) is not None:
                if not self._is_sent(layer):
                    self._moments.forget_where(layer.name, zeroed)
                elif zeroed:  # what was sent cannot wait for the device to decide
                    self._forget(layer)

    def end(self) -> None:
        """Forget moments whose gradients are gone before the step; then start again."""
        for layer in self._layers.values():
            # What was sent stays, because other ranks have it.
            if not self._is_sent(layer) and self._watch.is_removed(layer):
                self._forget(layer)
        self._watch.clear()
        self.had_pause, self._has_paused = self._has_paused, False

    def _is_sent(self, layer: Layer) -> bool:
        return self._handover is not None and self._handover.is_sent(layer.name)

    def _forget(self, layer: Layer) -> None:
        self._moments.forget(layer.name)
        self._watch.forget(layer)
        if self._handover is not None:
            self._handover.discard()
