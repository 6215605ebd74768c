"""The contest's additions to the package: a folder of configuration files and two optimizers."""

from pathlib import Path

from benchmarks.contest.kl_optimizers import KLShampooConfig, KLSOAPConfig
from kfac_bench.benchmark import local_runs
from kfac_bench.config import conf_files
from kfac_bench.optimizers import options

CONF = Path(__file__).parent / "conf"
"""Laid out as conf/; ``kfac-train --config-dir`` reads it, too."""
OPTIMIZERS = {"kl_shampoo": KLShampooConfig, "kl_soap": KLSOAPConfig}


def enable() -> None:
    """Add the contest's files and optimizers to this process, and to runs that it forks."""
    if CONF not in conf_files.ADDED:
        conf_files.ADDED.append(CONF)
        options.CHOICES.update(OPTIMIZERS)
        local_runs.BEFORE_TRAINING.append("benchmarks.contest.enabled")
