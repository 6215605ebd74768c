"""To which forward and backward a call belongs that reentrant checkpointing repeats.

``checkpoint(..., use_reentrant=True)`` first runs a segment without a graph. Inside the backward of
the loss it runs the segment again and starts a backward of its own. So without this file, calls of
one layer in several segments would count as calls of several batches.
"""

import torch

OUTSIDE = -1
"""The number of the running backward if there is none."""


class RepeatedForwards:
    """The calls without a graph, which may be repeated later: the last segment comes first."""

    def __init__(self) -> None:
        self._forwards: dict[str, list[int]] = {}  # by layer, in the order of the calls

    def note(self, name: str, forward: int) -> None:
        """Note a call of a layer without a graph, in the forward with this number."""
        self._forwards.setdefault(name, []).append(forward)

    def origin(self, name: str, forward: int) -> tuple[int, int]:
        """Return the forward that a call with a graph belongs to, and the backward that repeats it.

        Args:
            name: The layer.
            forward: The number of the newest forward.

        Returns:
            The forward, and the number of the backward; :data:`OUTSIDE` if nothing is repeated.
        """
        backward, noted = torch._C._current_graph_task_id(), self._forwards.get(name)
        if backward == OUTSIDE or not noted:
            return forward, OUTSIDE
        return noted.pop(), backward

    def clear(self) -> None:
        """Forget all calls: a step has ended."""
        self._forwards.clear()
