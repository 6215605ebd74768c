"""The numbers that a benchmark's figure draws, and the names of its axes' values."""

from collections.abc import Iterator, Sequence

from kfac_bench.benchmark.result import Line

QUANTITY = "quantity"
"""Name of the x axis in a figure of several quantities."""
KINDS = ("measured", "computed", "published")


def heights(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the kind and the height of each bar of the line."""
    if line.measured is not None:
        yield "measured", line.measured.median
    if line.computed is not None:
        yield "computed", line.computed
    if isinstance(line.published, float):
        yield "published", line.published


def word_of_measured(lines: Sequence[Line]) -> str:
    """Return ``measured``, or ``projected`` if all measured numbers are multiples of measured ones.

    For example, the seconds of an epoch times an assumed number of epochs are projected.
    """
    measured = [line for line in lines if line.measured is not None]
    return "projected" if measured and all(x.is_projected for x in measured) else "measured"


def value_on(axis: str, line: Line) -> str:
    """Return the line's value on an axis of the figure; "" if it has none."""
    return line.quantity if axis == QUANTITY else line.point.get(axis, "")
