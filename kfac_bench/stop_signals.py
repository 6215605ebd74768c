"""The signals that ask a run to save and end; loader workers leave them to the run."""

import signal

SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals of users, terminals and batch systems."""
