"""Progress of what takes long, and an answer to Ctrl-C, from a thread beside the main thread.

The main thread may be in C code for many seconds: in an import, or in LAPACK. It prints nothing
then, and runs no signal handler. The thread here does both. It prints plain lines, with a terminal
or without. `kfac-train` starts the thread; without it, tasks are only noted.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kfac_bench.output import duration_text, say
from kfac_bench.stop_signals import SIGNALS

TICK_S = 0.25
QUIET_S = 1.5
"""A task that takes less time is not shown."""
INTERVAL_S = 5.0
"""Least time between two lines."""
INTERVAL_SHARE = 0.25
"""Least time between two lines as a share of the task's time so far. So a long task does not fill
the screen."""

Count = Callable[[], tuple[float, float]]
"""A function that returns the done amount of a task and its total. The thread calls it."""


@dataclass
class Task:
    """Something that may take long."""

    name: str
    count: Count | None
    ends: str
    """The end of the process after this task, in words, if a signal has asked it to stop."""
    started_s: float = field(default_factory=lambda: time.monotonic())
    first: tuple[float, float] | None = None
    """Time, and what was done by then, when the first part was done."""

    def line(self) -> str:
        """Return the state of the task in words."""
        now = time.monotonic()
        so_far = f"{self.name}: {now - self.started_s:.0f} s so far"
        if self.count is None:
            return so_far
        done, total = self.count()
        if not done:
            return so_far
        # The first part may have been the longest: K-FAC decomposes its factors in the first step.
        self.first = self.first or (now, done)
        line = f"{self.name}: {done:.0f} of {total:.0f} done"
        if done > self.first[1]:
            left_s = (total - done) * (now - self.first[0]) / (done - self.first[1])
            line += f", about {duration_text(left_s)} left"
        return line


class Progress:
    """The tasks that the main thread is in, the innermost last."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self._last_line_s = 0.0

    @contextmanager
    def task(self, name: str, count: Count | None = None, *, ends: str = "") -> Iterator[None]:
        """Name what the main thread does inside the block.

        Args:
            name: A few words, such as "loading PyTorch".
            count: Returns how much is done; None if that is not known.
            ends: What happens after Ctrl-C. By default what the task around this one says.
        """
        outer = self._tasks[-1].ends if self._tasks else "then the command ends"
        self._tasks.append(Task(name, count, ends or outer))
        try:
            yield
        finally:
            self._tasks.pop()

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Print lines inside the block; only the main thread may call this."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Python's C handler writes the number of a signal here at once, whatever the main thread
        # does. The Python handler has to wait until the main thread is back from C code.
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        done = threading.Event()
        thread = threading.Thread(target=self._show, args=(reader, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            signal.set_wakeup_fd(before)
            os.write(writer, b"\0")  # wakes the thread
            thread.join()
            os.close(reader)
            os.close(writer)

    def note_line(self) -> None:
        """Note that the user has just seen something, so that no line is due."""
        self._last_line_s = time.monotonic()

    def _show(self, reader: int, done: threading.Event) -> None:
        interrupts = 0
        while not done.is_set():
            if not select.select([reader], [], [], TICK_S)[0]:
                self._show_long_task()
                continue
            for number in os.read(reader, 64):
                if number in SIGNALS:
                    interrupts += number == signal.SIGINT
                    self._answer(signal.Signals(number), is_second=interrupts > 1)

    def _show_long_task(self) -> None:
        now = time.monotonic()
        task = self._current()
        if task is None or now - task.started_s < QUIET_S:
            return
        interval = max(INTERVAL_S, INTERVAL_SHARE * (now - task.started_s))
        if now - self._last_line_s >= interval:
            self.note_line()
            _print(task.line())

    def _answer(self, number: signal.Signals, *, is_second: bool) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        task = self._current()
        if is_second:
            _print(f"{name} again: the command ends without saving, as soon as it can")
        elif task is None:
            _print(f"{name}: the command ends")
        else:
            _print(f"{name}: waits for the end of this: {task.name}; {task.ends}")

    def _current(self) -> Task | None:
        # The main thread may end a task between two statements here.
        with suppress(IndexError):
            return self._tasks[-1]
        return None


progress = Progress()
"""The tasks of this process. There is one instance, because signals belong to a process, too."""


def _print(line: str) -> None:
    # Not a stream that was kept: while a bar is shown, sys.stdout prints above the bar.
    with suppress(OSError, ValueError):  # a closed pipe
        say(line)
