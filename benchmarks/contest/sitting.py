"""A sitting: one period of work on one machine, with baselines and a store.

A contest takes several sittings. Each sitting repeats the benchmark's baseline run at the start of
each turn of the optimizers, so that seconds of unlike machines can be compared. A baseline does the
same work each time: one optimizer, one seed, a fixed number of steps and no target. So its seconds
depend on the machine alone. A sitting lasts as long as its folder of runs: its name is in the file
``sitting.txt`` there, and a new machine starts with an empty folder.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contest.packed_runs import PackedRun, pack
from benchmarks.contest.result_store import ResultStore
from kfac_bench.benchmark import local_runs, run_end, schema
from kfac_bench.benchmark.grid import WorkSession
from kfac_bench.benchmark.schema import Benchmark
from kfac_bench.config import compose
from kfac_bench.config.command_options import path_word
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE, Event, RunEnded, read
from kfac_bench.whole_files import write_text

NAME_FILE = "sitting.txt"


class Sitting(WorkSession):
    """The limit, the baselines and the store of one command.

    Args:
        benchmark: What is run.
        runs_dir: The folder of runs.
        say: Prints a line.
        store: Where finished runs are kept.
        minutes: The time limit; None: no limit.
        now: The clock in seconds.

    Raises:
        UsageError: The name of the sitting cannot be read or written.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        runs_dir: Path,
        say: Callable[[str], None],
        store: ResultStore,
        minutes: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(minutes, now)
        self._benchmark, self._runs_dir, self._say = benchmark, runs_dir, say
        self.store = store
        self._turns: set[tuple[str, str]] = set()
        self.name = _name(runs_dir)
        if count := store.unpack(runs_dir):
            say(f"{count} finished runs taken from the results; sitting {self.name}")

    def begin(self, task: str, turn: str) -> None:
        """Prepare for training on the task: check the time, and run the baseline once in a turn.

        Raises:
            KeyboardInterrupt: The baseline was interrupted.
            TimeIsUp: The time limit has passed.
            UsageError: The overrides of the baseline are wrong.
        """
        super().begin(task, turn)
        task = task or ALL
        if not self._benchmark.baseline or (task, turn) in self._turns:
            return
        self._turns.add((task, turn))
        self._run_baseline(task)
        self._check_time()

    def _run_baseline(self, task: str) -> None:
        own = [r for r in self.store.runs(task, "baseline") if r.sitting == self.name]
        name = f"baseline-{re.sub('[^a-zA-Z0-9_]', '-', task)}-{self.name}-{len(own)}"
        words = {"task": task}
        overrides = [schema.fill_in(text, words) for text in self._benchmark.baseline]
        overrides += [path_word("runs_dir", self._runs_dir), f"run_id={name}"]
        code, line = local_runs.train_forked(overrides)
        if code == 2:
            raise UsageError(f"the baseline {' '.join(overrides)}: {line}")
        if code in run_end.INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            self._say(f"{name} failed, so it does not measure this machine: {line}")
        point = {"task": task, "optimizer": "baseline"}
        self.keep("baseline", self._runs_dir / name, point, compose.load(overrides).seed)

    def keep(
        self,
        kind: str,
        folder: Path,
        point: Mapping[str, str],
        seed: int,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Put the run of a folder into the store, if it has ended or failed."""
        if run_end.outcome(folder) is None:
            return
        failed = run_end.failure(folder)
        reason = "" if failed is None else failed.reason
        events = read(folder) if (folder / EVENTS_FILE).exists() else []
        task, optimizer = _place(point)
        kept = [r for r in self.store.runs(task, kind) if r.name == folder.name]
        # A failed run may have been run again.
        if any((run.failure, _end(run.events)) == (reason, _end(events)) for run in kept):
            return
        self.store.add(
            PackedRun(
                folder.name,
                kind,
                task,
                optimizer,
                seed,
                self.name,
                f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
                settings or {},
                pack(events, whole_curve=task == ALL),
                reason,
            )
        )

    def factor(self, task: str, kind: str, folder: Path) -> float:
        """Return the factor that turns the seconds of a run into those of the first sitting."""
        task = task or ALL
        speed = factors(self.store.runs(task, "baseline"))
        return speed.get(self._sitting_of(task, kind, folder.name), 1.0)

    def is_own(self, task: str, kind: str, folder: Path) -> bool:
        """Return whether this sitting trained the run."""
        return self._sitting_of(task or ALL, kind, folder.name) == self.name

    def _sitting_of(self, task: str, kind: str, name: str) -> str:
        found = (run.sitting for run in self.store.runs(task, kind) if run.name == name)
        return next(found, self.name)


ALL = "all"
"""The task of a benchmark that has no axis ``task``."""


def tasks_of(benchmark: Benchmark) -> Sequence[str]:
    """Return the tasks of a benchmark. Each has a file of packed runs."""
    return benchmark.axes.get("task", [ALL])


def _place(point: Mapping[str, str]) -> tuple[str, str]:
    """Return the task of a point, and its values on all other axes."""
    return point.get("task", ALL), " ".join(v for axis, v in point.items() if axis != "task")


def _end(events: Sequence[Event]) -> tuple[str, int, str] | None:
    """Return the status, step and seconds of a run's end; None if it has not ended."""
    last = next((e for e in reversed(events) if isinstance(e, RunEnded)), None)
    # Unlike NaN, the text of NaN equals itself.
    return None if last is None else (last.status, last.step, repr(last.train_s))


def _name(runs_dir: Path) -> str:
    path = runs_dir / NAME_FILE
    try:
        if path.exists():
            name = path.read_text(encoding="utf-8").strip()
            if not re.fullmatch(r"[\w-]{1,40}", name):
                raise UsageError(f"{path}: not the name of a sitting; delete the file")
            return name
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from None
    # Names sort by time: the sitting that a task began with sets the scale of the later ones.
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S-%f}"
    write_text(path, name + "\n", make_folder=True)
    return name


def seconds_by_sitting(baselines: Iterable[PackedRun]) -> dict[str, list[float]]:
    """Return the baselines' training seconds by sitting, the first sitting first.

    Names of sittings begin with the time, so their order is that of the time. A baseline that did
    not do its work has no seconds.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for run in baselines:
        ended = [e for e in run.events if isinstance(e, RunEnded) and e.status == "finished"]
        if ended and math.isfinite(ended[-1].train_s) and ended[-1].train_s > 0:
            found[run.sitting].append(ended[-1].train_s)
    return dict(sorted(found.items()))


def factors(baselines: Iterable[PackedRun]) -> dict[str, float]:
    """Return by sitting what its seconds are multiplied by, to be seconds of the first sitting.

    With a single sitting the factor is 1, so that seconds are what the clock showed.
    """
    medians = {name: median(values) for name, values in seconds_by_sitting(baselines).items()}
    first = next(iter(medians.values()), 1.0)
    return {name: first / seconds for name, seconds in medians.items()}
