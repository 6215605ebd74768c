"""Labels at the ends of lines do not overlap, and stay close to their lines."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfac_bench.report.figure_style import spread


@pytest.mark.parametrize(
    ("heights", "places"),
    [
        ([], []),
        ([0.5], [0.5]),
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.3, 0.32, 0.34], [0.22, 0.32, 0.42]),
        ([0.0, 0.01], [0.0, 0.1]),
        ([0.99, 1.02], [0.9, 1.0]),
    ],
)
def test_labels_move_as_little_as_they_must(heights, places):
    assert spread(heights, 0.1) == pytest.approx(places)


@given(st.lists(st.floats(0, 1), max_size=8))
def test_no_two_labels_overlap_or_leave_the_axes(heights):
    places = spread(sorted(heights), 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(places))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
