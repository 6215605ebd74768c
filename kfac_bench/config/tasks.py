"""What all tasks have in common: the base class of a task's options."""

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from kfac_bench.config.options import RESULT, Section, option
from kfac_bench.config.registry import TASKS
from kfac_bench.errors import UsageError


@dataclass
class TaskConfig(Section):
    """What is learned, and the validation metric that ``trainer.target`` refers to."""

    likelihood: ClassVar[str]
    """Distribution that the model's output stands for; a dry run counts labels by it."""

    name: str = option(MISSING, "task", RESULT, choices=TASKS)
    label_smoothing: float = option(
        0.0, "label smoothing of the cross-entropy", RESULT, at_least=0, below=1
    )

    def build(self, data: Any) -> Any:
        """Return the :class:`kfac_bench.tasks.task.Task` for a dataset.

        Args:
            data: The :class:`kfac_bench.data.base.dataset.Data` that is trained on.
        """
        raise NotImplementedError

    def check(self, config: Any) -> None:
        """See :meth:`Section.check`."""
        if self.label_smoothing and self.name != "classification":
            raise UsageError(
                f"task.label_smoothing={self.label_smoothing:g} has no effect on task={self.name}. "
                "Only task=classification smooths labels: set task.label_smoothing=0"
            )

    def output(self, model: Any, inputs: Any) -> Any:
        """Return the output of the model, from which a dry run counts work.

        Args:
            model: The network, on torch's meta device.
            inputs: What ``DataConfig.example_inputs`` returns.
        """
        # A detector's forward depends on values; its outline does the same work without them.
        return getattr(model, "outline", model)(inputs)

    def try_out(self, model: Any, data: Any) -> None:
        """Try one batch before a run begins. By default nothing is tried.

        Raises:
            UsageError: The model, the data and the loss do not fit.
        """
