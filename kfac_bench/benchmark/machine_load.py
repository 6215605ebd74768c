"""Whether other processes keep this machine busy, so that measured times would be too long."""

import os
from collections.abc import Callable

_BUSY = 0.3
"""Share of the cores that other processes may use before a warning is due."""


def warn_if_busy(say: Callable[[str], None]) -> None:
    """Print one line if the machine was busy in the last minute."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _BUSY * cores:
        say(f"other processes are busy, so times will be too long: load {load:.1f}, {cores} cores")
