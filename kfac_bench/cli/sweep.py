"""`kfac-train --multirun`: a sweep, whose runs start here one after the other."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli.endings import command_line, say_next
from kfac_bench.cli.entry import say_once
from kfac_bench.distributed.slurm_rank import from_launcher
from kfac_bench.errors import OneRankError, UsageError

if TYPE_CHECKING:
    from kfac_bench.config import TrainConfig


def run(
    overrides: Sequence[str], config_dir: Path | None, train: Callable[["TrainConfig"], int]
) -> int:
    """Run each job of the sweep and return the largest exit code.

    Args:
        overrides: What the user wrote on the command line. A list of values makes several jobs.
        config_dir: The folder of `--config-dir`.
        train: Trains with one configuration and returns the exit code.

    Raises:
        UsageError: A configuration is not valid. No job has started then.
    """
    from kfac_bench.config import compose, problem_file

    problems = problem_file.separated(overrides)
    for words in problems:
        problem_file.run_named(words)
    # Hydra's own sweeps would also read launchers and callbacks, which are programs, from files.
    configs = [
        compose.load(job, config_dir) for words in problems for job in _jobs(words, config_dir)
    ]
    codes: list[int] = []
    for config in configs:
        try:
            codes.append(train(config))
        except UsageError as error:
            if isinstance(error, OneRankError) and from_launcher("WORLD_SIZE", "1") != "1":
                raise  # the other ranks lose this rank, and their sweeps end, too
            say_once(f"kfac-train: {error}")
            codes.append(2)
        # A signal that stops one job stops the whole sweep.
        if codes[-1] >= 128:
            break
    if len(configs) > 1 and set(codes) == {0} and not configs[0].dry_run:
        from kfac_bench.training.run_directory import RunDirectory

        paths = list(dict.fromkeys(RunDirectory(config).path for config in configs))
        say_next(command_line("kfac-bench compare", paths))
    return max(codes, default=0)


def _jobs(overrides: Sequence[str], config_dir: Path | None) -> list[tuple[str, ...]]:
    """Return the words of each job: all combinations of the values of all lists."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from kfac_bench.config import compose

    choices = []
    for word in compose.expanded(overrides, config_dir):
        try:
            (parsed,) = OverridesParser.create().parse_overrides([word])
            is_sweep = parsed.is_sweep_override()
            values = list(parsed.sweep_string_iterator()) if is_sweep else []
        except Exception as error:  # Hydra raises exceptions of many classes for a wrong word
            raise compose.usage_error(error, overrides) from None
        key = parsed.get_key_element()
        choices.append([f"{key}={value}" for value in values] if is_sweep else [word])
    return list(itertools.product(*choices))
