"""The progress of ``kfac-bench try`` in the terminal: a table of the optimizers, or lines.

A terminal shows one table, which is drawn again when a trial begins. Elsewhere, for example in a
pipe or in the log of a job, each finished trial is one line. All trials and their settings are on
the page of the study.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Literal, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kfac_bench import output
from kfac_bench.benchmark.own_problem import study_input
from kfac_bench.benchmark.own_problem.study_input import Asked
from kfac_bench.benchmark.trials import TrialResult
from kfac_bench.report.tables import DASH
from kfac_bench.report.tables import metric as shown_metric

TrialPhase = Literal["tuning", "final"]
"""The part of a study: trials of settings, or runs of the best settings on fresh seeds."""


@dataclass
class _Standing:
    """The finished trials of one optimizer."""

    label: str
    sign: float
    """1 if a smaller metric is better, otherwise -1."""
    trials: dict[TrialPhase, list[TrialResult]] = field(
        default_factory=lambda: {"tuning": [], "final": []}
    )

    @property
    def rank(self) -> tuple[bool, float, tuple[float, float]]:
        """The sort key among optimizers. Smaller is better, and fresh seeds decide."""
        best = min((trial.key for trial in self.trials["tuning"]), default=(math.inf, math.inf))
        return not self.trials["final"], self._fresh_s, best

    @property
    def _fresh_s(self) -> float:
        return median([t.time_s for t in self.trials["final"]] or [math.inf])

    def cells(self) -> Sequence[str]:
        """Return the cells of the table's row."""
        seeds = output.counted(len(self.trials["final"]), "seed")
        fresh = f"{_seconds(self._fresh_s)} ({seeds})" if self.trials["final"] else DASH
        return self.label, str(len(self.trials["tuning"])), self._best(), fresh

    def _best(self) -> str:
        """Return the best time to the target, or the best metric if no trial has reached it."""
        if not self.trials["tuning"]:
            return DASH
        time_s, metric = min(trial.key for trial in self.trials["tuning"])
        if math.isfinite(time_s):
            return _seconds(time_s)
        shown = f", best {shown_metric(self.sign * metric)}" if math.isfinite(metric) else ""
        return f"missed{shown}"


def _seconds(time_s: float) -> str:
    return f"{time_s:.3g} s" if math.isfinite(time_s) else "missed"


class Leaderboard:
    """The view of a study on ``stream``, by default standard output; a context manager.

    Attributes:
        target: The target of the study, as soon as it is known.
    """

    def __init__(self, asked: Asked, stream: TextIO | None = None) -> None:
        labels, problem = study_input.tuning().labels, asked.chosen.problem
        sign = -1.0 if problem.higher_is_better else 1.0
        self._standings = {name: _Standing(labels[name], sign) for name in asked.candidates}
        self._title = f"{asked.title}: training time to {problem.metric_title}"
        self._stream = sys.stdout if stream is None else stream
        self._live: Live | None = None
        self._left = ""
        self.target = math.nan

    def __enter__(self) -> "Leaderboard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._draw(self._live, "")
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line; on a terminal it stands above the table."""
        if self._live is None:
            output.say(text, self._stream)
        else:
            self._live.console.print(self._text(text), soft_wrap=True)

    def begin(self, name: str, phase: TrialPhase, seed: int) -> None:
        """Show the optimizer whose trial runs now, if this is a terminal."""
        if self._live is None and output.is_terminal(self._stream):
            console = Console(file=self._stream, force_terminal=True, highlight=False)
            # Without rich's thread: a table changes only between trials.
            is_shared = sys.stderr.isatty()
            self._live = Live(console=console, auto_refresh=False, redirect_stderr=is_shared)
            self._live.start()
            # rich hides the cursor, and a process that is killed could not show it again.
            console.show_cursor(True)
        if self._live is not None:
            standing = self._standings[name]
            where = f"fresh seed {seed}"
            if phase == "tuning":
                where = f"trial {len(standing.trials[phase]) + 1}"
            self._draw(self._live, f"now: {standing.label}, {where}; ")

    def end(self, name: str, phase: TrialPhase, result: TrialResult, left: str) -> None:
        """Take the result of a trial; print it as a line if this is no terminal.

        Args:
            name: The optimizer.
            phase: The part of the study.
            result: The result.
            left: The time that the study still needs, in words.
        """
        standing = self._standings[name]
        standing.trials[phase].append(result)
        self._left = left
        if self._live is None:
            where = f"[seed {result.seed}] {standing.label}"
            if phase == "tuning":
                where = f"[tuning] {standing.label} {len(standing.trials[phase])}"
            self.say(f"{where}: {result.outcome}; {left}")

    def _draw(self, live: Live, now: str) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for head in ("optimizer", "trials", "best in tuning", "median on fresh seeds"):
            table.add_column(head, no_wrap=True, justify="right" if head == "trials" else "left")
        for standing in sorted(self._standings.values(), key=lambda each: each.rank):
            table.add_row(*map(self._text, standing.cells()))
        title = self._text(f"\n{self._title} {self.target:.6g}")
        live.update(Group(title, table, self._text(f"{now}{self._left}")), refresh=True)

    def _text(self, words: str) -> Text:
        return Text("\n".join(output.shown(line, self._stream) for line in words.split("\n")))
