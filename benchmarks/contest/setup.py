"""The contest's additions to the package: a folder of configuration files and two optimizers."""

from pathlib import Path

from benchmarks.contest.kl_optimizers import KLShampooConfig, KLSOAPConfig
from kfac_bench.benchmark import local_runs
from kfac_bench.config import conf_files, problem_file
from kfac_bench.optimizers import options

CONF = Path(__file__).parent / "conf"
"""Laid out as conf/; ``kfac-train --config-dir`` reads it, too."""
OPTIMIZERS = {"kl_shampoo": KLShampooConfig, "kl_soap": KLSOAPConfig}


def run_problems() -> None:
    """Run the problem files of this folder, so that experiments may name them.

    They are named as from the root of a clone, where the contest runs.
    """
    for path in sorted(Path("benchmarks/contest/problems").glob("*.py")):
        problem_file.run_named([f"{problem_file.WORD}{path}"])


def enable() -> None:
    """Add the contest's files and optimizers to this process, and to runs that it forks."""
    if CONF not in conf_files.ADDED:
        conf_files.ADDED.append(CONF)
        options.CHOICES.update(OPTIMIZERS)
        local_runs.BEFORE_TRAINING.append("benchmarks.contest.enabled")
