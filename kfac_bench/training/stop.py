"""Stop: a signal asks a run to save and end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kfac_bench.stop_signals import SIGNALS


@dataclass
class Stop:
    """The signal that asked this rank to stop.

    The trainer reads the number between batches. Ranks agree once per step whether one of them must
    stop; an evaluation ends early.
    """

    signal: int = 0
    """One of SIGNALS; 0 means none."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block, and restore the old handlers at its end."""

        def note(number: int, frame: object) -> None:
            # A second Ctrl-C means "now", without a checkpoint.
            if self.signal == number == signal.SIGINT:
                raise KeyboardInterrupt
            # The handler only notes the number: it may run in the middle of any statement, where
            # neither a message between ranks nor a checkpoint is possible.
            self.signal = number

        # nohup ignores SIGHUP, so that a run survives its terminal.
        signals = [s for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        before = {s: signal.signal(s, note) for s in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
