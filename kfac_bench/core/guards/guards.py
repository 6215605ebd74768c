"""All guards of one :class:`KFAC`, in the order in which a step calls them.

A guard never reads from the device at a step without decompositions. docs/reference/checks.md lists
the guards, their thresholds, and what they cannot see.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.guards.loss_mean import MeanCheck
from kfac_bench.core.guards.loss_scale import LaterUnscaling, LossScaleCheck
from kfac_bench.core.guards.missing_step import MissingStep
from kfac_bench.core.guards.model_changes import ModelChanges
from kfac_bench.core.guards.notices import Notices
from kfac_bench.core.guards.statistics import StatisticsCheck
from kfac_bench.core.guards.step_order import StepOrder
from kfac_bench.core.guards.wide_layers import WidthCheck
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.plan import Plan


class Guards:
    """What notices misuse while training runs.

    Args:
        model: The model, without wrapper.
        layers: The layers that K-FAC covers.
        plan: The work of all ranks.
        optimizer: The optimizer; it gets a hook, if it can have one.
        find: Returns the layers that a KFAC built now would cover, and others.
        capture: The hooks of this rank.
        collective: The ranks of the plan; rank 0 gives the warnings.
        leave: Leaves layers, by name, to the optimizer.
        sees_moments: Whether the raw moments are complete and unscaled when a step starts.
        sees_rows: Whether the statistics count all rows of a layer's inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        plan: Plan,
        optimizer: Optimizer,
        find: Callable[[], tuple[Sequence[Layer], object]],
        capture: Capture,
        collective: Collective,
        leave: Callable[[set[str]], None],
        *,
        sees_moments: bool,
        sees_rows: bool,
    ) -> None:
        self.order = StepOrder(layers)
        self._layers = layers
        self._notices = Notices(is_active=collective.rank == 0)
        self._missing = MissingStep(model, layers, self._notices)
        self._changes = ModelChanges(model, layers, find)
        self._statistics = StatisticsCheck(layers, capture, collective, leave, self._notices)
        computed = [layer for layer in layers if layer.name in capture.computed]
        identity = capture.identity  # None if statistics are not made of the gradients of the loss
        self._scale = None
        if identity is not None and computed:
            self._scale = LossScaleCheck(computed[-1], identity)
        self._mean = MeanCheck() if identity is not None and sees_moments else None
        self._width = WidthCheck(layers, plan, collective.rank) if sees_rows else None
        self._unscaling: LaterUnscaling | None = LaterUnscaling(layers[-1])
        self._dtypes: dict[str, torch.dtype] = {}
        self._handle: RemovableHandle | None = None
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        if hooks is not None:  # wrappers of frameworks have none
            self._handle = optimizer.register_step_pre_hook(self._before_optimizer)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.order.optimizer_steps()
        if self._unscaling is not None:
            self._unscaling.see(optimizer, self._notices)

    def check_dtypes(self) -> None:
        """Check that the weights have the dtypes of the first step.

        Raises:
            RuntimeError: They have others, so that factors and gradients do not fit together.
        """
        for layer in self._layers:
            now = layer.weight.dtype
            first = self._dtypes.setdefault(layer.name, now)
            if now != first:
                raise RuntimeError(
                    f"the weight of {layer.name} was {first} in the first step of K-FAC and is "
                    f"{now} now. Convert the model before you build KFAC. Or build another KFAC "
                    "and load state_dict() of this KFAC"
                )

    def see_statistics(
        self, collected: Mapping[str, Collected], loss_scale: float | Tensor
    ) -> None:
        """Look at the statistics of a step; ``loss_scale`` is what the user passed."""
        self.see_model()
        self._statistics.see(collected)
        if self._scale is not None:
            self._scale.see(loss_scale)
        if self._mean is not None:
            self._mean.see(collected, loss_scale)
        if self._width is not None:
            self._width.see(collected, self._notices)

    def leave(self, names: Collection[str]) -> None:
        """Leave layers to the optimizer."""
        self._statistics.leave(names)

    def see_model(self) -> None:
        """Look for layers that were replaced, added or changed since K-FAC was built."""
        if self._changes.look(self._notices):
            self._statistics.leave(self._changes.parametrized)
            self._statistics.restart()

    def see_gradients(self) -> None:
        """Remember the gradients that K-FAC has just written; forget those before."""
        self.order.mark()
        self._missing.step()
        if self._unscaling is not None:
            self._unscaling.mark()

    def judge(self) -> None:
        """Read from the device and warn; only in steps with decompositions, before they run."""
        self._statistics.judge()
        if self._scale is not None and self._scale.judge(self._notices) and self._mean is not None:
            self._mean.stop()  # the loss scale explains the size
        if self._mean is not None:
            self._mean.judge(self._notices)
        if self._unscaling is not None:
            self._unscaling.judge(self._notices)

    def release_optimizer(self) -> None:
        """Remove the hook from the optimizer: K-FAC is attached and has its own hook."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._unscaling = None

    def remove(self) -> None:
        """Remove all hooks."""
        self.release_optimizer()
        self._missing.remove()
