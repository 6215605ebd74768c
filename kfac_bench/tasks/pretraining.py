"""BERT's pre-training: masked tokens and next sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.tasks import TaskConfig
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.config.train import TrainConfig
    from kfac_bench.data.language.masked_text import Text
    from kfac_bench.tasks.task import Task


@dataclass
class PretrainingConfig(TaskConfig):
    """BERT's pre-training: masked tokens and next sentences; metric: loss of masked tokens."""

    likelihood: ClassVar[str] = "categorical"

    def build(self, data: Text) -> Task:
        """See :meth:`TaskConfig.build`."""
        from kfac_bench.tasks.objectives.pretraining import Pretraining

        return Pretraining(data.tokens)

    def check(self, config: TrainConfig) -> None:
        """See :meth:`Section.check`."""
        super().check(config)
        if config.kfac.enabled and config.kfac.fisher != "empirical":
            raise UsageError(
                f"kfac.fisher={config.kfac.fisher} draws labels from one likelihood, but "
                "task=pretraining has two (masked tokens and next sentences): use "
                "kfac.fisher=empirical"
            )
