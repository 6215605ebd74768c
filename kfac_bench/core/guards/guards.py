"""All guards of one :class:`KFAC`, in the order in which a step calls them.

A guard never reads from the device at a step without decompositions. docs/reference/checks.md lists
the guards, their thresholds, and what they cannot see.
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.capture.safe_hooks import SafeHook
from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.distributed.dtensor import is_sharded, version_of
from kfac_bench.core.guards.loss import LaterUnscaling, LossScaleCheck, MeanCheck
from kfac_bench.core.guards.statistics import StatisticsCheck
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.estimate import flops
from kfac_bench.core.planning.plan import EIGEN_ADAM, Plan, Precondition

INSIDE = (
    str(Path(__file__).parents[2]),
    str(Path(torch.__file__).parent),
    str(Path(warnings.__file__).parent),
)
"""Folders of frames that are not the user's: this package, torch, the standard library."""
MIN_FLOPS = 1e9
"""Less work than this is over in some milliseconds on one core, so nobody has to know of it."""


class Guards:
    """The checks that notice misuse while training runs.

    Args:
        model: The model, without wrapper.
        layers: The layers that K-FAC covers.
        plan: The work of all ranks.
        find: Returns the layers that a KFAC built now would cover, and others.
        capture: The hooks of this rank.
        collective: The ranks of the plan; rank 0 gives the warnings.
        leave: Leaves layers, by name, to the optimizer.
        sees_moments: Whether the raw moments are complete and unscaled when a step starts.
        checks_width: Whether to warn of wide layers: statistics count all rows of a layer's inputs,
            and the user has set no ``max_overhead``.
        can_limit: Whether a KFAC with these options could have ``max_overhead``, too.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        plan: Plan,
        find: Callable[[], tuple[Sequence[Layer], object]],
        capture: Capture,
        collective: Collective,
        leave: Callable[[set[str]], None],
        *,
        sees_moments: bool,
        checks_width: bool,
        can_limit: bool,
    ) -> None:
        self.order = StepOrder(layers)
        self._layers, self._ranks = layers, collective.world_size
        self._warn = warn = Notices(is_active=collective.rank == 0).give
        self._missing = MissingStep(model, layers[-1], warn)
        self.statistics = StatisticsCheck(model, layers, find, capture, collective, leave, warn)
        computed = [layer for layer in layers if layer.name in capture.computed]
        identity = capture.identity  # None if statistics are not made of the gradients of the loss
        self._scale = LossScaleCheck(computed[-1], identity) if identity and computed else None
        self._mean = MeanCheck() if identity and sees_moments else None
        self._width = None
        if checks_width:
            self._width = _WidthCheck(layers, plan, collective.rank, can_limit=can_limit)
        self._unscaling: LaterUnscaling | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._handle: RemovableHandle | None = None

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        """Put a hook on the optimizer, if it can have one: K-FAC is not attached to it yet."""
        self._unscaling = LaterUnscaling(self._layers[-1])
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # wrappers of frameworks have none
            self._handle = optimizer.register_step_pre_hook(self._before_optimizer)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.order.optimizer_steps()
        if self._unscaling is not None:
            self._unscaling.see(optimizer, self._warn)

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

    def warn_of_ranks(self, averaged: int) -> None:
        """Warn that gradients are averaged over fewer ranks than K-FAC has."""
        self._warn(
            "ranks",
            f"KFAC was built for {self._ranks} ranks, but DistributedDataParallel averages "
            f"gradients over {averaged}. If the other ranks train another model, pass the wrapper "
            "of DistributedDataParallel to KFAC in place of the bare model",
        )

    def see_statistics(
        self, collected: Mapping[str, Collected], loss_scale: float | Tensor
    ) -> None:
        """Look at the statistics of a step; ``loss_scale`` is what the user passed."""
        self.statistics.see(collected)
        if self._scale is not None:
            self._scale.see(loss_scale)
        if self._mean is not None:
            self._mean.see(collected, loss_scale)
        if self._width is not None:
            self._width.see(collected, self._warn)

    def see_gradients(self) -> None:
        """Remember the gradients that K-FAC has just written; forget those before."""
        self.order.mark()
        self._missing.step()
        if self._unscaling is not None:
            self._unscaling.mark()

    def judge(self) -> None:
        """Read from the device and warn; only in steps with decompositions, before they run."""
        self.statistics.judge()
        has_scale = self._scale is not None and self._scale.judge(self._warn)
        if self._mean is not None:
            self._mean.evidence.is_done |= has_scale  # the loss scale explains the size
            self._mean.judge(self._warn)
        if self._unscaling is not None:
            self._unscaling.judge(self._warn)

    def release_optimizer(self) -> None:
        """Remove the hook from the optimizer: K-FAC is attached and has its own hook."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._unscaling = None

    def remove(self) -> None:
        """Remove all hooks."""
        self.release_optimizer()
        self._missing.handle.remove()


class _WidthCheck:
    """Notices layers so wide that preconditioning takes longer than forward and backward.

    A linear layer takes 2 g a operations per row for forward and 4 g a for backward. With
    eigenvectors, preconditioning takes 4 g a (g + a), however many rows there are. So it takes
    longer if g + a is more than 1.5 times the rows.
    """

    def __init__(self, layers: Sequence[Layer], plan: Plan, rank: int, *, can_limit: bool) -> None:
        self._specs = [layer.spec for layer in layers]
        is_eigen_adam = plan.method == EIGEN_ADAM
        self._advice = "Set max_overhead=0.5, which limits the time of K-FAC to half a step"
        if can_limit and is_eigen_adam:  # the orthogonalization of updates often takes half a step
            self._advice = "Set max_overhead=1, which limits the time of K-FAC to that of a step"
        elif is_eigen_adam:
            self._advice = "Set max_dim to fewer rows than the layer has"
        elif not can_limit:
            self._advice = "Set block_size=1024, which divides large factors"
        # max_dim does not save the orthogonalization of updates, so it does not count.
        self._work = sum(
            flops(
                replace(op, members=tuple(replace(x, orthogonal_steps=0) for x in op.members)),
                plan.method,
                {},
            )
            for op in plan.precondition
            if isinstance(op, Precondition) and rank in op.ranks
        )
        self._is_done = self._work < MIN_FLOPS or all(spec.is_lookup for spec in self._specs)

    def see(self, collected: Mapping[str, Collected], warn: Callable[[str, str], None]) -> None:
        """Look at the first statistics that have the rows of all layers."""
        if self._is_done or any(spec.name not in collected for spec in self._specs):
            return
        rows = {spec.name: collected[spec.name].rows for spec in self._specs}
        # If a pass was discarded, only the device knows how many rows are left.
        if not all(isinstance(number, int | float) and number > 0 for number in rows.values()):
            return
        self._is_done = True
        trained = (s for s in self._specs if not s.is_lookup)
        ratio = self._work / sum(6.0 * float(rows[s.name]) * s.grad_numel for s in trained)
        if ratio > 1:
            widest = max(self._specs, key=lambda s: (s.g_dim + s.a_dim) / float(rows[s.name]))
            own = float(rows[widest.name])
            warn(
                "width",
                f"preconditioning takes about {ratio:.1f} times the operations of forward and "
                f"backward, because layers are wide for this batch: layer {widest.name} has "
                f"{widest.g_dim} x {widest.a_dim} weights and {own:.0f} rows per step. "
                f"{self._advice}, or use a larger batch",
            )


