"""`kfac-train --multirun`: a sweep, whose runs start here one after the other."""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli.entry import command_line, say_next, say_once
from kfac_bench.distributed import slurm_rank
from kfac_bench.errors import OneRankError, UsageError
from kfac_bench.output import say

if TYPE_CHECKING:
    from kfac_bench.config import TrainConfig


MOST_RUNS = 1000
"""All runs are composed before the first one starts: some hundredths of a second for each."""


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
    from kfac_bench.config import compose, problem_file, recipes

    ranks = slurm_rank.launched_ranks()
    problems = problem_file.separated(overrides)
    for words in problems:
        problem_file.run_named(words)
    every_job = (job for words in problems for job in _jobs(words, config_dir))
    # No further: a few words may stand for more jobs than fit into memory.
    jobs = list(itertools.islice(every_job, MOST_RUNS + 1))
    if len(jobs) > MOST_RUNS:
        raise UsageError(
            f"a sweep of more than {MOST_RUNS} runs is not possible. Start several sweeps"
        )
    # Hydra's own sweeps would also read launchers and callbacks, which are programs, from files.
    configs = [compose.load(words, config_dir, ranks) for words in jobs]
    chosen = [recipes.choose(words, config_dir, ranks) for words in jobs]
    if slurm_rank.is_main_process():
        for line in dict.fromkeys(recipe.line() for recipe in chosen if recipe is not None):
            say(line)
    _check_folders(configs)
    _group_in_wandb(configs)
    codes: list[int] = []
    for config in configs:
        try:
            codes.append(train(config))
        except UsageError as error:
            if isinstance(error, OneRankError) and slurm_rank.launched_ranks() != 1:
                raise  # the other ranks lose this rank, and their sweeps end, too
            say_once(f"kfac-train: {error}")
            codes.append(2)
        # A signal that stops one job stops the whole sweep.
        if codes[-1] >= 128:
            break
        if len(configs) > 1 and slurm_rank.is_main_process():
            slurm_rank.forget_state_of_job()  # the exit code of the sweep decides
    is_over = max(codes, default=0) < 128 and slurm_rank.is_main_process()
    if len(configs) > 1 and is_over and not configs[0].dry_run:
        from kfac_bench.training.run_directory import RunDirectory

        found = [RunDirectory(config) for config in configs]
        paths = list(dict.fromkeys(each.path for each in found if each.events.exists()))
        if paths:
            say_next(command_line("kfac-bench compare", paths))
    return max(codes, default=0)


def _check_folders(configs: Sequence["TrainConfig"]) -> None:
    """Raise :class:`UsageError` if different runs would share one directory."""
    for i, config in enumerate(configs):
        shares = [other for other in configs[:i] if other.run_id == config.run_id is not None]
        if any(other != config for other in shares):
            raise UsageError(
                f"run_id={config.run_id}: a sweep of {len(configs)} runs needs a directory for "
                "each. Leave out run_id"
            )


def _group_in_wandb(configs: Sequence["TrainConfig"]) -> None:
    """Set one W&B group for all runs of a sweep, unless the user has set a group.

    Raises:
        UsageError: The runs would share one W&B run.
    """
    from kfac_bench.training.run_directory import run_id

    ids = [run_id(config) for config in configs]
    if len(ids) < 2:
        return
    # The same sweep is the same group, also when it is started again.
    group = f"sweep-{hashlib.sha256(' '.join(ids).encode()).hexdigest()[:8]}"
    for logger in (config.logger for config in configs if config.logger.wandb):
        if logger.id is not None:
            raise UsageError(
                f"WANDB_RUN_ID or logger.id={logger.id}: a sweep of {len(ids)} runs needs a W&B "
                "run for each. Unset it"
            )
        logger.group = logger.group or os.environ.get("WANDB_RUN_GROUP") or group


def _jobs(overrides: Sequence[str], config_dir: Path | None) -> Iterator[tuple[str, ...]]:
    """Return the words of each job: all combinations of the values of all lists."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from kfac_bench.config import compose

    words = [_without_glob(word, config_dir) for word in overrides]
    choices = []
    for word in compose.expanded(words, config_dir):
        try:
            (parsed,) = OverridesParser.create().parse_overrides([word])
            is_sweep = parsed.is_sweep_override()
            every = parsed.sweep_string_iterator() if is_sweep else iter(())
            values = list(itertools.islice(every, MOST_RUNS + 1))
        except Exception as error:  # Hydra raises exceptions of many classes for a wrong word
            raise compose.usage_error(error, [word]) from None
        key = parsed.get_key_element()
        choices.append([f"{key}={value}" for value in values] if is_sweep else [word])
    return itertools.product(*choices)


def _without_glob(word: str, config_dir: Path | None) -> str:
    """Return ``model=resnet20,resnet32`` for ``model=glob(resnet[23]*)``, and other words as is."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob

    from kfac_bench.config import compose

    group, _, value = word.partition("=")
    if not value.startswith("glob("):
        return word
    try:
        glob = OverridesParser.create().parse_overrides([word])[0].value()
    except Exception as error:  # as above
        raise compose.usage_error(error, [word]) from None
    choices = compose.options_of(group, config_dir)
    names: list[str] = glob.filter(choices) if isinstance(glob, Glob) else []
    if not names:
        known = f"choose from {', '.join(choices)}" if choices else f"{group} is not a group"
        raise UsageError(f"{word}: no choice fits; {known}")
    return f"{group}={','.join(names)}"
