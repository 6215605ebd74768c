"""Whether the record of a run still has all events that were written before its last checkpoint.

A run that continues checks this itself. This file checks a run that nobody continues, for example a
finished run, and needs no torch: the manifest of a checkpoint says how the record ended then.
"""

import io
import os
from pathlib import Path

from kfac_bench.errors import UsageError
from kfac_bench.record import checkpoint_folder
from kfac_bench.record.event_log import gap_in, position_from
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.record.own_files import open_own, refuse_special


def lost_events(directory: Path) -> str | None:
    """Return which events of a run directory are missing and why, in words; None if none are.

    A run without a readable checkpoint is not checked.
    """
    folder = directory / "checkpoints"
    try:
        refuse_special(folder, folder=True)
        steps = checkpoint_folder.steps(folder)
        if not steps:
            return None
        path = checkpoint_folder.path_of(folder, steps[-1])
        refuse_special(path, folder=True)
        position = position_from(checkpoint_folder.manifest(path).get("record"))
        if position is None:
            return None
        with io.FileIO(open_own(directory / EVENTS_FILE)) as file:
            reason = gap_in(file, os.fstat(file.fileno()).st_size, position)
    except (OSError, ValueError, UsageError):
        return None
    return None if reason is None else f"events before step {steps[-1]} are missing ({reason})"
