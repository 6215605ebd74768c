"""What W&B has of a run already: rows of its server, or of the offline runs beside the run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import CommError

from kfac_bench.errors import UsageError
from kfac_bench.record.sinks.wandb import wandb_id

ANSWER_S = 20
Row = dict[str, Any]


def offline(run_directory: Path) -> Iterator[Row]:
    """Rows of every offline run below ``run_directory``, also of one that was killed.

    Read with W&B's own reader, in a process of its own: the files may be damaged. Raises
    :class:`UsageError` where it cannot.
    """
    for log in sorted(run_directory.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)  # noqa: S603
        for line in done.stdout.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # words for people, at the end of a damaged file
            if isinstance(record, dict) and record.get("type") == "history":
                yield dict(record["history"]["item"])
        if not done.stdout and done.returncode:
            said = " ".join(done.stderr.split())[-200:]
            raise UsageError(f"{log}: cannot be read ({said}); move it away, or sync it")


def online(run_id: str, project: str, entity: str | None) -> tuple[list[Row], str] | None:
    """Rows and state of the run on the server; None if it is not there.

    Raises :class:`UsageError` if the server does not say.
    """
    try:
        api = wandb.Api(timeout=ANSWER_S)
        run = api.run(f"{entity or api.default_entity}/{project}/{wandb_id(run_id)}")
        last = run.lastHistoryStep
        # The cache on disk may be of a moment when there were fewer rows.
        rows = [dict(row) for row in run.scan_history(use_cache=False)] if last >= 0 else []
        if last >= 0 and not rows:  # all would be sent twice
            raise ValueError(f"it has rows up to {last}, and sends none")
        return rows, str(run.state)
    except (CommError, ValueError) as error:
        if "could not find run" in str(error).lower():
            return None
        raise UsageError(f"W&B does not say what it has of {run_id}: {error}") from None
