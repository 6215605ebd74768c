"""The folder of a study, ``runs/try-NAME``: what was asked, and how the time was divided.

The folder has a run directory for each run, in ``tuning/`` and ``final/``. The file ``try.json``
holds the question, the budget and the target. All else follows from the event files.
"""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kfac_bench.benchmark.own_problem.budget import Budget
from kfac_bench.errors import UsageError
from kfac_bench.output import say
from kfac_bench.record import own_files
from kfac_bench.record.events import checked
from kfac_bench.record.own_files import read_own, refuse_links
from kfac_bench.whole_files import write_text

PLAN_FILE = "try.json"
_FIRST_PHASES = ("speed", "reference")
_PHASES = (*_FIRST_PHASES, "tuning", "final")
"""The folders of run directories, in the order of a study."""
PATIENCE_S = 60.0
"""How long to wait for a run that outlives a killed command. It saves and ends by itself."""


@dataclass(frozen=True)
class Question:
    """The user's input. A study continues only with the same input."""

    sha256: str
    """Hash of the problem's file."""
    words: str
    """The user's overrides of kfac-train."""
    optimizers: str
    minutes: float
    ranks: int
    seeds: int
    starts: Mapping[str, str] = field(default_factory=dict)
    """Settings of an earlier study by optimizer, as overrides."""


@dataclass(frozen=True)
class Plan:
    """What was fixed before tuning."""

    budget: Budget
    target: float
    is_own_target: bool


class StudyFolder:
    """The folder of a study, locked by this process inside :meth:`locked`."""

    def __init__(self, path: Path, question: Question) -> None:
        self.path, self.question = path, question

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and lock it, so that no second command runs the same study.

        Raises:
            UsageError: Another command runs the study, the folder cannot be made, or one of its
                runs is a link.
        """
        if self.path.is_dir() and own_files.is_locked(self.path):
            raise UsageError(f"{self.path}: another command runs this study; wait for it")
        with own_files.locked(self.path, 0.0, say):
            # A study removes checkpoints of its trials. Through a link it would remove those of
            # another run.
            refuse_links(self.path)
            for phase in _PHASES:
                if self.runs_dir(phase).is_dir():
                    refuse_links(self.runs_dir(phase))
            yield

    def plan(self) -> Plan | None:
        """Return the plan of the study; None if the study has not fixed one yet.

        Raises:
            UsageError: The folder holds another study, or the file is damaged.
        """
        path = self.path / PLAN_FILE
        try:
            tree = json.loads(read_own(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path}: cannot be read ({error}). Delete {self.path}") from None
        try:
            question = Question(**checked(Question, tree["question"]))
            budget = Budget(**checked(Budget, tree["budget"]))
            target, is_own = float(tree["target"]), tree["is_own_target"] is True
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{path}: is not a plan of a study ({error}). Delete {self.path}"
            ) from None
        self._check_same(question)
        return Plan(budget, target, is_own)

    def _check_same(self, before: Question) -> None:
        now = asdict(self.question)
        for name, value in asdict(before).items():
            if value != now[name]:
                what = (
                    "another version of the file"
                    if name == "sha256"
                    else (f"{name}={value!r}, not {now[name]!r}")
                )
                raise UsageError(
                    f"{self.path} holds a study with {what}. Delete the folder, or choose another "
                    "one with --runs-dir"
                )

    def write_plan(self, plan: Plan) -> None:
        """Fix the plan."""
        tree: dict[str, Any] = {"question": asdict(self.question), **asdict(plan)}
        write_text(self.path / PLAN_FILE, json.dumps(tree, indent=1) + "\n")

    def runs_dir(self, phase: str) -> Path:
        """Return the folder of the runs of a phase."""
        return self.path / phase

    def remove_first_runs(self) -> None:
        """Remove the runs that fix the plan, after the end of a run that outlives its command."""
        for phase in _FIRST_PHASES:
            for directory in self.runs_dir(phase).glob("*"):
                wait_until_free(directory)
            shutil.rmtree(self.runs_dir(phase), ignore_errors=True)

    def remove_if_empty(self) -> None:
        """Remove the folder again if nothing has been fixed, because the input was bad."""
        if not (self.path / PLAN_FILE).exists():
            self.remove_first_runs()
            if {p.name for p in self.path.iterdir()} <= {own_files.LOCK_FILE}:
                shutil.rmtree(self.path, ignore_errors=True)


def wait_until_free(directory: Path) -> None:
    """Wait until no process writes to a run directory.

    Raises:
        UsageError: A process still writes to it after a minute.
    """
    deadline = time.monotonic() + PATIENCE_S
    while own_files.is_locked(directory):
        if time.monotonic() >= deadline:
            raise UsageError(
                f"{directory}: a process of an earlier command still trains here. End that "
                "process; the same command then continues"
            )
        time.sleep(own_files.POLL_S)
