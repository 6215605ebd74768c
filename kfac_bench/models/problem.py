"""The model of a user's own problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config import problem_file
from kfac_bench.config.models import ModelConfig
from kfac_bench.config.options import PLACE, option
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from torch import nn


@dataclass
class ProblemModelConfig(ModelConfig):
    """The model of a user's own problem; choose it with problem=FILE."""

    tasks: ClassVar[tuple[str, ...]] = ("problem",)

    file: str | None = option(None, "Python file of the problem; problem=FILE sets it", PLACE)
    arguments: str = option(
        "", "arguments of the file's function; problem.NAME=VALUE sets them", PLACE
    )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """See :meth:`ModelConfig.build`."""
        import torch
        from torch import nn

        from kfac_bench import randomness

        file = problem_file.named(self.file, "model.file", self.arguments)
        with randomness.preserve_rng():
            # The caller has seeded torch; a model may also draw from NumPy and Python.
            randomness.seed_all(torch.initial_seed() & (2**63 - 1))
            model = file.call("the model cannot be built", file.problem.model)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{self.file}: the function `model` returned an object of class "
                f"{type(model).__name__}. Return an nn.Module"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(f"{self.file}: the model has no parameter to train")
        return model
