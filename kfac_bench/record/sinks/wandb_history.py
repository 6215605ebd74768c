"""The rows that W&B already has of a run, from its server or from offline files of the run."""

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
HistoryRow = dict[str, Any]


def offline(run_directory: Path) -> Iterator[HistoryRow]:
    """Yield the rows of every offline run below ``run_directory``, also of a killed run.

    Raises:
        UsageError: A file cannot be read.
    """
    # W&B's reader runs in another process, because a damaged file may end it.
    for log in sorted(run_directory.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)  # noqa: S603
        for line in done.stdout.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a message about damage, at the end of the file
            if isinstance(record, dict) and record.get("type") == "history":
                yield dict(record["history"]["item"])
        if not done.stdout and done.returncode:
            message = " ".join(done.stderr.split())[-200:]
            raise UsageError(f"{log}: cannot be read ({message}). Move it away, or sync it")


def online(run_id: str, project: str, entity: str | None) -> tuple[list[HistoryRow], str] | None:
    """Return rows and state of the run on the server; None if the server has no such run.

    Raises:
        UsageError: The server does not answer, or does not send its rows.
    """
    try:
        api = wandb.Api(timeout=ANSWER_S)
        run = api.run(f"{entity or api.default_entity}/{project}/{wandb_id(run_id)}")
        last = run.lastHistoryStep
        # The cache on disk may be older than the newest rows.
        rows = [dict(row) for row in run.scan_history(use_cache=False)] if last >= 0 else []
        if last >= 0 and not rows:  # otherwise the caller would send all rows again
            raise ValueError(f"it has rows up to {last}, but sends none")
        return rows, str(run.state)
    except (CommError, ValueError) as error:
        if "could not find run" in str(error).lower():
            return None
        raise UsageError(f"W&B does not say what it has of {run_id}: {error}") from None
