"""The points of a benchmark's table: a value for each axis."""

from collections.abc import Mapping, Sequence

GridPoint = Mapping[str, str]
"""Axis to value."""
PointKey = frozenset[tuple[str, str]]
"""A point that can be the key of a mapping. It does not keep the order of the axes."""


def key_of(point: GridPoint) -> PointKey:
    """Return the point as a key of a mapping."""
    return frozenset(point.items())


def point_of(key: PointKey, axes: Sequence[str]) -> GridPoint:
    """Return the point of a key with its axes in the given order."""
    values = dict(key)
    return {axis: values[axis] for axis in (*axes, *sorted(values)) if axis in values}
