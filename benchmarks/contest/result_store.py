"""The finished runs of a benchmark in a folder of the repository, a packed file for each task.

A machine and its folder ``runs/`` may be gone after a sitting. So ``study`` and ``run`` with
``--results FOLDER`` first unpack the runs of the store into ``runs/``, where they count as
finished, and pack every run that they finish. The store is saved after each run: at most the run in
progress is lost with a machine. Several commands may add runs to a store at the same time.

The file of a task is ``FOLDER/NAME/PART/TASK.jsonl.gz``, where PART is ``table`` or ``studies``.
"""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.contest import packed_runs
from benchmarks.contest.packed_runs import PackedRun
from kfac_bench.benchmark import run_end
from kfac_bench.data.base.files import one_at_a_time
from kfac_bench.errors import UsageError
from kfac_bench.record.event_log import line_of
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.whole_files import write_text


class ResultStore:
    """The packed runs of one part of a benchmark.

    Raises:
        UsageError: A file of the store is damaged.
    """

    def __init__(self, folder: Path, name: str, part: str, tasks: Iterable[str]) -> None:
        if not folder.is_dir():
            raise UsageError(f"--results {folder}: no such folder; create it first")
        self._folder = folder / name / part
        self._runs: dict[str, dict[tuple[str, str, int, str], PackedRun]] = {}
        for task in tasks:
            path = self.path(task)
            found = packed_runs.read(path) if path.exists() else []
            for run in found:
                if run.task != task:
                    raise UsageError(f"{path}: has a run of the task {run.task!r}, not {task!r}")
            self._runs[task] = {run.key: run for run in found}

    def path(self, task: str) -> Path:
        """Return the file of a task."""
        return self._folder / f"{task}.jsonl.gz"

    def runs(self, task: str, kind: str) -> list[PackedRun]:
        """Return the runs of a task that have this kind."""
        return [run for run in self._runs.get(task, {}).values() if run.kind == kind]

    def add(self, run: PackedRun) -> None:
        """Add a run, in the place of an earlier run with the same key, and save its task's file.

        Raises:
            UsageError: The file is damaged, or cannot be written.
        """
        path = self.path(run.task)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self._folder}: cannot be written ({error.strerror})") from None
        with one_at_a_time(self._folder):
            # Another command may have added runs since this one read the file.
            saved = {each.key: each for each in packed_runs.read(path)} if path.exists() else {}
            runs = self._runs.get(run.task, {}) | saved | {run.key: run}
            packed_runs.write(path, runs.values())
        self._runs[run.task] = runs

    def unpack(self, runs_dir: Path) -> int:
        """Write the runs as run directories, unless they are there; return how many were written.

        Raises:
            UsageError: A run directory cannot be written.
        """
        written = 0
        for runs in self._runs.values():
            for run in runs.values():
                folder = runs_dir / run.name
                if (folder / EVENTS_FILE).exists() or run_end.failure(folder) is not None:
                    continue
                if run.events:
                    content = "".join(map(line_of, run.events))
                    write_text(folder / EVENTS_FILE, content, make_folder=True)
                if run.failure:
                    run_end.record_failure(folder, run.name, run.failure)
                written += 1
        return written
