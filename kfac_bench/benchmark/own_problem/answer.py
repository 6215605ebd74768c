"""The answer of ``kfac-bench try``: text, a page, and lines for the user's script.

The lines build the winner. They follow from the checked configuration of a run, so they also have
the user's own words. They need a variable ``model``. Options at the defaults of the called function
are left out.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytorch_optimizer import SOAP
from torch import optim

from kfac_bench import report
from kfac_bench.benchmark.own_problem import study_input
from kfac_bench.benchmark.own_problem.study import HOPELESS, StudyResult, final_limit_s
from kfac_bench.benchmark.own_problem.study_input import REFERENCE, Asked, base_words
from kfac_bench.benchmark.own_problem.try_result import Finalist, SeedRun, TryResult
from kfac_bench.benchmark.own_problem.verdict import verdict, verdict_page
from kfac_bench.benchmark.trials import TrialResult
from kfac_bench.config import TrainConfig, compose
from kfac_bench.core import KFAC
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS, eigen_adam
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.kfac_options import OPTIONS, state_dtypes
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.optimizers.first_order_options import AdamWConfig, MuonConfig, SGDConfig
from kfac_bench.optimizers.muon import muon
from kfac_bench.optimizers.options import EigenAdamConfig, SOAPConfig
from kfac_bench.problem import Problem
from kfac_bench.record import score
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.record.runs import Run
from kfac_bench.record.sinks.panels import STAGES
from kfac_bench.report.tables import Table, Value
from kfac_bench.report.training_numbers import median_of, memory_bytes, part_seconds
from kfac_bench.whole_files import write_text


def try_result(asked: Asked, found: StudyResult, *, is_quick: bool) -> TryResult:
    """Return the results of a study that the verdict needs."""
    problem = asked.chosen.problem
    made = {name: _finalist(asked, found, name) for name in found.finals}
    return TryResult(
        problem=asked.title,
        metric=problem.metric_title,
        higher_is_better=problem.higher_is_better,
        target=found.plan.target,
        reference=made.pop(REFERENCE),
        rivals=list(made.values()),
        seeds=asked.seeds,
        is_own_target=found.plan.is_own_target,
        reference_steps=found.plan.budget.reference_steps,
        left_out=_left_out(found),
        has_tried_kfac=any(each[0]["kfac"] != "none" for each in asked.candidates.values()),
        minutes=asked.minutes,
        is_quick=is_quick,
    )


def write(asked: Asked, found: StudyResult, folder: Path, *, is_quick: bool) -> str:
    """Write ``verdict.txt`` and the page ``verdict.html`` into the folder; return the verdict."""
    result = try_result(asked, found, is_quick=is_quick)
    text = verdict(result)
    write_text(folder / "verdict.txt", text + "\n")
    runs = sorted(path.parent for path in (folder / "final").rglob(EVENTS_FILE))
    title = f"Does K-FAC help on {asked.title}?"
    if runs:
        report.compare(
            runs, folder / "verdict.html", [_trials_table(found)], title, verdict_page(result)
        )
    return text


def _finalist(asked: Asked, found: StudyResult, name: str) -> Finalist:
    winner, results = found.winners[name], found.finals[name]
    runs = [result.run() for result in results]
    whole = [run for run in runs if run is not None]
    config = compose.load(base_words(asked, winner.settings))
    problem = asked.chosen.problem
    return Finalist(
        name=study_input.tuning().labels[name],
        runs=[
            SeedRun(r.seed, r.time_s, r.steps, _curve(run))
            for r, run in zip(results, runs, strict=True)
        ],
        limit_s=_limit_s(results, runs, final_limit_s(winner, found.plan.budget)),
        paste=paste_lines(config, problem, asked.words),
        uses_kfac=config.kfac.enabled,
        step_s=median_of(run.pace[0] for run in whole),
        memory_bytes=median_of(map(memory_bytes, whole)),
        stages_s={part: s for part, s in part_seconds(whole)[1].items() if part in STAGES},
    )


def _limit_s(results: Sequence[TrialResult], runs: Sequence[Run | None], most_s: float) -> float:
    """Return the training seconds that each run had to reach the target, ``most_s`` at most.

    A run also ends at its last step. On fresh seeds that may be before its limit in seconds.
    """
    missed_s = [
        result.train_s
        for result, run in zip(results, runs, strict=True)
        # A run that has failed would not have reached the target with more seconds.
        if run is not None and math.isinf(result.time_s) and score.status(run) == "finished"
    ]
    return min([most_s, *missed_s])


def _curve(run: Run | None) -> list[tuple[float, float]]:
    """Return training seconds and metric of each evaluation."""
    return [] if run is None else [(s, m) for _, s, m in score.metric_curve(run)]


def _left_out(found: StudyResult) -> dict[str, str]:
    """Return the optimizers that did not run on fresh seeds, with what tuning showed."""
    labels = study_input.tuning().labels
    reasons = {}
    for name, trials in found.trials.items():
        if name in found.finals:
            continue
        if name not in found.winners:
            reasons[labels[name]] = "no trial fits into the budget"
        elif math.isfinite(found.winners[name].time_s):
            reasons[labels[name]] = f"{found.winners[name].time_s:.3g} s in tuning"
        else:
            why = next((r.reason for r in trials if r.reason), "")
            reasons[labels[name]] = "missed the target in tuning" + (f" ({why})" if why else "")
    return reasons


def _trials_table(found: StudyResult) -> Table:
    """Return a row for each trial of the tuning."""
    labels = study_input.tuning().labels
    rows: list[list[Value]] = []
    for name, trials in found.trials.items():
        for count, trial in enumerate(trials, start=1):
            shown = ", ".join(f"{k} {v}" for k, v in trial.settings.items() if "." in k)
            rows.append([labels[name], count, shown, str(trial.seed)])
            rows[-1] += [trial.time_s, trial.train_s, trial.reason]
    budget = found.plan.budget
    note = (
        f"Each optimizer had {budget.tune_s:.3g} training seconds. A trial stops when it cannot be "
        f"faster than the best one of its optimizer, after {HOPELESS} times the seconds of the "
        f"best one of all, and at the latest after {budget.limit_s:.3g} s. The best settings ran "
        "again on other seeds, if the seconds sufficed. The median decides"
    )
    columns = (
        *("optimizer", "trial", "settings", "seed"),
        *("seconds to target", "seconds trained", "remark"),
    )
    return Table("All trials of the tuning", columns, rows, [note])


def paste_lines(
    config: TrainConfig, problem: Problem | None = None, words: Sequence[str] = ()
) -> str:
    """Return the lines, separated by line breaks.

    Args:
        config: The configuration of a run of the winner.
        problem: The problem, which says how K-FAC draws labels.
        words: The overrides of the study. A schedule among them is named in a comment.
    """
    made = _optimizer(config, problem)
    if schedule := [word for word in words if word.startswith("schedule")]:
        made.append(f"# The runs had {' '.join(schedule)}: give your script the same schedule.")
    return "\n".join(made)


def _optimizer(config: TrainConfig, problem: Problem | None) -> list[str]:
    """Return the lines that build the optimizer and K-FAC."""
    optimizer = config.optimizer
    match optimizer:
        case EigenAdamConfig():
            return _eigen_adam(config, optimizer)
        case MuonConfig():
            given = optimizer.settings()
            words = ["model", f"lr={_shown(given.pop('lr'))}", *_keywords(muon, given)]
            made = ["from kfac_bench import muon", f"optimizer = muon({', '.join(words)})"]
        case SOAPConfig():
            given = optimizer.settings() | {
                "precondition_frequency": optimizer.precondition_freq,
                "max_precondition_dim": optimizer.max_dim,
            }
            made = ["from pytorch_optimizer import SOAP", _built("SOAP", SOAP, given)]
        case AdamWConfig():
            made = ["import torch", _built("torch.optim.AdamW", optim.AdamW, optimizer.settings())]
        case SGDConfig():
            made = ["import torch", _built("torch.optim.SGD", optim.SGD, optimizer.settings())]
        case _:
            raise AssertionError(optimizer.name)
    if config.kfac.enabled:
        made += _kfac(config, problem)
    return made


def _built(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    words = ["model.parameters()", *_keywords(function, given)]
    return f"optimizer = {name}({', '.join(words)})"


def _keywords(
    function: Callable[..., Any], given: Mapping[str, Any], also: Mapping[str, Any] | None = None
) -> list[str]:
    """Return ``name=value`` of what differs from the function's defaults, or from ``also``."""
    defaults = {k: p.default for k, p in inspect.signature(function).parameters.items()}
    defaults |= also or {}
    return [
        f"{name}={_shown(value)}"
        for name, value in given.items()
        if name not in defaults or not _equal(value, defaults[name])
    ]


