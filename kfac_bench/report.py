"""Reports on runs, from their event files alone: Markdown, terminal table, one HTML file.

Texts in event files are not trusted: each output format escapes them in its own way.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from rich.table import Table
from rich.text import Text

from kfac_bench import __version__
from kfac_bench.album import Album
from kfac_bench.curves import (
    GRID,
    INK,
    MAX_POINTS,
    PALETTE,
    PANELS,
    Panel,
    Style,
    by_task,
    panel_svg,
    styles,
)
from kfac_bench.curves import curves_svg as curves_svg
from kfac_bench.curves import figure_svg as figure_svg
from kfac_bench.errors import UsageError
from kfac_bench.runs import (
    Run,
    Setting,
    differences,
    find,
    flatten,
    group,
    load,
    plain,
    seed,
    target,
)
from kfac_bench.score import (
    Row,
    Spread,
    final_metric,
    notes,
    row,
    status,
    steps_to_target,
    time_to_target_s,
)

COLUMNS = (
    "task",
    "optimizer",
    "steps to target",
    "seconds to target (median, range)",
    "final metric",
)
MISSED = "not reached"
DASH = "\u2013"
TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found: settings, their result rows in the same order, notes on them."""

    settings: list[Setting]
    rows: list[Row]
    notes: list[str]


def compare(paths: Iterable[Path], html_path: Path | None = None) -> Comparison:
    """Read the runs at ``paths`` (run directories, event files, or folders of runs).

    Writes the HTML report to ``html_path`` if given, all of it or nothing. Raises
    :class:`UsageError` for a path without runs, an unreadable run, or a report that cannot be
    written.
    """
    if html_path is not None and not html_path.absolute().parent.is_dir():
        raise UsageError(f"{html_path}: the folder {html_path.parent} does not exist")
    runs, left_out = [], []
    for path in paths:
        for file in find(path):
            try:
                runs.append(load(file))
            except UsageError as error:
                if file.parent == path or file == path:
                    raise  # asked for by name
                left_out.append(f"left out: {plain(error)}")
    if not runs:
        raise UsageError("no runs to compare; give run directories or a folder of runs")
    settings = group(runs)
    found = Comparison(settings, [row(s) for s in settings], notes(settings) + left_out)
    if html_path is not None:
        _write(html_path, html(found))
    return found


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Write the row as text, one cell per column of :data:`COLUMNS`."""
    if not row.has_target:
        return row.task, row.optimizer, "no target", "no target", metric(row.final)
    time = seconds(row.seconds.median)
    if extent := between(row.seconds, seconds):
        time += f" ({extent})"
    if row.reached < row.seeds:
        time += f", {row.reached} of {row.seeds} seeds"
    return row.task, row.optimizer, count(row.steps.median), time, metric(row.final)


def seconds(value: float) -> str:
    """Write seconds with three digits, or all before the point; infinite: not reached."""
    if math.isinf(value):
        return MISSED
    return f"{value:#.3g}".rstrip(".") if abs(value) < 100 else f"{value:.0f}"


def count(value: float) -> str:
    """Write steps (a median may be a half); infinite: not reached."""
    if math.isinf(value):
        return MISSED
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def metric(value: float) -> str:
    """Write a metric with four digits (six above 1000); a dash if there is none."""
    if math.isnan(value):
        return DASH
    return f"{value:#.4g}" if abs(value) < 999 else f"{value:.6g}"


def between(spread: Spread, write: Callable[[float], str]) -> str:
    """Write the range, such as ``3.10 (dash) not reached``; empty where all seeds agree."""
    if spread.low == spread.high:
        return ""
    return f"{write(spread.low)} {DASH} {write(spread.high)}"


def markdown_table(rows: Sequence[Row]) -> str:
    """Write the rows as a Markdown table, with a newline at its end."""
    lines = [list(COLUMNS), ["---", "---", "---:", "---:", "---:"]]
    lines += [[_markdown(cell) for cell in cells(line)] for line in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def terminal_table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for a rich ``Console``; cells are text, never rich markup."""
    table = Table()
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i < 2 else "right", overflow="fold")
    for line in rows:
        table.add_row(*(Text(cell) for cell in cells(line)))
    return table


