"""How commands end: the finding, the folder that they wrote, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kfac_bench.errors import UsageError
from kfac_bench.output import say

if TYPE_CHECKING:
    from pathlib import Path

    from kfac_bench.config import TrainConfig

ALONE = "kfac=none"
OF_ONE_RUN = ("kfac=", "run_id=", "label=", "resume=")
"""Words that the command of the run beside leaves out."""


def command_line(command: str, words: Sequence[object]) -> str:
    """Return a command with its words quoted for a shell."""
    return " ".join([command, *(shlex.quote(str(word)) for word in words)])


def say_next(command: str, why: str = "") -> None:
    """Print the command that the user may want next, as the last line."""
    say(f"next: {command}{f'   ({why})' if why else ''}")


def say_run(
    config: TrainConfig, words: Sequence[str], config_dir: Path | None = None, ranks: int = 1
) -> None:
    """Print the result of a run that has ended, its folder, and the run to compare it with.

    That is the run with the same words and ``kfac=none``, or without this word. If it is in the
    runs folder, its result is printed, too. On several ranks the run's command is not known,
    because a launcher has started it.

    Args:
        config: The configuration of the run.
        words: The words of the user's command line.
        config_dir: The folder of `--config-dir`.
        ranks: The number of ranks of the run.
    """
    from kfac_bench.training.run_directory import RunDirectory

    path = RunDirectory(config).path
    result = _result(path)
    if result is None:
        say_next(command_line("kfac-bench compare", [path]), "what the failed run recorded")
        return
    say(f"result: {result}; {path}")
    beside, others = _beside(config, words, config_dir, ranks)
    for other in others:
        if (text := _result(other)) is not None:
            say(f"beside: {text}; {other}")
            say_next(command_line("kfac-bench compare", [path, other]))
            return
    if not others or ranks > 1:
        say_next(command_line("kfac-bench compare", [path]))
        return
    if config_dir is not None:
        beside += ["--config-dir", str(config_dir)]
    say_next(
        command_line("kfac-train", beside),
        "the optimizer alone" if config.kfac.enabled else "the same with K-FAC",
    )


def _beside(
    config: TrainConfig, words: Sequence[str], config_dir: Path | None, ranks: int
) -> tuple[list[str], list[Path]]:
    """Return the words of the run beside, and its directory under the names that it may have.

    K-FAC's options have no meaning without K-FAC, but they are part of the run id. There is no
    directory if the words do not fit together: some optimizers are nothing without K-FAC.
    """
    from kfac_bench.config import compose
    from kfac_bench.training.run_directory import RunDirectory

    kept = [word for word in words if not word.startswith(OF_ONE_RUN)]
    short = [word for word in kept if not word.startswith("kfac.")]
    if config.kfac.enabled:
        choices = [[*short, ALONE], [*kept, ALONE]]
    elif ALONE in words:
        choices = [kept]
    else:
        return [], []
    try:
        found = [compose.load(choice, config_dir, ranks) for choice in choices]
    except UsageError:
        return [], []
    if any(each.kfac.enabled == config.kfac.enabled for each in found):
        return [], []
    return choices[0], [RunDirectory(each).path for each in found]


def _result(path: Path) -> str | None:
    """Return optimizer, metric, steps and seconds of a run that has ended; None for another."""
    # Not record.score: it imports NumPy, and a finished run is answered without.
    from kfac_bench.record import runs
    from kfac_bench.record.events import EVENTS_FILE, Evaluated, RunEnded

    if not (path / EVENTS_FILE).is_file():
        return None
    try:
        run = runs.load(path)
        (setting,) = runs.group([run])
    except UsageError:  # a damaged record
        return None
    last = run.events[-1]
    if not isinstance(last, RunEnded) or last.status not in ("finished", "reached"):
        return None
    name = run.started.metric
    values = [e.metrics[name] for e in run.events if isinstance(e, Evaluated) and name in e.metrics]
    metric = f"{runs.plain(name)} {runs.number(values[-1]):.4g} after " if values else ""
    seconds = runs.number(last.train_s)
    return f"{setting.optimizer}: {metric}{last.step} steps, {seconds:.1f} s of training"
