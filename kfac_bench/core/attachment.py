"""The one-line form of K-FAC: a hook that runs K-FAC before each step of an optimizer.

:meth:`KFAC.attach` makes an :class:`Attachment`. The hook runs wherever ``optimizer.step()`` is
called: in a script, in a GradScaler, in the loop of a training framework.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

LossScale = float | Tensor | Callable[[], float | Tensor]


class Scaler(Protocol):
    """What :meth:`KFAC.attach` needs of a GradScaler."""

    def get_scale(self) -> float:
        """Return what multiplies the loss."""
        ...


class Attachment:
    """A pre-hook of ``optimizer.step()``.

    The hook keeps the preconditioner alive as long as the optimizer lives. So a script need not
    keep a variable for it.

    Args:
        optimizer: The optimizer, perhaps in the wrapper of a framework.
        precondition: Runs K-FAC on the gradients; its argument is the loss scale of the statistics.
        scaler: The GradScaler, if it multiplies the loss.

    Raises:
        TypeError: The object has no ``step()`` that takes hooks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        precondition: Callable[[LossScale], None],
        scaler: Scaler | None,
    ) -> None:
        self._precondition, self._scaler = precondition, scaler
        self._handle = innermost(optimizer).register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Remove the hook from the optimizer."""
        self._handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run K-FAC now, or after the closure: with a closure there are no gradients yet."""
        if getattr(optimizer, "_handles", None):
            # Messages of Horovod are on their way. Its step() waits for the averages, and then
            # calls the step of the optimizer inside, which calls this hook again.
            return None
        if kwargs.get("closure") is not None:
            return args, kwargs | {"closure": self._wrap(optimizer, kwargs["closure"])}
        if len(args) > 1 and args[1] is not None:  # args[0] is the optimizer
            return (args[0], self._wrap(optimizer, args[1]), *args[2:]), kwargs
        self._run(optimizer)
        return None

    def _wrap(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that also runs K-FAC."""
        calls = 0

        def closure_then_precondition() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError(
                    f"{type(optimizer).__name__} calls its closure more than once in a step: K-FAC "
                    "works with optimizers that use one gradient per step, such as SGD and Adam"
                )
            loss = closure()
            self._run(optimizer)
            return loss

        return closure_then_precondition

    def _run(self, optimizer: Optimizer) -> None:
        scale = unscale_fused(optimizer)
        if self._scaler is not None:
            self._precondition(self._scaler.get_scale)
        else:
            self._precondition(1.0 if scale is None else scale)


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the wrappers of frameworks (Accelerate, Lightning).

    A wrapper has the wrapped optimizer in ``optimizer``, and calls its ``step()``.

    Raises:
        TypeError: There is no ``torch.optim.Optimizer`` inside.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"attach() needs a torch.optim.Optimizer, not a {type(optimizer).__name__} object: "
            "call step() yourself, before the optimizer's step"
        )
    return optimizer


@torch.no_grad()
def unscale_fused(optimizer: Optimizer) -> Tensor | None:
    """Unscale the gradients of an optimizer with ``fused=True``; return the scale, None without.

    A GradScaler does not unscale such gradients. It sets ``optimizer.grad_scale``, and the fused
    kernel unscales inside the step, which is too late for K-FAC. ``optimizer.found_inf`` still
    makes the kernel skip the update, so nothing here reads from the device.
    """
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return None
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(inverse.to(p.grad.device, non_blocking=True))
    # None is what GradScaler itself sets after the user's own unscale_().
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    return scale
