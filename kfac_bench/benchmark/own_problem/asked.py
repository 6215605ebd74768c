"""The checked input of a study, and the overrides that all its runs share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kfac_bench.benchmark.own_problem.spaces import Settings
from kfac_bench.benchmark.trials import overrides_of
from kfac_bench.config import problem_file
from kfac_bench.config.problem_file import ProblemFile


@dataclass(frozen=True)
class Asked:
    """The input of ``kfac-bench try``, which the command has checked."""

    file: str
    """Path of the problem's file."""
    words: Sequence[str]
    """The user's overrides of kfac-train."""
    minutes: float
    ranks: int
    seeds: int
    """How many fresh seeds are planned."""
    target: float | None
    candidates: Mapping[str, Sequence[Settings]]
    """The settings of each optimizer, in the order in which they are tried."""

    @property
    def chosen(self) -> ProblemFile:
        """The problem, with the arguments that the words set."""
        found = problem_file.chosen([f"{problem_file.WORD}{self.file}", *self.words])
        assert found is not None
        return found

    @property
    def title(self) -> str:
        """The name of the problem."""
        return problem_file.title(self.file, self.chosen.arguments)


def base_words(asked: Asked, settings: Settings) -> list[str]:
    """Return the overrides that all runs of a setting share."""
    # Hydra takes one choice of a group only.
    is_logged = any(word.startswith("logger=") for word in asked.words)
    return [
        f"problem={asked.file}",
        *([] if is_logged else ["logger=none"]),
        "trainer.predictions=0",
        *asked.words,
        *overrides_of(settings),
    ]
