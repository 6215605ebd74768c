"""The dashboard as W&B objects, a workspace and a report: as JSON, or saved on the server."""

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kfac_bench.benchmark.scaling import scaling_report
from kfac_bench.config.compose import default_project
from kfac_bench.errors import MissingPackageError, UsageError, one_line
from kfac_bench.output import counted
from kfac_bench.record.runs import Run, last_option, plain
from kfac_bench.record.sinks.panels import GROUPS, OPTIONS, SECTIONS, Chart, ChartSection
from kfac_bench.report import COLUMNS, Comparison, cells, compare
from kfac_bench.report.tables import Table

TITLE = "K-FAC against first-order optimizers"
PUSH_S = 60.0
"""Within this time the server must accept both."""
_VIEW = "kfacbench"
"""Name of the workspace's view. It is always the same, so the next push finds the workspace."""
_RANDOM = {"__id__", "id", "ref"}
"""Keys of W&B's JSON with random values, different each time."""
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 6
"""Panels side by side in the report, and the size of a panel on W&B's grid, which is 24 wide."""


@dataclass(frozen=True)
class Scope:
    """The runs that the dashboard shows."""

    project: str
    entity: str
    run_ids: Sequence[str] = ()
    """Empty: all runs of the project."""
    tables: Sequence[Table] = ()
    """Tables for the report."""


def scope_of_runs(paths: Sequence[Path], project: str | None, entity: str | None) -> Scope:
    """Return the scope of the runs at ``paths``; without paths, all runs and no tables.

    Args:
        paths: Run directories, event files, or folders of runs.
        project: The W&B project; None: the project that the runs were logged to.
        entity: The W&B user or team; None: that of the runs.

    Raises:
        UsageError: As :func:`kfac_bench.report.compare`.
    """
    from kfac_bench.record.sinks.wandb import wandb_id

    found = compare(paths) if paths else None
    runs = [run for setting in found.settings for run in setting.runs] if found else []
    return Scope(
        project or _same(runs, "project") or default_project(),
        entity or _same(runs, "entity") or "",
        [wandb_id(_same([run], "id") or plain(run.started.run_id)) for run in runs],
        [_time_to_target(found), *scaling_report.tables(runs)] if found else [],
    )


def _same(runs: Sequence[Run], name: str) -> str | None:
    """Return the logger option ``name`` of all runs, of their last starts; None if they differ."""
    values = [last_option(run.events, "logger", name) for run in runs]
    value = values[0] if values and all(each == values[0] for each in values) else None
    return plain(value) if isinstance(value, str) else None


def _time_to_target(found: Comparison) -> Table:
    rows = [cells(row) for row in found.rows]
    return Table("Time to target", COLUMNS, rows, found.notes)


def workspace(scope: Scope) -> Any:
    """Return W&B's workspace, not yet saved."""
    ws, expr = _module("workspaces"), _module("expr")
    grouped = [expr.Config(option) for option in GROUPS]
    return ws.Workspace(
        name=TITLE,
        project=scope.project,
        entity=scope.entity,
        sections=[
            ws.Section(name=s.name, panels=[_panel(c, (0, 0)) for c in s.charts], is_open=i < 3)
            for i, s in enumerate(SECTIONS)
        ],
        settings=ws.WorkspaceSettings(x_axis="train_s", max_runs=100),
        runset_settings=ws.RunsetSettings(filters=_filters(scope), groupby=grouped),
    )


def report(scope: Scope) -> Any:
    """Return W&B's report, not yet saved: the tables first, then each section."""
    wr = _module("reports.v2")
    blocks: list[Any] = [wr.TableOfContents()]
    if scope.tables:
        blocks.append(wr.H1("Tables, from event files"))
        blocks += [wr.MarkdownBlock(table.markdown()) for table in scope.tables]
    for section in SECTIONS:
        blocks += [wr.H1(section.name), wr.P(section.about), _grid(section, scope)]
    return wr.Report(
        title=TITLE,
        description="Written by kfac-bench dashboard push. The next push overwrites this report.",
        project=scope.project,
        entity=scope.entity,
        blocks=blocks,
        width="fluid",
    )


def as_json(scope: Scope) -> dict[str, Any]:
    """Return both as the server gets them, without random ids: equal input gives equal JSON."""
    found = {"workspace": workspace(scope), "report": report(scope)}
    return {
        name: _without_ids(x._to_model().model_dump(mode="json", by_alias=True, exclude_none=True))
        for name, x in found.items()
    }


def describe(scope: Scope) -> list[str]:
    """Return a line about each object that :func:`push` would create."""
    where = f"{scope.entity or 'your entity'}/{scope.project}"
    which = counted(len(scope.run_ids), "run") if scope.run_ids else "all runs of the project"
    panels = sum(len(section.charts) for section in SECTIONS)
    tables = counted(len(scope.tables), "table")
    size = f"{len(SECTIONS)} sections, {panels} panels, {which}"
    return [
        f"workspace {TITLE!r} in {where}: {size}",
        f"report {TITLE!r} in {where}: {tables} from event files, {size}",
    ]


def push(scope: Scope) -> list[str]:
    """Save both on W&B's server, replacing those of the last push; return a line about each.

    Raises :class:`UsageError` if there is no key, if the server refuses, if the server cannot be
    reached within 3 s, and if the server does not answer within ``PUSH_S``.
    """
    from kfac_bench.record.sinks.wandb import decide_mode

    mode, reason = decide_mode()
    if mode != "online":
        raise UsageError(
            f"dashboard push needs W&B's server: {reason}; dry-run works without a server"
        )
    return _within(PUSH_S, lambda: _push(scope))


def _push(scope: Scope) -> list[str]:
    wandb_api = importlib.import_module("wandb").Api(timeout=20)
    scope = replace(scope, entity=scope.entity or wandb_api.default_entity)
    made = report(scope)
    # An object with the id of an existing one replaces the existing one when it is saved.
    if (report_id := _report_id(wandb_api, scope)) is not None:
        made.id = report_id
    made.save()
    space = workspace(scope)
    # W&B's package has no public way to name a view, so these fields are its own.
    internal = _module("workspaces.internal")
    space._internal_name = internal._url_query_str_to_internal_name(_VIEW)
    space._internal_id = _view_id(internal, scope)
    space.save()
    return [f"workspace: {space.url}", f"report: {made.url}"]


def _view_id(internal: ModuleType, scope: Scope) -> str:
    """Return the id of the workspace of the last push; empty if there is none."""
    try:
        view = internal.get_view_dict(scope.entity, scope.project, _VIEW)
    except ValueError:  # The workspace does not exist, and perhaps not even the project.
        return ""
    return str(view["id"])


def _report_id(api: Any, scope: Scope) -> str | None:
    """Return the id of the report of the last push; None if there is none."""
    try:
        reports = list(api.reports(f"{scope.entity}/{scope.project}"))
    except ValueError:  # The project does not exist yet. Saving the report creates it.
        return None
    return next((str(r.id) for r in reports if r.display_name == TITLE), None)


def _within(limit_s: float, action: Callable[[], list[str]]) -> list[str]:
    """Run the action in its own thread and return its lines.

    Raises :class:`UsageError` with one line if the action fails, or takes longer than the limit.
    W&B's client has no time limit of its own.
    """
    done: list[list[str]] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            done.append(action())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="dashboard", daemon=True)
    thread.start()
    thread.join(limit_s)
    if done:
        return done[0]
    if not failed:
        raise UsageError(f"W&B's server did not take the dashboard within {limit_s:g} s")
    if isinstance(failed[0], UsageError):
        raise failed[0]
    said = one_line(failed[0])[:300]
    raise UsageError(f"W&B refused the dashboard: {said}")


def _grid(section: ChartSection, scope: Scope) -> Any:
    wr = _module("reports.v2")
    # Panels fill the rows from left to right. No section has 99 charts.
    places = (((i % _COLUMNS) * _WIDTH, i // _COLUMNS * _HEIGHT) for i in range(99))
    return wr.PanelGrid(
        runsets=[wr.Runset(filters=_filters(scope), groupby=[f"config.{g}" for g in GROUPS])],
        panels=[_panel(c, place) for c, place in zip(section.charts, places, strict=False)],
    )


def _panel(chart: Chart, place: tuple[int, int]) -> Any:
    wr = _module("reports.v2")
    layout = wr.Layout(x=place[0], y=place[1], w=_WIDTH, h=_HEIGHT)
    over_runs: dict[str, Any] = {"groupby_aggfunc": "median", "groupby_rangefunc": "minmax"}
    if chart.by:
        over_runs["groupby"] = wr.Config(chart.by)
    match chart.kind:
        case "line" | "area":
            stacked = chart.kind == "area"
            return wr.LinePlot(
                title=chart.title,
                x=chart.x,
                y=list(chart.keys),
                metric_regex=chart.pattern or None,
                title_x={"step": "steps", "train_s": "training seconds"}[chart.x],
                title_y=chart.unit or None,
                log_y=chart.log or None,
                plot_type="stacked-area" if stacked else "line",
                # The areas of several runs would hide each other.
                max_runs_to_show=1 if stacked else 100,
                layout=layout,
                **over_runs,
            )
        case "bar":
            return wr.BarPlot(
                title=chart.title,
                metrics=list(chart.keys),
                title_x=chart.unit or None,
                layout=layout,
                **over_runs,
            )
        case "scatter":
            return wr.ScatterPlot(
                title=chart.title,
                x=wr.Config(chart.x),
                y=wr.SummaryMetric(chart.keys[0]),
                layout=layout,
            )
        case "options":
            names = [wr.Config(name) for name in OPTIONS]
            columns = [*names, wr.SummaryMetric(chart.keys[0])]
            return wr.ParallelCoordinatesPlot(
                title=chart.title,
                columns=[wr.ParallelCoordinatesPlotColumn(metric=each) for each in columns],
                layout=layout,
            )
        case "media":
            return wr.MediaBrowser(title=chart.title, media_keys=list(chart.keys), layout=layout)
    raise ValueError(chart.kind)


def _filters(scope: Scope) -> Any:
    expr = _module("expr")
    # An empty text is no filter: all runs.
    mine = expr.Metric("ID").isin(list(scope.run_ids))
    return expr.And(mine) if scope.run_ids else ""


def _without_ids(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _without_ids(v) for k, v in tree.items() if k not in _RANDOM}
    return [_without_ids(x) for x in tree] if isinstance(tree, list) else tree


def _module(name: str) -> ModuleType:
    """Import a module of wandb-workspaces."""
    # Otherwise the package prints where its settings come from.
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        return importlib.import_module(f"wandb_workspaces.{name}")
    except ImportError:
        raise MissingPackageError("wandb_workspaces") from None