class Notices:
    """Gives each kind of warning once, at the user's own line.

    Args:
        is_active: Whether this rank warns at all. One rank of many is enough.
    """

    def __init__(self, *, is_active: bool) -> None:
        self._is_active = is_active
        self._given: set[str] = set()

    def give(self, kind: str, text: str) -> None:
        """Warn with ``text``, unless ``kind`` was given before."""
        if not self._is_active or kind in self._given:
            return
        self._given.add(kind)
        # The innermost frame that is the user's has this level.
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
            frame, level = frame.f_back, level + 1
        warnings.warn(f"K-FAC: {text}", stacklevel=level)


CHANGES = 3
"""So often the weights may change between two steps of K-FAC. Methods such as SAM change the
weights twice in a step."""


class StepOrder:
    """The order of K-FAC's steps, the optimizer's steps and backward.

    Only certain cases count. K-FAC wrote a gradient if ``.grad`` is the same tensor and no
    operation has changed it in place. If exactly one operation has changed each gradient and the
    optimizer has made no step, the operation was a further backward or a clip: ``zero_grad()`` with
    a backward are two operations.

    Args:
        layers: The layers that K-FAC covers.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        # The gradients that K-FAC wrote. Weak references, because zero_grad() frees memory.
        self._written: list[tuple[Layer, TensorWeakRef, int]] = []
        # Some wrappers call another optimizer's step, so a step that was not seen proves nothing.
        self._sees_optimizer = self._optimizer_stepped = False

    def optimizer_steps(self) -> None:
        """Note that the optimizer makes a step now."""
        self._sees_optimizer = self._optimizer_stepped = True

    def has_gradients(self) -> bool:
        """Return whether backward reached a layer."""
        return any(layer.weight.grad is not None for layer in self._layers)

    def is_untouched(self) -> bool:
        """Return whether all gradients are exactly those that K-FAC wrote."""
        return self._changes() == {0}

    def check(self) -> None:
        """Check that the gradients were not preconditioned before.

        Raises:
            RuntimeError: They were.
        """
        proofs: list[set[int | None]] = [{0}, {1}] if self._sees_optimizer else [{0}]
        if not self._optimizer_stepped and self._changes() in proofs:
            raise RuntimeError(
                "step() was called twice without optimizer.step() in between: K-FAC would "
                "precondition the same gradients again. Call it once, after the last backward"
            )

    def _changes(self) -> set[int | None]:
        """Return the numbers of operations that changed the gradients; None for another tensor."""
        changes: set[int | None] = set()
        for layer, written, version in self._written:
            grad = layer.weight.grad
            if grad is None or written() is not grad:
                changes.add(None)
            else:
                changes.add(version_of(grad) - version)
        return changes

    def mark(self) -> None:
        """Remember the gradients that K-FAC has just written."""
        self._optimizer_stepped = False
        self._written = [
            (layer, TensorWeakRef(layer.weight.grad), version_of(layer.weight.grad))
            for layer in self._layers
            if layer.weight.grad is not None
        ]


class MissingStep:
    """Counts forward passes whose weights differ from those of the pass before.

    Args:
        model: The model, without wrapper.
        layer: The layer whose weight is observed.
        warn: Gives a warning of a kind once.
    """

    def __init__(self, model: nn.Module, layer: Layer, warn: Callable[[str, str], None]) -> None:
        self._layer, self._warn = layer, warn
        self._version: int | None = None
        self._changes = 0
        self.handle = model.register_forward_pre_hook(SafeHook(self._before_forward))

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        weight = self._layer.weight
        # FSDP2 writes into weights of its own before each forward.
        if not (module.training and torch.is_grad_enabled()) or is_sharded(weight):
            return
        self._changes += self._version not in (None, weight._version)
        self._version = weight._version
        if self._changes == CHANGES:
            self._warn(
                "missing step",
                f"the weights have changed {CHANGES} times, but K-FAC made no step: call "
                "kfac.step() before optimizer.step(), or attach() K-FAC to the optimizer whose "
                "step() runs. Build K-FAC with the optimizer that Horovod, Accelerate or another "
                "framework returns",
            )

    def step(self) -> None:
        """Note a step of K-FAC."""
        self._version, self._changes = None, 0
