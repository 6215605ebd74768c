"""The hooks of a KFAC on modules and optimizers: one KFAC at a time on a module, one hook per step.

:meth:`KFAC.attach` makes an :class:`Attachment`, a hook that runs K-FAC before each step of an
optimizer. The hook runs wherever ``optimizer.step()`` is called: in a script, in a GradScaler, in
the loop of a training framework.

Two KFACs on one module, or on one parameter, would both write its gradient, so :func:`claim` makes
one KFAC the owner of its layers. Two KFACs on different modules (the generator and the
discriminator of a GAN) are fine.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from kfac_bench.core.layers.base import Layer

LossScale = float | Tensor | Callable[[], float | Tensor]


class Scaler(Protocol):
    """The part of a GradScaler that :meth:`KFAC.attach` needs."""

    def get_scale(self) -> float:
        """Return the loss scale."""
        ...


class Attachment:
    """A pre-hook of ``optimizer.step()``, and a post-hook that notes the end of the step.

    The hook keeps the preconditioner alive as long as the optimizer lives. So a script need not
    keep a variable for it.

    Args:
        optimizer: The optimizer, perhaps in the wrapper of a framework.
        precondition: Runs K-FAC on the gradients; its argument is the loss scale of the statistics.
        scaler: The GradScaler, if it multiplies the loss.
        has_forward: Returns whether the model has run since K-FAC ran last.

    Raises:
        TypeError: The object has no ``step()`` that takes hooks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        precondition: Callable[[LossScale], None],
        scaler: Scaler | None,
        has_forward: Callable[[], bool],
    ) -> None:
        self._precondition, self._scaler, self._has_forward = precondition, scaler, has_forward
        inner = innermost(optimizer)
        if not isinstance(inner, Optimizer):
            raise TypeError(
                f"attach() needs a torch.optim.Optimizer, not a {type(inner).__name__} object: "
                "call step() yourself, before the optimizer's step"
            )
        self._has_run = False  # in the step of the optimizer that runs now
        self._handles = (
            inner.register_step_pre_hook(self._before_step),
            inner.register_step_post_hook(self._after_step),
        )

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._has_run = False

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
        if self._has_run and not self._has_forward():
            # The step of a subclass may change the gradients and then call the step of its parent.
            # torch runs the hooks there, too, if the parent class was ever instantiated. After a
            # forward this is another step: an error, such as Ctrl-C, has ended the last one.
            return
        scale = unscale_fused(optimizer)
        if self._scaler is not None:
            self._precondition(self._scaler.get_scale)
        else:
            self._precondition(1.0 if scale is None else scale)
        self._has_run = True


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the wrappers of frameworks (Accelerate, Lightning).

    A wrapper has the wrapped optimizer in ``optimizer``, and calls its ``step()``.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


@torch.no_grad()
def unscale_fused(optimizer: Optimizer) -> Tensor | None:
    """Unscale the gradients of an optimizer with ``fused=True``; return the scale, None without.

    A GradScaler does not unscale such gradients. It sets ``optimizer.grad_scale``, and the fused
    kernel unscales inside the step, which is too late for K-FAC. ``optimizer.found_inf`` still
    makes the kernel skip the update, so nothing here reads from the device.
    """
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    of_loss: Tensor | None = getattr(scale, "of_loss", None)
    if scale is None or of_loss is not None:  # another KFAC has unscaled
        return of_loss
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(inverse.to(p.grad.device, non_blocking=True))
    # The kernel need not unscale any more. GradScaler deletes the attribute after the step.
    optimizer.grad_scale = unscaled = torch.ones_like(scale)  # type: ignore[attr-defined]
    unscaled.of_loss = scale  # type: ignore[attr-defined]
    return scale


class Removable(Protocol):
    """Hooks that can be removed."""

    def remove(self) -> None:
        """Remove the hooks. A second call does nothing."""
        ...


class Owner(Protocol):
    """The owner of modules: a :class:`KFAC`."""

    def detach(self) -> None:
        """Remove all hooks and give up the modules."""
        ...


_owner_of: WeakKeyDictionary[nn.Module, ref[Owner]] = WeakKeyDictionary()
_owner_of_parameter: MutableMapping[Tensor, ref[Owner]] = WeakTensorKeyDictionary()
"""Modules of two KFACs may share a parameter."""


def owners(modules: Iterable[nn.Module]) -> Iterator[Owner]:
    """Yield the owners of the modules, once per module that has one."""
    for module in modules:
        reference = _owner_of.get(module)
        if reference is not None and (owner := reference()) is not None:
            yield owner


def check_free(layers: Sequence[Layer]) -> None:
    """Check that no other KFAC is on these layers.

    Raises:
        RuntimeError: There is another one.
    """
    if _first_taken(layers) is None:
        return
    gc.collect()  # an attached KFAC that nobody needs is a cycle with its optimizer
    layer = _first_taken(layers)
    if layer is not None:
        raise RuntimeError(
            f"layer {layer.name!r} has another KFAC already: call detach() on that KFAC first. "
            "If you no longer have it, call KFAC.detach_all(model). A function that builds K-FAC "
            "and runs again, such as configure_optimizers, begins with that call"
        )


def _first_taken(layers: Sequence[Layer]) -> Layer | None:
    return next((layer for layer in layers if any(_owners_of(layer))), None)


def _owners_of(layer: Layer) -> Iterator[Owner]:
    """Yield the owners of the modules of a layer, and those of its parameters."""
    yield from owners(layer.modules)
    for parameter in layer.params:
        reference = _owner_of_parameter.get(parameter)
        if reference is not None and (owner := reference()) is not None:
            yield owner


def claim(
    owner: Owner, layers: Sequence[Layer], hooks: Sequence[Removable]
) -> "finalize[[Sequence[Removable]], Owner]":
    """Make ``owner`` the owner of the layers until :func:`release`, or until nothing refers to it.

    Args:
        owner: The preconditioner.
        layers: Its layers.
        hooks: Removed when the owner is gone. They must not refer to the owner: the finalizer
            keeps them, so the owner would never go.

    Returns:
        The finalizer. Detach it when the hooks are removed earlier.
    """
    finalizer = finalize(owner, _remove, hooks)
    finalizer.atexit = False
    for layer in layers:
        for module in layer.modules:
            _owner_of[module] = ref(owner)
        for parameter in layer.params:
            _owner_of_parameter[parameter] = ref(owner)
    return finalizer


def release(owner: Owner, layers: Sequence[Layer]) -> None:
    """Make the layers free for another KFAC."""
    for layer in layers:
        for module in layer.modules:
            if any(other is owner for other in owners([module])):
                del _owner_of[module]
        for parameter in layer.params:
            reference = _owner_of_parameter.get(parameter)
            if reference is not None and reference() is owner:
                del _owner_of_parameter[parameter]


def _remove(hooks: Sequence[Removable]) -> None:
    for hook in hooks:
        hook.remove()
