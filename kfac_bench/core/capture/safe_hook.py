"""Hooks that disturb no copies, pickles, torch.compile and torch.func; :mod:`.hooks` uses them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def no_hook(*args: object, **kwargs: object) -> None:
    """Do nothing: a copied or unpickled hook becomes this function."""


def _unpickled() -> Callable[..., None]:
    return no_hook


def _is_transformed() -> bool:
    """Return whether torch.compile, torch.jit or a transform of torch.func runs the model now.

    Their tensors may not leave the pass, and have no graph that a hook could read.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
    )


class SafeHook:
    """A hook that copies and pickles as :func:`no_hook`: K-FAC stays with the original model."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the function, except in a pass that is transformed."""
        if not _is_transformed():
            self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _unpickled, ()


_eager: list[AbstractContextManager[Any]] = []
"""One entry per enabled capture: the first sets torch.compile's stance, the last resets it."""


def run_eagerly(enabled: bool) -> None:
    """Run compiled models eagerly while at least one capture is enabled.

    Each capture calls this once with True and later once with False.
    """
    if enabled:
        stance = nullcontext() if _eager else torch.compiler.set_stance("force_eager")
        _eager.append(stance)
        return
    # The first entry set the stance, so it must go last: earlier calls remove other entries.
    stance = _eager.pop(-1 if len(_eager) > 1 else 0)
    stance.__exit__(None, None, None)
