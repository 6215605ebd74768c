"""The signals that ask a run to save and end, which loader workers leave to the run; and Ctrl-C."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals of users, terminals and batch systems."""


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Let Ctrl-C raise its exception at the end of the block; a second Ctrl-C ends the process.

    For the import of torch, which catches exceptions of its own imports: Ctrl-C would get lost
    there, or leave a NumPy that is half imported.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt
