"""The loss and the metric of a user's own problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kfac_bench.config import problem_file
from kfac_bench.config.options import PLACE, option
from kfac_bench.config.tasks import TaskConfig
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from kfac_bench.config.train import TrainConfig
    from kfac_bench.data.own.problem_data import ProblemData
    from kfac_bench.tasks.task import Task


@dataclass
class ProblemTaskConfig(TaskConfig):
    """The loss and the metric of a user's own problem; choose them with problem=FILE."""

    file: str | None = option(None, "Python file of the problem; problem=FILE sets it", PLACE)
    arguments: str = option(
        "", "arguments of the file's function; problem.NAME=VALUE sets them", PLACE
    )

    @property
    def likelihood(self) -> str:  # type: ignore[override]
        """The likelihood that the problem names; ``none`` if it names none."""
        return self._named().problem.likelihood or "none"

    def build(self, data: ProblemData) -> Task:
        """See :meth:`TaskConfig.build`."""
        from kfac_bench.tasks.objectives.problem_task import ProblemTask

        return ProblemTask(data.file, data.has_parts)

    def output(self, model: nn.Module, inputs: Any) -> Any:
        """See :meth:`TaskConfig.output`; here the inputs are a batch."""
        from kfac_bench.tasks.objectives.problem_task import ProblemTask

        file = self._named()
        task = ProblemTask(file, isinstance(inputs, tuple))
        return file.call(
            "the model or the loss fails on a batch without values (torch's meta device)",
            lambda: task.forward(model, inputs if isinstance(inputs, tuple) else (inputs,))[1],
        )

    def try_out(self, model: nn.Module, data: ProblemData) -> None:
        """See :meth:`TaskConfig.try_out`."""
        from kfac_bench.tasks.objectives.problem_trial import try_out

        try_out(model, data)

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        problem = self._named().problem
        fisher = config.kfac.fisher
        if config.kfac.enabled and fisher != "empirical" and problem.likelihood is None:
            raise UsageError(
                f"kfac.fisher={fisher} draws labels from a likelihood, but the problem in "
                f"{self.file} names none. Set likelihood= in Problem(...), or use "
                "kfac.fisher=empirical"
            )
        if self.label_smoothing:
            raise UsageError(
                f"task.label_smoothing={self.label_smoothing} has no effect on {self.file}: smooth "
                "the labels in the loss of the problem"
            )

    def _named(self) -> problem_file.ProblemFile:
        return problem_file.named(self.file, "task.file", self.arguments)
