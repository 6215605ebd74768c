"""A fully connected autoencoder: the classic ill-conditioned problem for second-order methods."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from kfac_bench.errors import UsageError

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


class Autoencoder(nn.Module):
    """Linear layers inputs -> hidden[0] -> ... -> hidden[-1] and their mirror image back.

    `inputs` is C * H * W of one image. The code (the output of width hidden[-1]) and the
    reconstruction are linear; every other layer is followed by `activation` (tanh, relu or
    sigmoid). Weights are initialised as torch does for Linear, uniform in +-1/sqrt(fan_in), from
    the global generator. Raises UsageError for an unknown activation, and for a `hidden` that is
    empty or not positive.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], activation: str = "tanh") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise UsageError(
                f"unknown activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}"
            )
        if not hidden or min(inputs, *hidden) < 1:
            raise UsageError(f"the widths {[inputs, *hidden]} must be two or more positive numbers")
        widths = [inputs, *hidden]
        self.encoder = _layers(widths, activation)
        self.decoder = _layers(widths[::-1], activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [n, C, H, W] to their reconstructions of the same shape."""
        reconstruction: Tensor = self.decoder(self.encoder(x.flatten(1)))
        return reconstruction.view_as(x)


def _layers(widths: Sequence[int], activation: str) -> nn.Sequential:
    layers = nn.Sequential()
    for fan_in, fan_out in pairwise(widths):
        layers.extend([nn.Linear(fan_in, fan_out), ACTIVATIONS[activation]()])
    del layers[-1]  # the last layer is linear
    return layers
