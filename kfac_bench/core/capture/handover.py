"""Send statistics while backward still runs, for ``KFAC(overlap=True)``."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch

from kfac_bench.core.capture.moments import Collected, Moments


class Handover:
    """Hands over the moments of layers that have received the gradients of all their uses.

    Layers that never become complete (the loss did not need their output) stay in ``moments``.

    Args:
        moments: The sums of all layers.
        on_complete: Called during backward each time a layer is complete. Its argument holds the
            moments of all complete layers. It is not called while ``accumulating`` or ``is_last``
            say that more backwards will follow.
        on_void: Called if gradients are discarded although their moments may have been handed over,
            on this rank or on another one.
        is_last: Returns whether the running backward is the last one of the step.
    """

    def __init__(
        self,
        moments: Moments,
        on_complete: Callable[[Mapping[str, Collected | None]], None],
        on_void: Callable[[], None],
        is_last: Callable[[], bool],
    ) -> None:
        self.accumulating = False
        """Whether more backwards will follow. The owner sets it."""
        self._moments = moments
        self._on_complete, self._on_void, self._is_last = on_complete, on_void, is_last
        self._pending: Counter[str] = Counter()  # uses without gradient yet, by layer
        self._complete: dict[str, Collected | None] = {}
        self._has_begun = self._is_void = False

    def expect(self, name: str) -> None:
        """Wait for the gradient of a further use of a layer."""
        self._pending[name] += 1

    def arrived(self, name: str) -> None:
        """Count a gradient that :meth:`expect` announced. Hand over the layer if it is complete."""
        self._pending[name] -= 1
        self.finish([] if self._pending[name] else [name])

    def finish(self, names: Iterable[str]) -> None:
        """Hand over complete layers, unless more backwards will follow."""
        if self.accumulating or self._is_void or not self._is_last():
            return
        # Also without complete layers: all ranks must agree, and others may have complete layers.
        self._has_begun = True
        with torch.no_grad():
            complete = {name: self._moments.take(name) for name in names}
            if complete:
                self._complete |= complete
                self._on_complete(self._complete)

    def check_not_sent(self, name: str) -> None:
        """Check that nothing of a layer was handed over before its next gradient.

        Raises:
            RuntimeError: The layer was handed over.
        """
        if name in self._complete:
            raise RuntimeError(
                f"overlap=True: {name} got a gradient after its statistics were sent; "
                "run all backwards of a step but the last inside accumulate(), or use overlap=False"
            )

    def is_sent(self, name: str) -> bool:
        """Return whether the layer was handed over."""
        return name in self._complete

    def discard(self) -> None:
        """Take back everything: gradients of some layers were discarded."""
        if self._has_begun and not self._is_void:
            self._is_void = True
            for name in self._complete:
                self._moments.forget(name)
            self._complete.clear()
            self._on_void()

    def pop(self) -> dict[str, Collected | None]:
        """Return what was handed over since the last call, and start again."""
        complete, self._complete = self._complete, {}
        self._pending.clear()
        self._has_begun = self._is_void = False
        return complete
