"""What :class:`KFAC` refuses, each with a ``ValueError`` that says why and what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.core.distributed.dtensor import any_tensor_parallel
from kfac_bench.core.layers.base import Layer


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """A value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(str, choices))}")


def check_single(layers: Sequence[Layer]) -> None:
    """What ranks send each other is float32 at most: with float64 they would mix the two."""
    double = [layer.name for layer in layers if layer.weight.dtype == torch.float64]
    if double:
        raise ValueError(
            f"layer {double[0]} has float64 weights: on several ranks K-FAC works in float32; "
            "use model.float()"
        )


def check_sharded(model: nn.Module, strategy: str, overlap: bool) -> None:
    """What needs whole gradients in backward, or leaves ranks out of a layer's statistics."""
    if overlap:
        raise ValueError("overlap=True does not fit ranks that hold parts of parameters")
    if strategy == "local_factors" and any_tensor_parallel(model):
        raise ValueError(
            "strategy=local_factors: ranks that share a tensor-parallel layer must all see it; "
            "choose owner_reduce"
        )


def check_apart(inverse_splits_damping: bool, damping: object) -> None:
    """Options for which a rank that has one factor of a layer needs the other."""
    what = "factored_damping" if inverse_splits_damping else "an adaptive damping"
    if inverse_splits_damping or isinstance(damping, LevenbergMarquardt):
        raise ValueError(
            f"{what} needs both factors of a layer on one rank: leave colocate_factors=True"
        )


def check_stages(damping: object) -> None:
    """What needs all layers of a model, of which other ranks hold some."""
    if isinstance(damping, LevenbergMarquardt):
        raise ValueError("model_parallel: an adaptive damping would need all layers of the model")
