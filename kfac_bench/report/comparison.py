"""A comparison of runs: their settings, a result row per setting, and notes for the reader."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.record.runs import Run, Setting, find, group, load, plain, was_computed
from kfac_bench.record.score import Row, notes, row


@dataclass(frozen=True)
class Comparison:
    """Settings, their result rows in the same order, and notes on both."""

    settings: list[Setting]
    rows: list[Row]
    notes: list[str]


def read(paths: Iterable[Path]) -> Comparison:
    """Read the runs at ``paths``: run directories, event files, or folders of runs.

    A path without a readable run is left out with a note, so a user can name ``runs/*``. Computed
    cells of a benchmark are not runs. Raises :class:`UsageError` for a path that does not exist,
    and if no run is left.
    """
    runs: list[Run] = []
    faults: list[UsageError] = []
    for path in paths:
        try:
            files = find(path)
        except UsageError as error:
            if not path.exists():
                raise  # Most likely a typing error: a note below a table would be overlooked.
            files = []
            faults.append(error)
        for file in files:
            try:
                run = load(file)
            except UsageError as error:
                faults.append(error)
            else:
                runs += [] if was_computed(run) else [run]
    if not runs:
        nothing = UsageError("no runs to compare; give run directories or a folder of runs")
        raise next(iter(faults), nothing)
    settings = group(runs)
    left_out = [f"left out: {text}" for text in dict.fromkeys(plain(fault) for fault in faults)]
    return Comparison(settings, [row(s) for s in settings], notes(settings) + left_out)


def folder_of(path: Path) -> Path:
    """Return the resolved folder of the page at ``path``; raise :class:`UsageError` without one."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist; create it first")
    return folder.resolve()