def _equal(value: Any, default: Any) -> bool:
    if isinstance(value, list) and isinstance(default, list | tuple):
        return value == list(default)
    return bool(value == default)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _kfac_options(config: TrainConfig) -> dict[str, Any]:
    # The study refuses words that set an option which the constructor does not have.
    return {k: v for k, v in asdict(config.kfac).items() if k in OPTIONS}


def _kfac_words(config: TrainConfig, also: Mapping[str, Any] | None = None) -> list[str]:
    """Return the keywords of KFAC; the dtype is the only one whose name is not its value."""
    options = _kfac_options(config)
    name = options.pop("state_dtype")
    words = _keywords(KFAC, options, also)
    return words if name == "fp32" else [*words, f"state_dtype={state_dtypes()[name]}"]


def _kfac(config: TrainConfig, problem: Problem | None) -> list[str]:
    words = ", ".join(["model", "optimizer", *_kfac_words(config)])
    built = f"KFAC({words}).attach()"
    if config.kfac.fisher == "empirical":
        return ["from kfac_bench import KFAC", built]
    assert problem is not None, "labels are drawn from the likelihood of a problem"
    drawn = ", ".join(["output", *_labels(problem)])
    return [
        "from kfac_bench import KFAC",
        f"preconditioner = {built}",
        "# In each step, between forward and loss.backward():",
        f"#   preconditioner.fisher_backward({drawn})",
    ]


def _labels(problem: Problem) -> list[str]:
    """Return the arguments of ``KFAC.fisher_backward`` with which K-FAC draws labels."""
    words = [f'"{problem.likelihood}"']
    if problem.likelihood == "gaussian" and problem.curvature != 1:
        words.append(f"curvature={_shown(problem.curvature)}")
    if problem.likelihood == "categorical" and not problem.loss_takes_model:
        # A loss(output, target) of torch has the classes in dimension 1, K-FAC in the last one.
        words.append("dim=1")
    return words


def _eigen_adam(config: TrainConfig, optimizer: EigenAdamConfig) -> list[str]:
    given = optimizer.settings()
    own = inspect.signature(eigen_adam).parameters
    words = ["model", f"lr={_shown(given.pop('lr'))}"]
    words += _keywords(EigenAdam, given, {"betas": own["betas"].default})
    assert config.kfac.method == EIGEN_ADAM
    if kfac := _kfac_words(config, KFAC_DEFAULTS):
        words.append(f"kfac=dict({', '.join(kfac)})")
    made = ["from kfac_bench import eigen_adam", f"optimizer = eigen_adam({', '.join(words)})"]
    return ["import torch", *made] if "torch." in made[1] else made
