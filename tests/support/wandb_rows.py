"""The content of W&B's offline runs, as W&B's own reader finds it."""

import json
import os
import subprocess
import sys

from tests.support.wandb_here import end_service

# wandb has the reader since 0.28. scripts/version_tests.py names a Python that has such a wandb.
READER = os.environ.get("READER_OF_WANDB", sys.executable)


def inspect(log, *options):
    """Return what `wandb leet inspect` prints about a log, also of a killed run.

    No run of this process may be open: W&B's service writes the end of a log after its `finish()`
    has returned, so the service is ended first.
    """
    end_service()
    command = [READER, "-m", "wandb", "leet", "inspect", *options, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    return done.stdout


def records(log):
    """Yield the records of a log, up to a damaged end."""
    for line in inspect(log, "--json").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a message about damage, at the end of the file
        if isinstance(record, dict):
            yield record


def run_record(log):
    """Return the record of the run: its name, its config and its place in W&B."""
    [run] = [record["run"] for record in records(log) if record["type"] == "run"]
    return run


def offline(run_directory):
    """Yield the rows of every offline run below ``run_directory``, also of a killed run."""
    for log in sorted(run_directory.glob("wandb/offline-run-*/*.wandb")):
        for record in records(log):
            if record.get("type") == "history":
                yield dict(record["history"]["item"])
