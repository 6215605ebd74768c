"""What a dashboard is about: runs by their W&B ids, and tables made of their event files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kfac_bench import report
from kfac_bench.benchmark import scaling
from kfac_bench.dashboard.views import Scope
from kfac_bench.record.runs import Run, option, plain
from kfac_bench.report.tables import Table

PROJECT = "kfac_bench"
"""As in conf/logger, where no run says otherwise."""


def of_runs(paths: Sequence[Path], project: str | None, entity: str | None) -> Scope:
    """The runs at ``paths``, in the project that they were logged to unless it is given.

    Without paths, all of the project and no tables. Raises :class:`UsageError` as
    :func:`kfac_bench.report.compare` does.
    """
    from kfac_bench.record.sinks.wandb import wandb_id

    found = report.compare(paths) if paths else None
    runs = [run for setting in found.settings for run in setting.runs] if found else []
    return Scope(
        project or _same(runs, "project") or PROJECT,
        entity or _same(runs, "entity") or "",
        [wandb_id(run.started.run_id) for run in runs],
        [_time_to_target(found), *scaling.tables(runs)] if found else [],
    )


def _same(runs: Sequence[Run], name: str) -> str | None:
    """What all runs' logger has as ``name``; None if they differ."""
    found = {option(run.started.config, "logger", name) for run in runs}
    value = found.pop() if len(found) == 1 else None
    return plain(value) if isinstance(value, str) else None


def _time_to_target(found: report.Comparison) -> Table:
    rows = [report.cells(row) for row in found.rows]
    return Table("Time to target", report.COLUMNS, rows, found.notes)
