"""Runs, read and grouped and summed up, with what a reader of the result must know."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.record.runs import Run, Setting, find, group, load, plain, was_computed
from kfac_bench.record.score import Row, notes, row


@dataclass(frozen=True)
class Comparison:
    """What was found: settings, their result rows in the same order, notes on them."""

    settings: list[Setting]
    rows: list[Row]
    notes: list[str]


def read(paths: Iterable[Path]) -> Comparison:
    """Read the runs at ``paths``: run directories, event files, or folders of runs.

    What is there but holds no run that can be read is left out with a note, so ``runs/*`` can be
    asked for; what a benchmark computed is no run. Raises :class:`UsageError` for a path that is
    not there, and where no run is left.
    """
    runs: list[Run] = []
    faults: list[UsageError] = []
    for path in paths:
        try:
            files = find(path)
        except UsageError as error:
            if not path.exists():
                raise
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
    """The folder of the page at ``path``, resolved; a :class:`UsageError` if there is none."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist")
    return folder.resolve()


def write(path: Path, text: str) -> None:
    """Write ``path`` as a whole: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot write the report ({error.strerror})") from None
