"""K-FAC in a DeepSpeed script: ZeRO 1 and 2 leave a rank with a part of the gradients.

Usage::

    preconditioner = KFAC(model, optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ...
    engine.backward(loss)
    with whole_gradients(engine):
        preconditioner.step()
    engine.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def whole_gradients(engine: Any) -> Iterator[None]:
    """Inside, ``.grad`` is whole and the mean over ranks; what it then holds is what is applied.

    All ranks enter it between ``engine.backward``, of the last micro-batch, and ``engine.step``.
    Nothing to do with ZeRO stage 0. Stages 1 and 2 send a message per parameter, and hold whole
    gradients for so long. Raises ``ValueError`` where gradients or weights are not whole fp32.
    """
    check(engine)
    gather_gradients(engine)
    yield
    scatter_gradients(engine)


def check(engine: Any) -> None:
    """Raise ``ValueError`` for an engine that K-FAC cannot work with."""
    if engine.zero_optimization_stage() > 2:
        raise ValueError(
            "ZeRO stage 3 keeps no whole weight on a rank, so no layer has an input and an output "
            "of its own to make factors of; use stage 2, or FSDP2 (fully_shard)"
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
    """Give each rank the part of ``.grad`` that it updates weights by, and drop the rest."""
    from deepspeed.utils import safe_set_full_grad

    if engine.zero_optimization_stage() > 0:
        for p in _parameters(engine):
            grad, p.grad = p.grad, None  # where there is a .grad, DeepSpeed would write there
            if grad is not None:
                safe_set_full_grad(p, grad)


def _parameters(engine: Any) -> list[nn.Parameter]:
    return [p for p in engine.module.parameters() if p.requires_grad]
