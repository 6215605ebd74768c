"""The console as a view of the event stream: a progress bar on a terminal, lines elsewhere.

Everything goes to standard output. Texts from outside (run ids, metric names, messages) are
printed without markup and without control characters.
"""

import atexit
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from kfac_bench.output import duration_text, is_terminal, shown
from kfac_bench.record.events import (
    Evaluated,
    Event,
    Predicted,
    Resumed,
    RunEnded,
    RunStarted,
    SampleSkipped,
    TargetReached,
    Trained,
)
from kfac_bench.record.progress import progress

REDRAW_S = 0.1
NAMED = 20
"""Number of unreadable files that are shown one by one."""


class ConsoleSink:
    """The view of the run on ``stream``, by default standard output.

    A terminal shows a progress bar. Elsewhere training gets at most one line per ``interval_s``
    seconds of wall time. Each evaluation gets a line. Checkpoints are not shown.
    """

    def __init__(
        self,
        *,
        metric: str,
        higher_is_better: bool,
        total_steps: int | None = None,
        target: float | None = None,
        interval_s: float = 5.0,
        stream: TextIO | None = None,
    ) -> None:
        self._metric = metric
        self._sign = 1.0 if higher_is_better else -1.0
        self._total_steps = total_steps
        self._target = target
        self._stream = stream if stream is not None else sys.stdout
        self._trained_lines = _Interval(interval_s)
        self._best: float | None = None
        self._latest: float | None = None
        self._first: Trained | None = None
        self._last: Trained | None = None
        self._broken = False
        self._bar = _Bar(self._stream, total_steps) if is_terminal(self._stream) else None

    def say(self, text: str) -> None:
        """Print the text; it stands above the bar if there is a bar."""
        for line in text.splitlines():
            self._guarded(partial(self._print, shown(line, self._stream)))

    def write(self, event: Event) -> None:
        """Show the event, unless the last line of its kind is too recent."""
        match event:
            case Trained():
                self._trained(event)
            case Evaluated():
                self._evaluated(event)
            case TargetReached():
                self.say(
                    f"target reached: {event.metric} {event.value:.4g} {self._relation} "
                    f"{event.target:.4g} at step {event.step} "
                    f"after {duration_text(event.train_s)} of training"
                )
            case SampleSkipped():
                if event.count <= NAMED:
                    self.say(f"left out: {event.path}: {event.reason} (rank {event.rank})")
                if event.count == NAMED:
                    self.say("further files that are left out are in events.jsonl")
            case Predicted():
                self.say(f"{len(event.items)} predictions in {event.path}")
            case Resumed():
                self.say(f"resumed at step {event.step} from {event.checkpoint}")
            case RunStarted():
                self._started(event)
            case RunEnded():
                value = f", {self._metric} {self._latest:.4g}" if self._latest is not None else ""
                message = f": {event.message}" if event.message else ""
                self.say(
                    f"{event.status} at step {event.step} "
                    f"after {duration_text(event.train_s)} of training{value}{message}"
                )

    def close(self) -> None:
        """Stop the bar, so that the terminal is free again; a second call does nothing."""
        bar, self._bar = self._bar, None
        if bar is not None:
            self._guarded(bar.stop)

    @property
    def _relation(self) -> str:
        return ">=" if self._sign > 0 else "<="

    def _started(self, event: RunStarted) -> None:
        steps = "" if self._total_steps is None else f", {self._total_steps} steps at most"
        goal = ""
        if self._target is not None:
            goal = f", until {self._metric} {self._relation} {self._target:g}"
        self.say(f"run {event.run_id}{steps}{goal}")

    def _trained(self, event: Trained) -> None:
        self._first = self._first or event
        self._last = event
        # The most important parts come first, because a narrow terminal cuts off the end.
        place = [f"epoch {event.epoch:.2f}"]
        if self._total_steps and event.step:
            total_epochs = event.epoch / event.step * self._total_steps
            place = [f"epoch {_epochs(event.epoch, total_epochs)}"]
            left_s = (self._total_steps - event.step) * self._step_s(event)
            place.append(f"{duration_text(max(left_s, 0.0))} left")
        parts = [*place, f"loss {event.loss:.4g}"]
        if self._latest is not None:
            parts.append(f"{self._metric} {self._latest:.4g}")
        share = event.data_wait_share
        waiting = "" if share is None else f" ({share:.0%} waiting for data)"
        parts += [
            f"{event.examples_per_s:.0f} ex/s{waiting}",
            f"lr {event.lr:.3g}",
            f"train {duration_text(event.train_s)}",
        ]
        if self._bar is not None:
            status = shown("  ".join(parts), self._stream)
            self._guarded(partial(self._bar.update, event.step, status))
            progress.note_line()
        elif self._trained_lines.is_due():
            total = f"/{self._total_steps}" if self._total_steps else ""
            self.say("  ".join([f"step {event.step}{total}", *parts]))

    def _step_s(self, event: Trained) -> float:
        """Return the mean seconds of a step since the first event, if there is an earlier one.

        The first step decomposes all factors of K-FAC, and would make the mean too large.
        """
        assert self._first is not None
        if event.step > self._first.step:
            return (event.train_s - self._first.train_s) / (event.step - self._first.step)
        return event.train_s / event.step

    def _evaluated(self, event: Evaluated) -> None:
        value = event.metrics.get(self._metric)
        improved = value is not None and (
            self._best is None
            or math.isnan(self._best)
            or self._sign * value > self._sign * self._best
        )
        if improved:
            self._best = value
        self._latest = value
        if self._bar is not None and self._last is not None:
            self._trained(self._last)  # redraw, because the bar shows the metric too
        values = {name: f"{name} {event.metrics[name]:.4g}" for name in sorted(event.metrics)}
        parts = [values.pop(self._metric)] if self._metric in values else []
        if not improved and self._best is not None:
            parts.append(f"(best {self._best:.4g})")
        parts += values.values()
        if event.left_out:
            parts.append(f"left out {event.left_out}")
        self.say(
            f"step {event.step}  epoch {event.epoch:.2f}  validation: {'  '.join(parts)}  "
            f"train {duration_text(event.train_s)}"
        )

    def _print(self, line: str) -> None:
        progress.note_line()
        if self._bar is not None:
            self._bar.print(line)
        else:
            print(line, file=self._stream, flush=True)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Call ``action``; a closed pipe or a full disk ends the view, but not the training."""
        if self._broken:
            return
        try:
            action()
        except (OSError, ValueError):
            self._broken = True


class _Bar:
    """A progress bar of rich without a thread: it redraws only in :meth:`update`."""

    def __init__(self, stream: TextIO, total_steps: int | None) -> None:
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._progress = Progress(
            BarColumn(bar_width=8),
            TextColumn("{task.fields[steps]}", markup=False),
            TextColumn(
                "{task.fields[status]}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=self._console,
            auto_refresh=False,
            expand=True,
            # Warnings on the same terminal must not break the bar. A redirected stderr is kept.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._total = total_steps
        self._task = self._progress.add_task("", total=total_steps, steps="", status="")
        self._redraws = _Interval(REDRAW_S)
        self._started = False

    def update(self, step: int, status: str) -> None:
        """Show the step and a line of numbers."""
        if not self._started:
            self._started = True
            self._progress.start()
            atexit.register(self.stop)  # in case the training fails before close()
            # rich hides the cursor, and a process that is killed could not show it again.
            self._console.show_cursor(True)
        steps = str(step)
        if self._total is not None:
            steps = f"{step / max(self._total, 1):4.0%} {step}/{self._total}"
        self._progress.update(self._task, completed=step, steps=steps, status=status)
        if self._redraws.is_due() or step == self._total:
            self._progress.refresh()

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(Text(line), soft_wrap=True)

    def stop(self) -> None:
        """Leave the bar as it is and stop redirecting stdout and stderr."""
        atexit.unregister(self.stop)
        self._progress.stop()


class _Interval:
    """A limit: :meth:`is_due` is true at most once in ``seconds`` of wall time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: float | None = None

    def is_due(self) -> bool:
        """Return whether the interval has passed; if so, start a new interval."""
        now = time.monotonic()
        due = self._last is None or now - self._last >= self._seconds
        if due:
            self._last = now
        return due


def _epochs(epoch: float, total: float) -> str:
    """Return the epoch and the number of epochs; whole numbers if there are 100 or more."""
    # The total is computed from the step, so it may be a little less than 100.
    if round(total, 1) >= 100:
        return f"{epoch:.0f}/{total:.0f}"
    return f"{epoch:.1f}/{total:.3g}"
