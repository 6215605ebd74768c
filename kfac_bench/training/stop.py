"""The early end of a rank: a signal asks it to save and end, or the watchdog ends it."""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.output import say
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


TICKS = 10


class Watchdog:
    """A thread that ends this process after `seconds` without a call of `beat`.

    Before the end it writes the stacks of all threads into `folder`. With `seconds=None` it does
    nothing. Time in which the process was suspended does not count.

    C code that holds the interpreter stops the thread, too. With `in_c_code` Python's faulthandler
    then prints the stacks to stderr and ends the process. It counts the time of a suspension: use
    it only where other ranks would have given up meanwhile.
    """

    def __init__(
        self, seconds: float | None, folder: Path, rank: int, *, in_c_code: bool = False
    ) -> None:
        self._seconds, self._rank, self._in_c_code = seconds, rank, in_c_code
        self._path = folder / f"stacks-rank{rank}.txt"
        self._beats = 0

    def beat(self) -> None:
        """Report progress."""
        self._beats += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        if self._seconds is None:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done, self._seconds), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            if self._in_c_code:
                # Otherwise the thread might set the timer once more.
                thread.join()
                faulthandler.cancel_dump_traceback_later()

    def _watch(self, done: threading.Event, seconds: float) -> None:
        beats, quiet = self._beats, 0
        self._delay_faulthandler(seconds)
        # Count ticks instead of reading the clock: the clock runs on while a job is suspended.
        while not done.wait(seconds / TICKS):
            quiet = quiet + 1 if beats == self._beats else 0
            beats = self._beats
            self._delay_faulthandler(seconds)
            if quiet >= TICKS:
                self._end(seconds)

    def _delay_faulthandler(self, seconds: float) -> None:
        """Let faulthandler end the process if this thread does not run for somewhat longer."""
        if self._in_c_code:
            # Standard error by number: a test or a notebook may have replaced sys.stderr.
            faulthandler.dump_traceback_later(seconds * (1 + 2 / TICKS), exit=True, file=2)

    def _end(self, seconds: float) -> None:
        where = f"; the stacks of its threads: {self._path}"
        try:
            with self._path.open("w") as file:
                faulthandler.dump_traceback(file)
        except OSError:
            where = ""
        with suppress(OSError):
            say(
                f"kfac-train: rank {self._rank}: no progress for {seconds:g} s "
                f"(trainer.watchdog_s){where}",
                sys.stderr,
            )
        # sys.exit would end this thread only. The main thread hangs, perhaps in C code, and cannot
        # run exit handlers.
        os._exit(1)
