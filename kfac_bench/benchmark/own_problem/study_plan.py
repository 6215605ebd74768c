"""The plan of a study: how its minutes are divided, and the folder that holds the plan.

The unit is the *limit*: the longest that one trial may train. Each optimizer gets two limits of
training seconds for tuning. The runs on fresh seeds get two limits for each seed, so that at least
two optimizers can run. The limit follows from the minutes, and from the measured seconds of a step,
of an evaluation and of a start.

The folder ``runs/try-NAME`` has a run directory for each run, in ``tuning/`` and ``final/``. The
file ``try.json`` holds the question, the budget and the target. All else follows from the event
files.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kfac_bench.benchmark.own_problem.study_input import REFERENCE
from kfac_bench.benchmark.run_end import wait_until_free
from kfac_bench.errors import UsageError
from kfac_bench.output import say
from kfac_bench.record import own_files
from kfac_bench.record.events import checked
from kfac_bench.record.own_files import read_own, refuse_links
from kfac_bench.whole_files import write_text

TRIALS = 2
"""Tuning of an optimizer, in limits. Trials that end earlier leave room for more of them."""
FINALISTS = 2
"""Optimizers that run on fresh seeds, if each needs the whole limit. More run if all are fast."""
SPARE = 1
"""Limits for the reference run, and for runs that last until the evaluation after their limit."""
EVALUATIONS = (500, 50)
"""Evaluations of a trial that lasts for the whole limit: the most, and the usual number. Good
trials end long before the limit, and their seconds are known only up to the interval."""
LEAST_STEPS, LEAST_EVALUATIONS = 50, 10
"""A shorter trial means nothing: it has fewer steps of AdamW, or fewer evaluations."""
REFERENCE_STEPS = (1000, 300, 100)
"""Steps of AdamW's default setting, which fix a missing target: the first number that fits into a
trial. They are far apart, so that two studies of one file have the same target although the machine
is a little slower in one of them."""
EVALUATION_SHARES = (0.1, 0.5)
"""Evaluations take at most this share of the training seconds: if there are more than the usual
number, and always."""


@dataclass(frozen=True)
class MeasuredSeconds:
    """Seconds of wall time, measured in short runs of AdamW."""

    step_s: float
    eval_s: float
    start_s: float
    """Start of a process until its first step, without evaluations."""
    spent_s: float
    """Duration of these short runs."""


@dataclass(frozen=True)
class Budget:
    """The training seconds of a study."""

    limit_s: float
    """Longest training of a trial."""
    tune_s: float
    """Training seconds of each optimizer in tuning."""
    confirm_s: float
    """Training seconds of all runs on fresh seeds."""
    reference_steps: int
    """Steps of AdamW's default setting that fix a missing target."""
    eval_freq: int
    max_steps: int
    """More steps than a trial can make in its limit. A schedule of the user's refers to it."""
    wall_per_s: float
    """Wall time for each training second, with evaluations."""
    start_s: float
    step_s: float
    """Seconds of a step of AdamW."""


def budget_of(
    minutes: float,
    measured: MeasuredSeconds,
    optimizers: int,
    seeds: int,
    *,
    has_target: bool = True,
) -> Budget:
    """Divide the minutes.

    Args:
        minutes: Wall time of the whole command.
        measured: What short runs have shown.
        optimizers: How many optimizers are tuned.
        seeds: How many fresh seeds are planned.
        has_target: Whether the problem has a target. A trial is not shorter than the run that
            fixes a missing target.

    Raises:
        UsageError: The minutes are too few to mean anything. The line says what would be enough.
    """
    runs = _full_runs(optimizers, seeds)
    each_s = (60 * minutes - measured.spent_s) / runs - measured.start_s
    interval_s = _interval_s(max(each_s, 0.0), measured)
    wall_per_s = 1 + measured.eval_s / interval_s
    limit_s = each_s / wall_per_s
    steps = LEAST_STEPS if has_target else REFERENCE_STEPS[-1]
    least_s = max(steps * measured.step_s, LEAST_EVALUATIONS * _interval_s(0.0, measured))
    if limit_s < least_s:
        line = _too_small(minutes, measured, runs, steps, limit_s)
        hint = "" if has_target else ". With target= in Problem(...), fewer minutes are enough"
        raise UsageError(f"{line}. --minutes {_enough(measured, runs, least_s)} is enough{hint}")
    return Budget(
        limit_s=limit_s,
        tune_s=TRIALS * limit_s,
        confirm_s=FINALISTS * seeds * limit_s,
        reference_steps=next(
            (n for n in REFERENCE_STEPS if n * measured.step_s <= limit_s), REFERENCE_STEPS[-1]
        ),
        eval_freq=max(1, round(interval_s / measured.step_s)),
        max_steps=math.ceil(1.25 * limit_s / measured.step_s),
        wall_per_s=wall_per_s,
        start_s=measured.start_s,
        step_s=measured.step_s,
    )


