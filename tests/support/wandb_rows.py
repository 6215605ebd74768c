"""The rows of W&B's offline runs, as W&B's own reader finds them."""

import json
import subprocess
import sys


def offline(run_directory):
    """Yield the rows of every offline run below ``run_directory``, also of a killed run."""
    for log in sorted(run_directory.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.stdout, done.stderr
        for line in done.stdout.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a message about damage, at the end of the file
            if isinstance(record, dict) and record.get("type") == "history":
                yield dict(record["history"]["item"])
