"""The figures of the documentation: they show the data of their pages, and can be read anywhere."""

import re

import pytest

from kfac_bench.benchmark.scaling.measured import (
    STAGES,
    ScalingPoint,
    efficiency_finding,
    step_finding,
)
from tests.support import ROOT
from tests.support.figures import texts

DOCS = ROOT / "docs"
LAB = DOCS / "lab"
DRAWN = sorted(path for path in DOCS.rglob("*.svg") if path.name != "architecture.svg")
MOST_PT = 480
"""A phone shows 280 points or more. A wider figure would have letters of less than 6 points."""


def words(path):
    """Return the text of a figure. A title that was broken into lines is on one line."""
    return " ".join(texts(path.read_text()))


def rows(page, columns):
    """Return the cells of all table rows with so many columns, without the lines of heads."""
    lines = (line for line in (LAB / page).read_text().splitlines() if line.startswith("| "))
    cells = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)
    return [row for row in cells if len(row) == columns and "---" not in row[0]]


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_a_figure_follows_dark_mode_and_fits_a_phone(path):
    svg = path.read_text()
    style, _, drawing = svg.partition("</style>")
    for kind, colour in set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", drawing)):
        assert f'[style*="{kind}: {colour}"]{{{kind}: #' in style, colour
    assert float(re.search(r'width="([\d.]+)pt"', svg)[1]) <= MOST_PT


def test_measured_scaling_states_the_finding_of_its_table():
    points = [
        ScalingPoint(
            *("resnet20 on cifar10", row[0], int(row[1]), int(row[2])),
            *(float(row[3]), 0.0, 0.0, {}),
            dict.fromkeys(STAGES, 1) if row[0] != "sgd" else {},
            *(0.0, 3, 180, False),
        )
        for row in rows("scaling.md", 9)[1:]
    ]
    assert len(points) == 6
    drawn = words(LAB / "scaling_measured.svg")
    assert step_finding(points) in drawn
    assert efficiency_finding(points) in drawn
