"""The symbol that follows each symbol of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.tasks import TaskConfig

if TYPE_CHECKING:
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.tasks.task import Task


@dataclass
class LanguageModelConfig(TaskConfig):
    """Language modelling: the next symbol of a text; metric: loss."""

    likelihood: ClassVar[str] = "categorical"

    def build(self, data: Data) -> Task:
        """See :meth:`TaskConfig.build`."""
        from kfac_bench.tasks.objectives.language_model import LanguageModel

        return LanguageModel()
