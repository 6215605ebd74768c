"""What all optimizers have in common: the base class of an optimizer's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import MISSING

from kfac_bench.config.options import RESULT, Section, check_patterns, option
from kfac_bench.config.registry import OPTIMIZERS

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


Group = dict[str, Any]
"""A parameter group of torch.optim: ``params``, and settings that differ from the others'."""


@dataclass
class OptimizerConfig(Section):
    """The optimizer; K-FAC, if it is on, preconditions the gradients before its step."""

    is_elementwise: ClassVar[bool] = True
    """Whether each entry of a weight is updated by itself; if so, ZeRO may cut weights anywhere."""
    fits_dtensors: ClassVar[bool] = True
    """Whether the optimizer can step weights that FSDP2 distributes over ranks."""

    name: str = option(MISSING, "optimizer", RESULT, choices=OPTIMIZERS)
    lr: float = option(MISSING, "learning rate", RESULT, above=0)
    weight_decay: float = option(
        0.0,
        "L2 penalty (sgd, adam, lars, shampoo), decoupled decay (adamw, muon, soap), or part of "
        "the update (lamb)",
        RESULT,
        at_least=0,
    )
    no_decay: list[str] = option(
        [],
        "regular expressions of parameters without decay: by name, or by the class of their layer",
        RESULT,
    )

    def build(self, groups: list[Group], model: nn.Module) -> Optimizer:
        """Return the optimizer.

        Args:
            groups: The trained parameters; a group without decay has its own ``weight_decay``.
            model: The model of these parameters; most optimizers ignore it.
        """
        raise NotImplementedError

    def check(self, config: Any) -> None:
        """See :meth:`Section.check`."""
        check_patterns("optimizer.no_decay", self.no_decay)
