"""What :class:`KFAC` refuses, each time with a ``ValueError`` that says why and what to do."""

from collections.abc import Sequence

import torch
from torch import nn

from kfac_bench.core.capture.fisher import FISHERS
from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.core.distributed.dtensor import any_tensor_parallel
from kfac_bench.core.execution.sharded_gradients import any_sharded
from kfac_bench.core.kernels.conventions import CONVENTIONS
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.plan import Plan

CHOICES: dict[str, tuple[object, ...]] = {
    "factor_convention": tuple(CONVENTIONS),
    "fisher": FISHERS,
    "weight_sharing": ("expand", "reduce"),
    "state_dtype": (torch.float32, torch.bfloat16, torch.float16),
}


def check_choices(**options: object) -> None:
    """Check that each option has one of its :data:`CHOICES`."""
    for name, value in options.items():
        if value not in CHOICES[name]:
            choices = ", ".join(map(str, CHOICES[name]))
            raise ValueError(f"{name}={value!r}: choose one of {choices}")


def check_layers(
    layers: Sequence[Layer], model: nn.Module, world_size: int, strategy: str, *, overlap: bool
) -> None:
    """Check that the layers can be preconditioned on ``world_size`` ranks."""
    if not layers:
        raise ValueError(
            "the model has no layer to precondition: check skip, and requires_grad of the weights"
        )
    double = [layer.name for layer in layers if layer.weight.dtype == torch.float64]
    if world_size > 1 and double:
        # Messages are float32 at most, so ranks would mix float32 with their own float64.
        raise ValueError(
            f"layer {double[0]} has float64 weights: on several ranks K-FAC works in float32; "
            "use model.float()"
        )
    if not any_sharded(layers):
        return
    if overlap:
        raise ValueError(
            "overlap=True needs whole gradients, but ranks hold parts of the parameters; "
            "use overlap=False"
        )
    if strategy == "local_factors" and any_tensor_parallel(model):
        raise ValueError(
            "strategy=local_factors: ranks that share a tensor-parallel layer must all see it; "
            "choose owner_reduce"
        )


def check_damping(
    plan: Plan, damping: object, *, factored_damping: bool, is_pipeline: bool
) -> None:
    """Check that a rank has the factors and layers that its damping needs.

    ``is_pipeline`` says that other ranks hold further layers of the model.
    """
    is_adaptive = isinstance(damping, LevenbergMarquardt)
    if is_pipeline and is_adaptive:
        raise ValueError(
            "damping=LevenbergMarquardt(...) needs all layers of the model on each rank: "
            "with model_parallel give a number or a function of the step"
        )
    splits = factored_damping and plan.method == "inverse"
    if not plan.colocated and (splits or is_adaptive):
        name = "factored_damping" if splits else "an adaptive damping"
        raise ValueError(
            f"{name} needs both factors of a layer on one rank: leave colocate_factors=True"
        )
