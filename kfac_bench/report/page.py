"""The HTML page: one file with its styles, scripts and data, which loads nothing else.

A content security policy enforces this: whatever the event files hold, a browser runs no script
but the page's own and loads no other file.
"""

import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from kfac_bench import __version__
from kfac_bench.output import size_text
from kfac_bench.record.runs import Run, Setting, differences, flatten, plain, seed, target
from kfac_bench.record.score import (
    OWN_TO_A_RUN,
    Row,
    final_metric,
    status,
    steps_to_target,
    time_to_target_s,
)
from kfac_bench.report.comparison import Comparison, finding
from kfac_bench.report.curves import by_task, styles
from kfac_bench.report.figure_style import Style
from kfac_bench.report.page_parts import (
    Album,
    HtmlCell,
    HtmlTable,
    VerdictPage,
    cell,
    chart,
    content_hash,
    embed,
    link_from,
    most_points,
    time_bars,
    to_html_table,
)
from kfac_bench.report.tables import DASH, Table, between, count, metric, seconds
from kfac_bench.report.training_numbers import (
    PARTS,
    layer_tables,
    milliseconds,
    numbers_table,
    step_time,
)

TITLE = "Time to target"
WITHOUT_TARGET = "Comparison of runs"
TEMPLATE = "report/page.html.jinja"
SCRIPTS = ("axes.js", "chart.js", "cursor.js", "copy.js", "tables.js")


def html(
    comparison: Comparison,
    title: str = TITLE,
    tables: Sequence[Table] = (),
    folder: Path | None = None,
    verdict: VerdictPage | None = None,
    refresh_s: int | None = None,
) -> str:
    """Return the page of a comparison, with ``tables`` above its results, or below a verdict.

    ``folder`` (resolved) is where the page will be: links to event files are relative to it.
    Without a folder the page shows paths instead of links. After ``refresh_s`` seconds a browser
    loads the page again.
    """
    settings = comparison.settings
    environments = [_environment(run) for s in settings for run in s.runs]
    unequal = differences(environments)
    most = most_points(len(environments))
    tasks = _tasks(comparison, unequal, most, folder)
    styling, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    has_target = any(row.has_target for row in comparison.rows)
    return _template().render(
        title=WITHOUT_TARGET if title == TITLE and not has_target else plain(title),
        verdict=None if verdict is None else _verdict(verdict, styles(settings)),
        version=__version__,
        run_count=len(environments),
        has_target=has_target,
        refresh_s=refresh_s,
        tables=[to_html_table(table) for table in tables],
        tasks=tasks,
        data=embed([task["chart"] for task in tasks]),
        # The policy names the hashes of exactly this style and this script.
        styling=styling,
        script=script,
        policy=f"default-src 'none'; img-src data:; style-src {content_hash(styling)}; "
        f"script-src {content_hash(script)}; base-uri 'none'; form-action 'none'",
        common={
            key: _readable(key, value)
            for key, value in (environments or [{}])[0].items()
            if value and key not in unequal
        },
        notes=comparison.notes,
        max_points=most,
        milliseconds=milliseconds,
        parts=PARTS,
    )


def _tasks(
    comparison: Comparison, unequal: Sequence[str], most: int, folder: Path | None
) -> list[dict[str, Any]]:
    """Return the values of each task for the template."""
    drawn = styles(comparison.settings)
    # Settings are not hashable, so their identity finds their rows.
    rows = {id(s): r for s, r in zip(comparison.settings, comparison.rows, strict=True)}
    album = Album()
    tasks = []
    for label, settings in by_task(comparison.settings):
        task = {
            "label": label,
            "finding": finding(settings),
            "results": _results(settings, [rows[id(s)] for s in settings], drawn),
            "styles": {s.optimizer: drawn[s.optimizer] for s in settings},
            "chart": chart(settings, drawn, most),
            "numbers": numbers_table(settings),
            "has_target": rows[id(settings[0])].has_target,
            "step_time": step_time(settings),
            "layers": layer_tables(settings),
            "predictions": album.of(settings),
            "runs": _runs(settings, folder),
            "environments": _environments(settings, unequal),
        }
        tasks.append(task | _options(settings))
    return tasks


def _verdict(verdict: VerdictPage, drawn: dict[str, Style]) -> dict[str, Any]:
    """Return the values of a verdict for the template."""
    return {
        "headline": plain(verdict.headline),
        "goal": plain(verdict.goal),
        "bars": time_bars(verdict.bars, drawn),
        "remarks": [plain(remark) for remark in verdict.remarks],
        "code_head": plain(verdict.code_head),
        "code": "\n".join(plain(line) for line in verdict.code.splitlines()),
    }


