"""A warning before measurements on a busy machine, where all times are too long."""

import os
from collections.abc import Callable

_BUSY = 0.3
"""Share of the cores that may have been in use before a warning is due."""


def warn_if_busy(say: Callable[[str], None]) -> None:
    """Print one line if the machine was busy in the last minute."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _BUSY * cores:
        busy = f"load {load:.1f}, {cores} cores"
        say(f"the machine was busy in the last minute, so times may be too long: {busy}")