def html(found: Comparison, title: str = "Time to target") -> str:
    """Write one self-contained page: tables, curves, options and runs; no scripts, no network."""
    settings = found.settings
    environments = [flatten(run.started.environment) for s in settings for run in s.runs]
    unequal = set(differences(environments))
    drawn = styles(settings)
    rows = {id(s): r for s, r in zip(settings, found.rows, strict=True)}
    album = Album()
    page = jinja2.Environment(
        loader=jinja2.PackageLoader("kfac_bench", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(TEMPLATE)
    return page.render(
        title=title,
        version=__version__,
        run_count=len(environments),
        tasks=[
            _task(task, of_task, [rows[id(s)] for s in of_task], drawn, unequal)
            | {"predictions": album.of(of_task)}
            for task, of_task in by_task(settings)
        ],
        common={k: v for k, v in environments[0].items() if k not in unequal},
        notes=found.notes,
        max_points=MAX_POINTS,
    )


def _task(
    task: str,
    settings: Sequence[Setting],
    rows: Sequence[Row],
    drawn: dict[str, Style],
    unequal: set[str],
) -> dict[str, Any]:
    """Collect what the page says about one task."""
    times_s = [time_to_target_s(run) for setting in settings for run in setting.runs]
    longest_s = max((s for s in times_s if math.isfinite(s)), default=0.0)
    best_steps = min(row.steps.median for row in rows)
    best_s = min(row.seconds.median for row in rows)
    keys = differences([setting.options for setting in settings])
    return {
        "label": task,
        "rows": [
            {
                "optimizer": row.optimizer,
                "style": drawn[row.optimizer],
                "row": row,
                "steps": cells(row)[2],
                "seconds": seconds(row.seconds.median) if row.has_target else "no target",
                "final": metric(row.final),
                "steps_range": between(row.steps, count),
                "seconds_range": between(row.seconds, seconds),
                "best_steps": row.steps.median == best_steps < math.inf,
                "best_seconds": row.seconds.median == best_s < math.inf,
                "dots": [_share(time_to_target_s(run), longest_s) for run in setting.runs],
                "median": _share(row.seconds.median, longest_s),
            }
            for setting, row in zip(settings, rows, strict=True)
        ],
        "panels": [_panel(settings, panel, drawn) for panel in PANELS],
        "differing": [
            {"name": key, "settings": [s.options.get(key, DASH) for s in settings]} for key in keys
        ],
        "same": {k: v for k, v in settings[0].options.items() if k not in keys},
        "settings": [
            {
                "optimizer": setting.optimizer,
                "runs": [_run(run, unequal) for run in setting.runs],
            }
            for setting in settings
        ],
    }


def _run(run: Run, unequal: set[str]) -> dict[str, Any]:
    """Collect what the page says about one run."""
    environment = flatten(run.started.environment)
    has_target = target(run) is not None
    return {
        "seed": seed(run),
        "status": status(run),
        "steps": count(steps_to_target(run)) if has_target else DASH,
        "seconds": seconds(time_to_target_s(run)) if has_target else DASH,
        "final": metric(final_metric(run)),
        "path": plain(run.path),
        "environment": {k: v for k, v in environment.items() if k in unequal},
    }


def _panel(settings: Sequence[Setting], panel: Panel, drawn: dict[str, Style]) -> dict[str, str]:
    """Draw one diagram in the page's own colours, which differ by light and dark mode."""
    svg = panel_svg(settings, panel, drawn).replace(INK, "var(--ink)").replace(GRID, "var(--rule)")
    for index, colour in enumerate(PALETTE):
        svg = svg.replace(colour, f"var(--c{index})")
    what = "Validation metric" if panel.metric else "Training loss"
    return {"svg": svg, "name": f"{what} against training {'time' if panel.seconds else 'steps'}"}


def _share(value_s: float, longest_s: float) -> float | None:
    """Place ``value_s`` on a bar, in percent of the longest; None if it was never reached."""
    if not math.isfinite(value_s):
        return None
    return round(100 * value_s / longest_s, 2) if longest_s > 0 else 0.0


def _markdown(text: str) -> str:
    """Escape what would end a table cell or be read as markup."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


def _write(path: Path, text: str) -> None:
    """Write ``path`` as a whole: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot write the report ({error.strerror})") from None
