"""The end of the run of a cell or of a trial, from the files of its directory alone.

A run that has ended by its own events is in events.jsonl. If its process failed, cell.json has the
reason. A stopped run has neither, and the next start continues it.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.record import own_files
from kfac_bench.record.events import EVENTS_FILE, RunEnded, read
from kfac_bench.record.own_files import read_own
from kfac_bench.stop_signals import SIGNALS
from kfac_bench.whole_files import write_text

FAILED_FILE = "cell.json"
"""File in the directory of a run whose process failed. It holds the reason."""
INTERRUPTED = tuple(128 + number for number in SIGNALS)
"""Exit codes of a run that was stopped by a signal. The next start continues it."""


PATIENCE_S = 60.0
"""Seconds to wait for a run that outlives a killed command. The run saves and ends by itself."""


@dataclass(frozen=True)
class Failure:
    """The reason why the process of a run failed."""

    reason: str
    has_run: bool
    """False if the run could not start, because an earlier run failed."""
    exit_code: int = 1
    """The exit code of ``kfac-train``; 2: it refused its input."""


def record_failure(
    folder: Path, label: str, reason: str, code: int = 1, *, has_run: bool = True
) -> None:
    """Write into the run's directory why it failed: the table shows a miss with this reason."""
    record = {"label": label, "reason": reason, "exit_code": code, "has_run": has_run}
    write_text(folder / FAILED_FILE, json.dumps(record, indent=1) + "\n", make_folder=True)


def failure(folder: Path) -> Failure | None:
    """Return why the run of this directory failed; None if it did not, or has ended well since.

    A run whose events cannot be read has failed: one damaged file must not stop the other runs.
    """
    try:
        has_ended = ended(folder) is not None
    except UsageError as error:
        return Failure(str(error), has_run=True)
    try:
        record = json.loads(read_own(folder / FAILED_FILE))
        has_run, code = record.get("has_run") is not False, record.get("exit_code", 1)
        found = Failure(str(record["reason"]), has_run, code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError):
        return None
    return None if has_ended else found


def refusal(folder: Path) -> str | None:
    """Return why ``kfac-train`` refused the input of a run before its first event, or None."""
    why = failure(folder)
    if why is None or why.exit_code != 2 or (folder / EVENTS_FILE).exists():
        return None
    return why.reason


def forget_failure(folder: Path) -> None:
    """Remove the record of :func:`record_failure`, as if the run had not been started."""
    (folder / FAILED_FILE).unlink(missing_ok=True)


def ended(folder: Path) -> str | None:
    """Return status, step and seconds of a run that has ended by its events, as text, or None."""
    if not (folder / EVENTS_FILE).exists():
        return None
    last = next((e for e in reversed(read(folder)) if isinstance(e, RunEnded)), None)
    if last is None or last.status == "interrupted":
        return None
    why = f": {last.message}" if last.message else ""
    return f"{last.status} at step {last.step}, {last.train_s:.2f} s{why}"


def outcome(folder: Path) -> str | None:
    """Return the failure or the result of :func:`ended` as text; None if the run has not ended."""
    why = failure(folder)
    return ended(folder) if why is None else f"failed: {why.reason}"


def will_run(folder: Path, *, retry: bool) -> bool:
    """Return whether the run of this directory has not ended, or has failed and runs again."""
    before = outcome(folder)
    return before is None or (retry and before.startswith("failed"))


def wait_until_free(directory: Path) -> None:
    """Wait until no process writes to a run directory.

    Raises:
        UsageError: A process still writes to it after a minute.
    """
    deadline = time.monotonic() + PATIENCE_S
    while own_files.is_locked(directory):
        if time.monotonic() >= deadline:
            raise UsageError(
                f"{directory}: a process of an earlier command still trains here. End that "
                "process; the same command then continues"
            )
        time.sleep(own_files.POLL_S)
