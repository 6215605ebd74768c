"""The page of runs that go on, written again while they train."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.output import counted
from kfac_bench.record.events import EVENTS_FILE, RunEnded
from kfac_bench.record.own_files import LOCK_FILE, is_locked
from kfac_bench.record.runs import Run, find
from kfac_bench.report import compare
from kfac_bench.report.comparison import folder_of

EVERY_S = 10
"""Seconds between two looks at the event files, and between two loads of the page in a browser."""
SILENT_S = 600.0
"""A run that no process holds counts as stopped after so many seconds without an event."""
BEGINS = "another run begins"


def watch(
    paths: Sequence[Path],
    html_path: Path,
    say: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Write the page of the runs each time that an event file has changed, until all have ended.

    A browser loads the page again by itself. Ctrl-C ends the watch, too. A run that was killed or
    interrupted counts as ended after ``SILENT_S`` seconds. The watch waits for the first event.

    Args:
        paths: Run directories, event files, or folders of runs, which may get more runs.
        html_path: Where the HTML page goes.
        say: Prints a line.
        wait: Waits for so many seconds.

    Raises:
        UsageError: As :func:`compare`.
    """
    folder_of(html_path)
    seen: dict[Path, int] = {}
    unended: list[Path] = []
    is_told = False
    try:
        while True:
            sizes = _sizes(paths)
            # A run that cannot begin removes its directory, and compare() reports that.
            if not any(sizes.values()) and all(os.access(path, os.R_OK) for path in paths):
                if not is_told:
                    say("no run has an event yet: waits for the first one (Ctrl-C stops)")
                is_told = True
                wait(EVERY_S)
                continue
            is_new = sizes != seen or not seen
            if is_new:
                seen = sizes
                settings = compare(paths, html_path, refresh_s=EVERY_S).settings
                runs = [run for setting in settings for run in setting.runs]
                unended = [run.path for run in runs if not _has_ended(run)]
            left = sum(map(_may_go_on, unended))
            if not left and not any(map(_is_beginning, paths)):
                for file in unended:
                    say(
                        f"{file.parent} counts as stopped: no process runs it, and it has not ended"
                    )
                return
            if is_new:
                state = f"{left} of {counted(len(runs), 'run')} not ended" if left else BEGINS
                say(f"{html_path}: {state} (Ctrl-C stops)")
            wait(EVERY_S)
    except KeyboardInterrupt:
        if not seen:
            raise
        say("stopped: the page stays as it is")


def _has_ended(run: Run) -> bool:
    """Return whether the run is complete or has failed; False for a run that continues now."""
    last = run.events[-1]
    # Slurm starts an interrupted run again.
    return isinstance(last, RunEnded) and last.status != "interrupted"


def _may_go_on(file: Path) -> bool:
    """Return whether the run of an event file without an end may go on.

    The lock of a run on another machine may be invisible here, so recent events count, too.
    """
    try:
        return is_locked(file.parent) or time.time() - os.stat(file).st_mtime < SILENT_S
    except (OSError, UsageError):
        return False  # it was removed


def _is_beginning(path: Path) -> bool:
    """Return whether a process holds a run directory that has no event yet, as between two runs."""
    for folder, names, files in os.walk(path):
        if LOCK_FILE not in files:
            continue
        names.clear()
        events = Path(folder, EVENTS_FILE)
        try:
            if not (events.exists() and events.stat().st_size) and is_locked(events.parent):
                return True
        except (OSError, UsageError):
            continue  # it was removed
    return False


def _sizes(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the size of each event file. A file may vanish meanwhile."""
    sizes: dict[Path, int] = {}
    for path in paths:
        try:
            sizes |= {file: os.stat(file).st_size for file in find(path)}
        except (OSError, UsageError):
            continue  # compare() says what is wrong
    return sizes
