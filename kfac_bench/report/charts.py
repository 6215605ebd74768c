"""The data of the page's curves, as JSON inside the page; chart.js draws them.

The page has its own drawing code instead of a chart library. Of the libraries that come as Python
packages, plotly.js has 4.5 MB. uPlot (uplot-python: 120 kB, needs IPython) wants the same x values
for all curves, but the seconds of two runs differ. Neither has keys for reading points, nor a
legend of settings.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from kfac_bench.record.runs import Run, Setting, number, plain, seed, target
from kfac_bench.record.score import (
    HUGE,
    CurvePoint,
    drawable,
    median_run,
    points,
    target_reached,
    thin,
    worst_shown,
)
from kfac_bench.report.figure_style import Style

MOST_OF_A_CURVE, MOST_OF_A_PAGE, FEWEST = 1000, 200_000, 100
"""Numbers of points. A reader cannot see more in a curve; a page of many runs must stay quick."""


def most_points(runs: int) -> int:
    """Return how many points a curve may have on a page of so many runs with two curves each."""
    return max(FEWEST, min(MOST_OF_A_CURVE, MOST_OF_A_PAGE // (2 * max(1, runs))))


def chart(settings: Sequence[Setting], drawn: dict[str, Style], most: int) -> dict[str, Any]:
    """Return the chart of one task: its target, and the look and the points of each setting."""
    first = settings[0].runs[0]
    goal = target(first)
    if goal is not None and abs(goal) > HUGE:
        goal = None
    better_up = bool(first.started.higher_is_better)
    return {
        "metric": "validation " + plain(first.started.metric).replace("_", " "),
        "higherIsBetter": better_up,
        "worst": {
            "metric": _worst(settings, metric=True, better_up=better_up, goal=goal),
            "loss": _worst(settings, metric=False, better_up=False),
        },
        "target": goal,
        "settings": [_setting(setting, drawn[setting.optimizer], most) for setting in settings],
    }


def _worst(
    settings: Sequence[Setting], *, metric: bool, better_up: bool, goal: float | None = None
) -> float | None:
    """Return the worst value that the axis shows before any zoom; None: it shows all values."""
    runs = [run for setting in settings for run in setting.runs]
    curves = [[point[2] for point in points(run, metric=metric)] for run in runs]
    worst = worst_shown(curves, higher_is_better=better_up, goal=goal)
    return _short(worst) if math.isfinite(worst) else None


def _setting(setting: Setting, style: Style, most: int) -> dict[str, Any]:
    middle = median_run(setting)
    return {
        "label": setting.optimizer,
        "colour": style.index,
        "dashes": style.dashes,
        "runs": [_run(run, most) | {"median": run is middle} for run in setting.runs],
    }


def _run(run: Run, most: int) -> dict[str, Any]:
    event = target_reached(run)
    met = None
    if event is not None:
        met = (number(event.step), number(event.train_s), number(event.value))
    return {
        "seed": seed(run),
        "metric": _columns(thin(points(run, metric=True), most)),
        "loss": _columns(thin(points(run, metric=False), most)),
        "met": None if met is None or not drawable(met) else [_short(x) for x in met],
    }


def _columns(found: Sequence[CurvePoint]) -> list[list[float]]:
    """Return steps, seconds and values. Three lists make shorter JSON than a list per point."""
    return [[_short(point[i]) for point in found] for i in range(3)]


def _short(value: float) -> float:
    """Round to six digits, which is a hundredth of a pixel. Whole numbers stay exact."""
    if value == math.floor(value) and abs(value) < 2**53:  # JavaScript's limit for whole numbers
        return int(value)
    return float(f"{value:.6g}")


def embed(data: object) -> str:
    """Return ``data`` as JSON that cannot end a ``<script>`` element, whatever its strings hold."""
    # A string may contain </script> or <!--. JSON allows these characters as \u escapes.
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def content_hash(text: str) -> str:
    """Return the hash by which a content security policy allows one inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
