"""Where in a paragraph the answer to a question is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.options import RESULT, option
from kfac_bench.config.tasks import TaskConfig

if TYPE_CHECKING:
    from kfac_bench.data.language.squad_windows import Squad
    from kfac_bench.tasks.task import Task


@dataclass
class QuestionAnsweringConfig(TaskConfig):
    """Question answering: the place of the answer in a paragraph; metric: F1 in percent."""

    likelihood: ClassVar[str] = "categorical"

    max_answer_tokens: int = option(
        30, "tokens of the longest answer that is considered", RESULT, at_least=1
    )

    def build(self, data: Squad) -> Task:
        """See :meth:`TaskConfig.build`."""
        from kfac_bench.tasks.objectives.question_answering import QuestionAnswering

        return QuestionAnswering(data.eval_questions, self.max_answer_tokens)
