"""Notices a model that trains in eval mode, where K-FAC collects no statistics."""

from collections.abc import Container, Sequence

from kfac_bench.core.guards.notices import Notices
from kfac_bench.core.layers.base import Layer


def check_training_mode(
    layers: Sequence[Layer], collected: Container[str], notices: Notices
) -> None:
    """Warn if layers in eval mode have gradients but left no statistics.

    Args:
        layers: The layers whose statistics this rank collects.
        collected: The names of the layers that have statistics.
        notices: Gives the warning.
    """
    idle = [
        layer.name
        for layer in layers
        if layer.name not in collected
        and layer.weight.grad is not None
        and not any(module.training for module in layer.modules)
    ]
    if idle:
        notices.give(
            "eval",
            f"layer {idle[0]!r} is trained in eval mode, where K-FAC collects no statistics "
            f"({len(idle)} of {len(layers)} layers). Call model.train() before the training steps",
        )
