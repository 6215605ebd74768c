"""``kfac-bench try``: does K-FAC help on the user's own problem?"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli.entry import Parser, command_line, say_next
from kfac_bench.config.command_options import refuse_old_words, sbatch_options
from kfac_bench.errors import UsageError
from kfac_bench.output import say

if TYPE_CHECKING:
    from kfac_bench.benchmark.own_problem.study_input import Asked
    from kfac_bench.benchmark.own_problem.study_plan import Question

MINUTES, QUICK_MINUTES = 30.0, 2.0
SEEDS, QUICK_SEEDS = 5, 3
SET_BY_THE_STUDY = (
    "seed",
    "run_id",
    "runs_dir",
    "label",
    "resume",
    "from",
    "profile",
    "recipe",
    "dry_run",
    "experiment",
    "data",
    "model",
    "task",
    "kfac.enabled",
    "kfac.adaptive_damping",
    "kfac.damping_freq",
    "kfac.damping_decay",
    "kfac.damping_decay_epochs",
    "kfac.interval_growth",
    "kfac.interval_growth_epochs",
    "trainer.max_steps",
    "trainer.max_epochs",
    "trainer.max_train_s",
    "trainer.eval_freq",
    "trainer.log_freq",
    "kfac.fisher",
)
"""Options beside those of conf/benchmark/try.yaml that the user's words must not set."""
OF_THE_OPTIMIZER = "optimizer.weight_decay"
"""The only option of the optimizers that the user's words may set."""