def _full_runs(optimizers: int, seeds: int) -> int:
    """Return the number of runs, if each lasts for the whole limit."""
    return TRIALS * optimizers + FINALISTS * seeds + SPARE


def _interval_s(limit_s: float, measured: MeasuredSeconds) -> float:
    """Return the training seconds between evaluations."""
    return min(
        max(limit_s / number, measured.eval_s / share, measured.step_s)
        for number, share in zip(EVALUATIONS, EVALUATION_SHARES, strict=True)
    )


def _too_small(
    minutes: float, measured: MeasuredSeconds, runs: int, least_steps: int, limit_s: float
) -> str:
    """Return a message about the largest cost: starts of runs, or steps and evaluations."""
    begins = f"{minutes:g} minutes are too few to mean anything: "
    starts_s = runs * measured.start_s
    if 2 * (measured.spent_s + starts_s) > 60 * minutes:
        return (
            f"{begins}the first runs took {measured.spent_s:.0f} s, and the starts of {runs} runs "
            f"take {starts_s:.0f} s ({measured.start_s:.2g} s each). Give more minutes, or end "
            "other programs, which slow down the starts"
        )
    steps = max(0, math.floor(limit_s / measured.step_s))
    evaluations = max(0, math.floor(limit_s / _interval_s(0.0, measured)))
    return (
        f"{begins}a trial would have {steps} steps of AdamW and {evaluations} evaluations, and it "
        f"needs {least_steps} and {LEAST_EVALUATIONS} (a step takes {measured.step_s:.3g} s, an "
        f"evaluation {measured.eval_s:.3g} s)"
    )


def _enough(measured: MeasuredSeconds, runs: int, least_s: float) -> int:
    """Return minutes that are enough, and a little more: the next measurement may be slower."""
    needed_s = measured.spent_s + runs * (measured.start_s + least_s * (1 + max(EVALUATION_SHARES)))
    return math.ceil(1.2 * needed_s / 60)


PLAN_FILE = "try.json"
_FIRST_RUNS = {"speed": ("first", "few", "many"), "reference": (REFERENCE,)}
"""The runs that fix the plan, by phase."""
_PHASES = (*_FIRST_RUNS, "tuning", "final")
"""The folders of run directories, in the order of a study."""


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
class StudyPlan:
    """The budget and the target of a study, which are fixed before tuning."""

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

    def plan(self) -> StudyPlan | None:
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
        return StudyPlan(budget, target, is_own)

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

    def write_plan(self, plan: StudyPlan) -> None:
        """Fix the plan."""
        tree: dict[str, Any] = {"question": asdict(self.question), **asdict(plan)}
        write_text(self.path / PLAN_FILE, json.dumps(tree, indent=1) + "\n")

    def runs_dir(self, phase: str) -> Path:
        """Return the folder of the runs of a phase."""
        return self.path / phase

    def remove_first_runs(self) -> None:
        """Remove the runs that fix the plan, after the end of a run that outlives its command.

        Nothing else is removed: the user may have named a folder with files of another purpose.
        """
        for phase, names in _FIRST_RUNS.items():
            for directory in (self.runs_dir(phase) / name for name in names):
                if directory.is_dir():
                    wait_until_free(directory)
                    shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):  # The folder is missing, or it holds other files.
                self.runs_dir(phase).rmdir()

    def remove_if_empty(self) -> None:
        """Remove the folder again if nothing has been fixed, because the input was bad."""
        if not (self.path / PLAN_FILE).exists():
            self.remove_first_runs()
            if {p.name for p in self.path.iterdir()} <= {own_files.LOCK_FILE}:
                shutil.rmtree(self.path, ignore_errors=True)