@cache
def _template() -> jinja2.Template:
    """Return the template. Its compilation takes longer than a page."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("kfac_bench", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(TEMPLATE)


def _asset(name: str) -> str:
    return files("kfac_bench.report").joinpath(name).read_text(encoding="utf-8")


def _results(
    settings: Sequence[Setting], rows: Sequence[Row], drawn: dict[str, Style]
) -> list[dict[str, Any]]:
    """Return the table of settings: medians with their ranges, and a strip of the seeds' times."""
    times_s = [time_to_target_s(run) for setting in settings for run in setting.runs]
    longest_s = max((s for s in times_s if math.isfinite(s)), default=0.0)
    best_steps = min(row.steps.median for row in rows)
    best_s = min(row.seconds.median for row in rows)
    return [
        {
            "optimizer": row.optimizer,
            "style": drawn[row.optimizer],
            "row": row,
            "steps": cell(row.steps.median, count(row.steps.median)),
            "seconds": cell(row.seconds.median, seconds(row.seconds.median)),
            "final": cell(row.final, metric(row.final)),
            "steps_range": between(row.steps, count),
            "seconds_range": between(row.seconds, seconds),
            "best_steps": row.steps.median == best_steps < math.inf,
            "best_seconds": row.seconds.median == best_s < math.inf,
            "dots": [_share(time_to_target_s(run), longest_s) for run in setting.runs],
            "median": _share(row.seconds.median, longest_s),
        }
        for setting, row in zip(settings, rows, strict=True)
    ]


def _runs(settings: Sequence[Setting], folder: Path | None) -> HtmlTable:
    has_target = target(settings[0].runs[0]) is not None
    reach = ("steps to target", "seconds to target") if has_target else ()
    return HtmlTable(
        "Runs",
        ("setting", "seed", "ended", *reach, "final metric", "events"),
        [_run(setting, run, folder, has_target) for setting in settings for run in setting.runs],
    )


def _run(setting: Setting, run: Run, folder: Path | None, has_target: bool) -> list[HtmlCell]:
    steps, time_s, last = steps_to_target(run), time_to_target_s(run), final_metric(run)
    return [
        cell(setting.optimizer),
        cell(seed(run), str(seed(run))),
        cell(status(run)),
        *([cell(steps, count(steps)), cell(time_s, seconds(time_s))] if has_target else []),
        cell(last, metric(last)),
        _link(run, folder),
    ]


def _link(run: Run, folder: Path | None) -> HtmlCell:
    """Link to the run's event file from a page in ``folder``; without a folder, show its path."""
    if folder is None:
        return HtmlCell(plain(run.path))
    return HtmlCell(plain(run.path.parent.name), href=link_from(folder, run.path))


def _environment(run: Run) -> dict[str, Any]:
    """Return the environment that may make runs unequal, without entries of one run alone."""
    environment = run.started.environment.items()
    return flatten({key: value for key, value in environment if key not in OWN_TO_A_RUN})


def _environments(settings: Sequence[Setting], unequal: Sequence[str]) -> HtmlTable | None:
    """Return the table of machines and versions that differ between runs; None if none differ."""
    if not unequal:
        return None
    return HtmlTable(
        "Environments that differ",
        ("setting", "seed", *unequal),
        [
            [cell(setting.optimizer), cell(seed(run), str(seed(run)))]
            + [_environment_cell(key, _environment(run).get(key, DASH)) for key in unequal]
            for setting in settings
            for run in setting.runs
        ],
    )


def _environment_cell(key: str, value: str) -> HtmlCell:
    shown = _readable(key, value)
    return cell(value) if shown == value else HtmlCell(shown, value)


def _readable(key: str, value: str) -> str:
    """Return the value of an environment's entry; bytes with their unit."""
    # Event files are not trusted: no float holds a number of hundreds of digits.
    is_size = key.endswith("_bytes") and value.isdecimal() and len(value) < 19
    return size_text(int(value)) if is_size else value


def _options(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the options that differ, those that only some settings have, and the same ones."""
    keys = differences([setting.options for setting in settings])
    # K-FAC's options are no difference of settings without K-FAC.
    own = [k for k in keys if len({s.options[k] for s in settings if k in s.options}) == 1]

    def table(title: str, chosen: Sequence[str]) -> HtmlTable:
        rows = [[cell(key), *(cell(s.options.get(key, DASH)) for s in settings)] for key in chosen]
        return HtmlTable(title, ("option", *(s.optimizer for s in settings)), rows)

    return {
        "differing": table("Options that differ", [key for key in keys if key not in own]),
        "own": table("Options that only some have", own),
        "same": {k: v for k, v in settings[0].options.items() if k not in keys},
    }


def _share(value_s: float, longest_s: float) -> float | None:
    """Return ``value_s`` in percent of the longest time; None if the target was missed."""
    if not math.isfinite(value_s):
        return None
    return round(100 * value_s / longest_s, 2) if longest_s > 0 else 0.0
