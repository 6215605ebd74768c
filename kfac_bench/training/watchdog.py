"""A rank that makes no progress says where it hangs, and ends; its launcher then ends the rest."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TICKS = 10


class Watchdog:
    """Ends this process if nobody calls :meth:`beat` for ``seconds``; None: never.

    The stacks of all threads go to ``folder``. A process that was stopped for a while (a
    suspended job) is given its time again.
    """

    def __init__(self, seconds: float | None, folder: Path, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._path = folder / f"stacks-rank{rank}.txt"
        self._beats = 0

    def beat(self) -> None:
        """There is progress."""
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

    def _watch(self, done: threading.Event, seconds: float) -> None:
        beats, quiet = self._beats, 0
        while not done.wait(
            seconds / TICKS
        ):  # ticks, not the clock, which runs while we are stopped
            quiet = quiet + 1 if beats == self._beats else 0
            beats = self._beats
            if quiet >= TICKS:
                self._end(seconds)

    def _end(self, seconds: float) -> None:
        where = f"; the stacks of its threads: {self._path}"
        try:
            with self._path.open("w") as file:
                faulthandler.dump_traceback(file)
        except OSError:
            where = ""
        with suppress(OSError):
            sys.stderr.write(
                f"kfac-train: rank {self._rank}: no progress for {seconds:g} s "
                f"(trainer.watchdog_s){where}\n"
            )
            sys.stderr.flush()
        os._exit(1)
