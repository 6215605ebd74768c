"""Which :class:`KFAC` has its hooks on a module: at most one at a time.

Two KFACs on one module, or on one parameter, would both write its gradient. Two KFACs on different
modules (the generator and the discriminator of a GAN) are fine.
"""

import gc
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, finalize, ref

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kfac_bench.core.layers.base import Layer


class Removable(Protocol):
    """Hooks that can be removed."""

    def remove(self) -> None:
        """Remove the hooks. A second call does nothing."""
        ...


class Owner(Protocol):
    """What owns modules: a :class:`KFAC`."""

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


def take(owner: Owner, layers: Sequence[Layer], hooks: Sequence[Removable]) -> None:
    """Make ``owner`` the owner of the layers until :func:`release`, or until nothing refers to it.

    Args:
        owner: The preconditioner.
        layers: Its layers.
        hooks: Removed when the owner is gone. They must not refer to the owner: the finalizer
            keeps them, so the owner would never go.
    """
    finalizer = finalize(owner, _remove, hooks)
    finalizer.atexit = False
    for layer in layers:
        for module in layer.modules:
            _owner_of[module] = ref(owner)
        for parameter in layer.params:
            _owner_of_parameter[parameter] = ref(owner)


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
