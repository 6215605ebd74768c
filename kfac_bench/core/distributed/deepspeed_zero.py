"""K-FAC in a DeepSpeed script, where ZeRO 1 and 2 leave each rank a part of the gradients.

Usage::

    preconditioner = KFAC(model, optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ...
    engine.backward(loss)
    with whole_gradients(engine):
        preconditioner.step()
    engine.step()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def whole_gradients(engine: Any) -> Iterator[None]:
    """Make ``.grad`` whole, and the mean over ranks, inside the block.

    DeepSpeed applies what ``.grad`` holds at the end of the block. All ranks enter the block
    between ``engine.backward`` of the last micro-batch and ``engine.step``. Stage 0 needs nothing.
    Stages 1 and 2 send one message per parameter, and gradients are whole for the time of the
    block.

    Raises:
        ValueError: Weights or gradients are not whole tensors in float32.
    """
    check(engine)
    gather_gradients(engine)
    try:
        yield
    except BaseException:
        for p in _parameters(engine) if engine.zero_optimization_stage() > 0 else ():
            p.grad = None  # DeepSpeed would add the next gradient to it
        raise
    scatter_gradients(engine)


def check(engine: Any) -> None:
    """Check that K-FAC can work with the engine.

    Raises:
        ValueError: It cannot; the message says what to change.
    """
    if engine.zero_optimization_stage() > 2:
        raise ValueError(
            "ZeRO stage 3 keeps no whole weight on a rank, so no layer has an input and an output "
            "that K-FAC can see; use stage 2, or FSDP2 (fully_shard)"
        )
    if any(p.dtype != torch.float32 for p in _parameters(engine)):
        raise ValueError(
            "DeepSpeed's fp16 and bf16 sections keep weights and gradients in half precision; use "
            "its torch_autocast section with dtype bfloat16, which leaves them in float32"
        )
    if engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16:
        raise ValueError(
            "DeepSpeed's torch_autocast with float16 leaves gradients scaled; use bfloat16"
        )


def gather_gradients(engine: Any) -> None:
    """Set ``.grad`` of each parameter to its whole gradient."""
    from deepspeed.utils import safe_get_full_grad

    if engine.zero_optimization_stage() > 0:
        for p in _parameters(engine):
            p.grad = safe_get_full_grad(p)


def scatter_gradients(engine: Any) -> None:
    """Give DeepSpeed the part of ``.grad`` with which this rank updates weights; drop the rest."""
    from deepspeed.utils import safe_set_full_grad

    if engine.zero_optimization_stage() > 0:
        for p in _parameters(engine):
            # DeepSpeed would write into a .grad that exists, so it is taken away first.
            grad, p.grad = p.grad, None
            if grad is not None:
                safe_set_full_grad(p, grad)


def takes_gradient(param: Tensor) -> bool:
    """Return whether ZeRO 1 or 2 takes ``.grad`` away after backward, to keep its own part."""
    # DeepSpeed sets it for each parameter. It is None where this rank updates no part of it.
    return hasattr(param, "_hp_mapping")


def _parameters(engine: Any) -> list[nn.Parameter]:
    return [p for p in engine.module.parameters() if p.requires_grad]
