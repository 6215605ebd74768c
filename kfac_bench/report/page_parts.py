"""The parts of an HTML page: its curves' data, its tables and its predictions.

chart.js draws the curves. The page has its own drawing code instead of a chart library: plotly.js
has 4.5 MB, and uPlot wants the same x values for all curves, but the seconds of two runs differ.
tables.js sorts a table by the keys of its cells: a number, ``inf`` (a missed target) or ``none``.

Event files are not trusted: any JSON value may be an item of a prediction.
"""

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kfac_bench.record.events import Predicted
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
from kfac_bench.record.sinks.panels import CURVES
from kfac_bench.record.sinks.panels import Chart as Panel
from kfac_bench.record.sinks.view import metrics_of
from kfac_bench.report.figure_style import Style
from kfac_bench.report.tables import DASH, Link, Table, Value, text
from kfac_bench.training import predictions

MOST_OF_A_CURVE, MOST_OF_A_PAGE, FEWEST = 1000, 200_000, 100
"""Numbers of points. A reader cannot see more in a curve; a page of many runs must stay quick."""

SMALLER = 5
"""A curve in a small panel has so many times fewer points than others, but 20 at least."""


def most_points(runs: int) -> int:
    """Return the largest number of points of a curve on a page with two curves for each run."""
    return max(FEWEST, min(MOST_OF_A_CURVE, MOST_OF_A_PAGE // (2 * max(1, runs))))


def chart(settings: Sequence[Setting], drawn: dict[str, Style], most: int) -> dict[str, Any]:
    """Return the chart of one task: its target, and the look and the points of each setting."""
    first = settings[0].runs[0]
    goal = target(first)
    if goal is not None and abs(goal) > HUGE:
        goal = None
    better_up = bool(first.started.higher_is_better)
    panels = _panels(settings)
    names = {"metric": "validation " + plain(first.started.metric).replace("_", " ")}
    names |= {"loss": "training loss"} | {panel.keys[0]: panel.title for panel in panels}
    return {
        "names": names,
        "panels": [panel.keys[0] for panel in panels],
        "linear": [panel.keys[0] for panel in panels if not panel.log],
        "higherIsBetter": better_up,
        "worst": {
            "metric": _worst(settings, metric=True, better_up=better_up, goal=goal),
            "loss": _worst(settings, metric=False, better_up=False),
        },
        "target": goal,
        "settings": [
            _setting(setting, drawn[setting.optimizer], most, panels) for setting in settings
        ],
    }


def _panels(settings: Sequence[Setting]) -> list[Panel]:
    """Return the small panels of a task: those whose values are not the same everywhere."""
    rows = [row for s in settings for run in s.runs for row in map(metrics_of, run.trained)]
    return [p for p in CURVES if len({row[p.keys[0]] for row in rows if p.keys[0] in row}) > 1]


def _worst(
    settings: Sequence[Setting], *, metric: bool, better_up: bool, goal: float | None = None
) -> float | None:
    """Return the worst value that the axis shows before any zoom; None: it shows all values."""
    runs = [run for setting in settings for run in setting.runs]
    curves = [[point[2] for point in points(run, metric=metric)] for run in runs]
    worst = worst_shown(curves, higher_is_better=better_up, goal=goal)
    return _short(worst) if math.isfinite(worst) else None


def _setting(setting: Setting, style: Style, most: int, panels: Sequence[Panel]) -> dict[str, Any]:
    middle = median_run(setting)
    return {
        "label": setting.optimizer,
        "colour": style.index,
        "dashes": style.dashes,
        "runs": [_run(run, most, panels) | {"median": run is middle} for run in setting.runs],
    }


def _run(run: Run, most: int, panels: Sequence[Panel]) -> dict[str, Any]:
    event = target_reached(run)
    met = None
    if event is not None:
        met = (number(event.step), number(event.train_s), number(event.value))
    rows = [metrics_of(event) for event in run.trained] if panels else []
    small = {p.keys[0]: _points_of(rows, p.keys[0]) for p in panels}
    return {
        **{key: _columns(thin(points, most // SMALLER)) for key, points in small.items()},
        "seed": seed(run),
        "metric": _columns(thin(points(run, metric=True), most)),
        "loss": _columns(thin(points(run, metric=False), most)),
        "met": None if met is None or not drawable(met) else [_short(x) for x in met],
    }


def _points_of(rows: Sequence[Mapping[str, float]], key: str) -> list[CurvePoint]:
    found = ((number(r["step"]), number(r["train_s"]), number(r[key])) for r in rows if key in r)
    return [point for point in found if drawable(point)]


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


@dataclass(frozen=True)
class HtmlCell:
    """One cell, before the template escapes its text."""

    text: str
    key: str | None = None
    href: str | None = None

    @property
    def is_number(self) -> bool:
        """True if the cell holds a number, which is aligned to the right."""
        return self.key is not None


@dataclass(frozen=True)
class HtmlTable:
    """A table that readers can sort."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[HtmlCell]]
    notes: Sequence[str] = ()

    def right(self, column: int) -> bool:
        """Return whether the column is aligned to the right, because all its cells are numbers."""
        return all(row[column].is_number for row in self.rows)


def to_html_table(table: Table) -> HtmlTable:
    """Return the table as the page shows it."""
    return HtmlTable(
        plain(table.title),
        [plain(column) for column in table.columns],
        [[cell(value) for value in row] for row in table.rows],
        [plain(note) for note in table.notes],
    )


def cell(value: Value, shown: str | None = None) -> HtmlCell:
    """Return the cell of a value; ``shown`` is its text, if the usual text does not fit."""
    words = plain(text(value)) if shown is None else shown
    match value:
        case None:
            return HtmlCell(words, "none")
        case Link():
            return HtmlCell(words, href=value.href if _leads_on(value.href) else None)
        case str():
            return HtmlCell(words)
    # repr writes all digits, and inf for a missed target.
    key = number(value)
    if math.isnan(key):
        return HtmlCell(DASH if shown is None else shown, "none")
    return HtmlCell(words, repr(key))


def link_from(folder: Path, path: Path) -> str:
    """Return the relative address of ``path`` on a page in ``folder``; both are resolved."""
    return quote(os.fsencode(os.path.relpath(path, folder)))


def _leads_on(href: str) -> bool:
    """Return whether `href` is a web address or a path, and has no other scheme (javascript:)."""
    return re.fullmatch(r"(https?://|(?!//))[^:\\\s\x00-\x20]+", href) is not None


@dataclass(frozen=True)
class TimeBar:
    """An optimizer's time to the target, on the page of ``kfac-bench try``."""

    name: str
    words: str
    """The time with its interval, or why there is none."""
    times_s: Sequence[float] = ()
    """Median, low and high end in seconds, inf beyond the limit; empty: not run on fresh seeds."""


@dataclass(frozen=True)
class VerdictPage:
    """The parts of a page that ``kfac-bench try`` puts above the curves."""

    headline: str
    goal: str
    bars: Sequence[TimeBar]
    remarks: Sequence[str]
    code_head: str
    code: str
    """Lines for the user's script."""


def time_bars(bars: Sequence[TimeBar], drawn: Mapping[str, Style]) -> list[dict[str, Any]]:
    """Return each bar with the style of its curve and its times in percent of the longest time.

    A time beyond the limit is None: its bar has no end.
    """
    finite = [s for bar in bars for s in bar.times_s if math.isfinite(s)]
    longest_s = max(finite, default=1.0) or 1.0
    return [
        {
            "name": plain(bar.name),
            "words": plain(bar.words),
            "style": drawn.get(bar.name),
            "shares": [
                round(96 * s / longest_s, 2) if math.isfinite(s) else None for s in bar.times_s
            ],
        }
        for bar in bars
    ]


MOST_PREDICTIONS, MOST_TEXT = 12, 2000
"""Limits per run: the number of examples, and the characters of each example's text."""

MOST_PICTURE_BYTES = 24 * 2**20
"""Limit for all pictures on the page."""


class Album:
    """The predictions on one page. After the limit of bytes it shows captions without pictures."""

    def __init__(self) -> None:
        self._left_bytes = MOST_PICTURE_BYTES

    def of(self, settings: Sequence[Setting]) -> list[dict[str, Any]]:
        """Return the last predictions of each setting's first run that has predictions."""
        return [found for setting in settings for found in self._of_setting(setting)]

    def _of_setting(self, setting: Setting) -> list[dict[str, Any]]:
        for run in setting.runs:
            event = next((e for e in reversed(run.events) if isinstance(e, Predicted)), None)
            if event is None or not event.items:
                continue
            items = [x for x in event.items[:MOST_PREDICTIONS] if isinstance(x, dict)]
            prediction = {
                "optimizer": setting.optimizer,
                "seed": seed(run),
                "step": event.step,
                "items": [self._item(run.path.parent, item) for item in items],
            }
            return [prediction]
        return []

    def _item(self, directory: Path, item: Mapping[str, Any]) -> dict[str, Any]:
        content = predictions.read(directory, item.get("file"))
        # predictions.read returns None for a file outside of the run's folder.
        if content is not None and len(content) <= self._left_bytes:
            self._left_bytes -= len(content)
            picture = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        else:
            picture = None
        text = item.get("text")
        lines = text[:MOST_TEXT].splitlines() if isinstance(text, str) else []
        return {
            "caption": plain(str(item.get("caption", ""))[:MOST_TEXT]),
            "picture": picture,
            "missing": picture is None and item.get("file") is not None,
            "text": "\n".join(plain(line) for line in lines),
        }
