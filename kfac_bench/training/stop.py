"""A run is told to stop by a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stop:
    """Set by SIGTERM, SIGUSR1 (a batch system's notice) and SIGINT.

    Ranks agree on it once a step; an evaluation is cut short by it.
    """

    signal: int = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block."""

        def note(number: int, frame: object) -> None:
            if self.signal == number == signal.SIGINT:
                raise KeyboardInterrupt  # a second Ctrl-C means now
            self.signal = number

        signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        before = {s: signal.signal(s, note) for s in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
