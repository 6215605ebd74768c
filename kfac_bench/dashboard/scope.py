"""The scope of a dashboard: the runs that it shows, and tables from their event files."""

from collections.abc import Sequence
from pathlib import Path

from kfac_bench import report
from kfac_bench.benchmark import scaling
from kfac_bench.config.compose import default_project
from kfac_bench.dashboard.views import Scope
from kfac_bench.record.runs import Run, last_option, plain
from kfac_bench.report.tables import Table


def of_runs(paths: Sequence[Path], project: str | None, entity: str | None) -> Scope:
    """Return the scope of the runs at ``paths``; without paths, all runs and no tables.

    Args:
        paths: Run directories, event files, or folders of runs.
        project: The W&B project; None: the project that the runs were logged to.
        entity: The W&B user or team; None: that of the runs.

    Raises:
        UsageError: As :func:`kfac_bench.report.compare`.
    """
    from kfac_bench.record.sinks.wandb import wandb_id

    found = report.compare(paths) if paths else None
    runs = [run for setting in found.settings for run in setting.runs] if found else []
    return Scope(
        project or _same(runs, "project") or default_project(),
        entity or _same(runs, "entity") or "",
        [wandb_id(_same([run], "id") or plain(run.started.run_id)) for run in runs],
        [_time_to_target(found), *scaling.tables(runs)] if found else [],
    )


def _same(runs: Sequence[Run], name: str) -> str | None:
    """Return the logger option ``name`` of all runs, of their last starts; None if they differ."""
    values = [last_option(run.events, "logger", name) for run in runs]
    value = values[0] if values and all(each == values[0] for each in values) else None
    return plain(value) if isinstance(value, str) else None


def _time_to_target(found: report.Comparison) -> Table:
    rows = [report.cells(row) for row in found.rows]
    return Table("Time to target", report.COLUMNS, rows, found.notes)
