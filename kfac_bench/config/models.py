"""What all models have in common: the base class of a model's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING

from kfac_bench.config.options import RESULT, Section, option
from kfac_bench.config.registry import MODELS

if TYPE_CHECKING:
    from torch import nn


@dataclass
class ModelConfig(Section):
    """The network; its input shape and its number of classes come from the dataset."""

    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    """Names of the tasks that the model fits."""
    usual_data: ClassVar[str | None] = None
    """Dataset that ``kfac-plan`` assumes if the command line names none; None: the default one."""

    name: str = option(MISSING, "architecture", RESULT, choices=MODELS)
    weights: str | None = option(
        None,
        "weights to start from: a run directory, a .safetensors file, or a folder with "
        "model.safetensors; the state of the optimizer is not read",
        RESULT,
    )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        """Return the network with random weights.

        A dry run calls this method on torch's meta device, so it must not look at values.

        Args:
            shape: Shape of one input: (C, H, W) of an image, (tokens,) of a text.
            num_classes: Number of classes, or of tokens in the vocabulary.
            task: Name of the task; most models ignore it.
        """
        raise NotImplementedError
