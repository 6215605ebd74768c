"""The data of a user's own problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config import problem_file
from kfac_bench.config.data import DataConfig
from kfac_bench.config.options import PLACE, RESULT, option
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config.train import TrainConfig
    from kfac_bench.data.own.problem_data import ProblemData


@dataclass
class ProblemDataConfig(DataConfig):
    """The data of a user's own problem; choose it with problem=FILE."""

    tasks: ClassVar[tuple[str, ...]] = ("problem",)

    image_size: int = option(0, "the problem decides", RESULT, at_least=0, at_most=0)
    file: str | None = option(None, "Python file of the problem; problem=FILE sets it", PLACE)
    arguments: str = option(
        "", "arguments of the file's function; problem.NAME=VALUE sets them", RESULT
    )
    sha256: str = option("", "hash of the problem's file; problem=FILE sets it", RESULT)

    def build(self, task: str) -> ProblemData:
        """See :meth:`DataConfig.build`."""
        from kfac_bench.data.own.problem_data import ProblemData

        return ProblemData(self._named(), self.workers, self.on_error)

    def shape(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of the first tensor of an example, which is read from the data."""
        return self.build("problem").shape, 0

    def example_inputs(self, n: int) -> Any:
        """Return a batch of ``n`` examples with the shapes of the first examples."""
        return self.build("problem").example_batch(n)

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        super().check(config)
        file = self._named()
        for group, section in (("model", config.model), ("task", config.task)):
            own = (getattr(section, "file", None), getattr(section, "arguments", None))
            if own != (self.file, self.arguments):
                raise UsageError(
                    f"{group}={section.name} does not belong to {self.file}. Choose model, data "
                    "and task together with problem=FILE"
                )
        if self.sha256 != file.sha256:
            raise UsageError(
                f"data.sha256={self.sha256} is not the hash of {self.file}, which is "
                f"{file.sha256}. Remove data.sha256: problem=FILE sets it"
            )
        examples = len(file.problem.train)
        if config.trainer.drop_last and config.trainer.batch_size > examples:
            raise UsageError(
                f"trainer.batch_size={config.trainer.batch_size} is larger than the training set "
                f"of {self.file}, which has {examples} examples. Choose a smaller batch_size"
            )

    def _named(self) -> problem_file.ProblemFile:
        return problem_file.named(self.file, "data.file", self.arguments)