def add_try(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench try``."""
    command = commands.add_parser(
        "try", help="find out whether K-FAC helps on your own problem, and with which settings"
    )
    command.add_argument(
        "file", help="Python file of your problem (docs/tutorials/your_problem.md)"
    )
    command.add_argument(
        "words",
        nargs="*",
        default=[],  # otherwise argparse says that a word is required
        metavar="OPTION=VALUE",
        help="options of kfac-train for all runs",
    )
    command.add_argument(
        "--launcher",
        choices=("local", "slurm"),
        default="local",
        help="run on this machine (default), or submit a job",
    )
    command.add_argument(
        "--minutes", type=float, help=f"time of the whole study in minutes (default: {MINUTES:g})"
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help=f"a quick look: {QUICK_MINUTES:g} minutes, {QUICK_SEEDS} seeds",
    )
    command.add_argument("--ranks", type=int, default=1, help="processes of each run (default: 1)")
    command.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="RUN",
        help="begin with the result of this earlier study",
    )
    command.add_argument(
        "--optimizers",
        help="adamw and at least one of sgd, muon, soap, kfac, kfac_adamw and eigen_adam, with "
        "commas (default: all)",
    )
    command.add_argument(
        "--runs-dir", type=Path, help="folder of the study (default: runs/try-NAME)"
    )
    command.add_argument("--sbatch", default="", help="options of sbatch, for --launcher slurm")
    command.set_defaults(run_command=_try, parser=command)


def _try(options: argparse.Namespace) -> int:
    words, launcher, sbatch = options.words, options.launcher, sbatch_options(options)
    refuse_old_words(words, options.parser)
    _check_numbers(options, launcher)
    from kfac_bench.config import problem_file

    file = options.file.removeprefix(problem_file.WORD)
    problem_file.run_named([f"{problem_file.WORD}{file}"])
    asked, question = _asked(options, file, words)
    folder = options.runs_dir or Path("runs", f"try-{asked.title}")
    if launcher == "slurm":
        return _submit(options, words, file, folder, sbatch)
    return _study(asked, question, folder, is_quick=options.quick)


def _check_numbers(options: argparse.Namespace, launcher: str) -> None:
    if options.quick and options.minutes is not None:
        raise UsageError("--quick is a look of two minutes; leave out --quick or --minutes")
    if options.minutes is None:
        options.minutes = QUICK_MINUTES if options.quick else MINUTES
    if not 0 < options.minutes < 1e5:
        raise UsageError(f"--minutes {options.minutes:g}: must be above 0 and below 100000")
    if options.ranks < 1:
        raise UsageError(f"--ranks {options.ranks}: must be at least 1")
    if launcher == "local" and options.ranks > (most := os.cpu_count() or 1):
        raise UsageError(f"--ranks {options.ranks}: more than the {most} cores of this machine")


def _asked(options: argparse.Namespace, file: str, words: list[str]) -> tuple[Asked, Question]:
    """Return the input of the study. Each optimizer's first setting is composed as a check."""
    from kfac_bench.benchmark.own_problem import study_input
    from kfac_bench.benchmark.own_problem.study_input import Asked, base_words
    from kfac_bench.benchmark.own_problem.study_plan import Question
    from kfac_bench.benchmark.trials import overrides_of
    from kfac_bench.config import compose, problem_file

    names = study_input.choose(options.optimizers)
    _check_words(words, study_input.chosen_options(names))
    starts = study_input.starts_from(options.start) if options.start is not None else {}
    named = problem_file.chosen([f"{problem_file.WORD}{file}", *words])
    assert named is not None
    has_likelihood = named.problem.likelihood is not None
    candidates = {
        name: study_input.candidates(name, has_likelihood=has_likelihood, start=starts.get(name))
        for name in names
    }
    seeds = QUICK_SEEDS if options.quick else SEEDS
    asked = Asked(file, words, options.minutes, options.ranks, seeds, None, candidates)
    configs = [compose.load(base_words(asked, each[0])) for each in candidates.values()]
    target = configs[0].trainer.target
    asked = replace(asked, target=target)
    question = Question(
        sha256=named.sha256,
        words=" ".join(words),
        optimizers=",".join(names),
        minutes=float(options.minutes),
        ranks=options.ranks,
        seeds=seeds,
        starts={name: " ".join(overrides_of(each)) for name, each in starts.items()},
    )
    return asked, question


def _check_words(words: list[str], chosen: set[str]) -> None:
    for word in words:
        key, equals, _ = word.lstrip("+").partition("=")  # Hydra knows +OPTION and ++OPTION
        if not equals:
            raise UsageError(f"{word}: write an override as OPTION=VALUE")
        is_other_option = key.startswith("optimizer.") and key != OF_THE_OPTIMIZER
        if key in SET_BY_THE_STUDY or key in chosen or is_other_option:
            raise UsageError(f"{word}: kfac-bench try sets {key} itself; remove this word")


def _study(asked: Asked, question: Question, path: Path, *, is_quick: bool) -> int:
    from kfac_bench.benchmark.own_problem import answer, study, study_input
    from kfac_bench.benchmark.own_problem.leaderboard import Leaderboard
    from kfac_bench.benchmark.own_problem.study_plan import StudyFolder

    look = "a quick look of" if is_quick else "a study of"
    minutes = "1 minute" if asked.minutes == 1 else f"{asked.minutes:g} minutes"
    say(f"{asked.file}: {look} {minutes}, {len(asked.candidates)} optimizers")
    folder = StudyFolder(path, question)
    with folder.locked():
        try:
            with Leaderboard(asked) as board:
                found = study.run(asked, folder, board)
        except UsageError:
            folder.remove_if_empty()
            raise
        except KeyboardInterrupt:
            say(f"interrupted; the same command continues in {path}")
            raise
        text = answer.write(asked, found, path, is_quick=is_quick)
    say("")
    say(text)
    say(f"page: {(path / 'verdict.html').resolve()}")
    if is_quick:
        words = [asked.file, *asked.words, "--runs-dir", f"{path}-long", "--from", path]
        words += ["--ranks", asked.ranks] if asked.ranks > 1 else []
        is_part = question.optimizers != ",".join(study_input.choose(None))
        words += ["--optimizers", question.optimizers] if is_part else []
        say_next(command_line("kfac-bench try", words), "a study of 30 minutes")
    else:
        words = [path / "final", "--html", path / "final.html"]
        say_next(command_line("kfac-bench compare", words), "the runs on fresh seeds")
    return 0


def _submit(
    options: argparse.Namespace, words: list[str], file: str, folder: Path, sbatch: list[str]
) -> int:
    """Submit one job that runs the same command on its node."""
    from kfac_bench.benchmark import slurm_jobs
    from kfac_bench.benchmark.slurm_jobs import KFAC_BENCH

    command = [sys.executable, *KFAC_BENCH, "try", file, *words, "--ranks", str(options.ranks)]
    command += ["--quick"] if options.quick else ["--minutes", f"{options.minutes:g}"]
    command += ["--from", str(options.start)] if options.start is not None else []
    command += ["--optimizers", options.optimizers] if options.optimizers else []
    command += ["--runs-dir", str(folder)]
    (job,) = slurm_jobs.submit({}, command, folder, sbatch)
    say(f"job {job} submitted; it writes the verdict to {folder}/verdict.txt and verdict.html")
    return 0
