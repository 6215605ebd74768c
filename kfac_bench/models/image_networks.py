"""Networks on images: a fully connected autoencoder, the small ResNets for CIFAR, and a U-Net.

The autoencoder is the classic ill-conditioned problem for second-order methods. The ResNets are
those of He et al. 2016, section 4.2. The U-Net is that of Ronneberger et al. 2015 with batch norm.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

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


WIDTHS = (16, 32, 64)


def cifar_resnet(depth: int, num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Return the ResNet of `depth` = 6n + 2 layers (8, 20, 32, 44, 56, 110).

    The network maps images [n, in_channels, H, W] of any size to logits [n, num_classes]. Shortcuts
    have no parameters (option A). Weights are drawn from torch's global generator. Raises
    UsageError for another depth.
    """
    if depth < 8 or (depth - 2) % 6:
        raise UsageError(f"a CIFAR ResNet has 6n + 2 layers (8, 20, 32, 44, 56, 110), not {depth}")
    return CifarResNet((depth - 2) // 6, num_classes, in_channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation, and the shortcut of option A.

    If the block has more output channels, the shortcut takes every `stride`-th pixel and pads the
    channels with zeros, half before and half after.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.padding = (out_channels - in_channels) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, in_channels, H, W] to [n, out_channels, ceil(H / stride), ceil(W / stride)]."""
        residual = functional.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.padding:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding))
        return functional.relu(residual + shortcut)


class CifarResNet(nn.Module):
    """A 3x3 convolution, three stages of `blocks` BasicBlocks each, mean over pixels, Linear."""

    def __init__(self, blocks: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.stages = nn.Sequential()
        channels = WIDTHS[0]
        for width in WIDTHS:
            stage = nn.Sequential()
            for _ in range(blocks):
                stage.append(BasicBlock(channels, width, stride=1 if channels == width else 2))
                channels = width
            self.stages.append(stage)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.kaiming_normal_(self.fc.weight, nonlinearity="linear")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [n, in_channels, H, W] to logits [n, num_classes]."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.stages(x).mean(dim=(2, 3))
        logits: Tensor = self.fc(x)
        return logits


class UNet(nn.Module):
    """`depth` levels down, a bottom, and back up: [n, in_channels, H, W] to [n, classes, H, W].

    Level i has `width` * 2^i channels at 1 / 2^i of the size. Each level is two 3x3 convolutions
    with batch norm and ReLU. On the way up, the output of the level of the same size on the way
    down is concatenated. The output is logits. With width 32 and depth 4 this is the network of the
    LGG reference, except for the way up.

    On the way up, a 1x1 convolution halves the channels and each pixel is repeated 2x2. The
    reference has a transposed convolution of size and stride 2 instead. Plain convolutions let
    K-FAC cover every weight except those of the norms, with factors of a quarter of the size, and
    they make no chessboard patterns. Pixels are repeated and not interpolated, because on a GPU the
    backward of bilinear interpolation adds up in another order each time, and a resumed run must be
    the same to the bit. The 3x3 convolutions that follow smooth the pixels.

    Weights are drawn after He et al. from torch's global generator. Raises UsageError for widths
    and depths below 1, and in `forward` for an H or W that is not a multiple of 2^depth.
    """

    def __init__(
        self, in_channels: int = 3, classes: int = 1, width: int = 32, depth: int = 4
    ) -> None:
        super().__init__()
        if min(in_channels, classes, width, depth) < 1:
            raise UsageError(
                "a U-Net needs channels, classes, a width and a depth of at least 1, not "
                f"{in_channels}, {classes}, {width} and {depth}"
            )
        widths = [width * 2**i for i in range(depth + 1)]
        self.depth = depth
        self.down = nn.ModuleList()
        for fan_in, fan_out in zip([in_channels, *widths], widths[:-1], strict=False):
            self.down.append(_level(fan_in, fan_out))
        self.bottom = _level(widths[-2], widths[-1])
        self.halve = nn.ModuleList(nn.Conv2d(2 * w, w, 1) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(_level(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits of the same height and width."""
        step = 2**self.depth
        if x.shape[2] % step or x.shape[3] % step:
            raise UsageError(
                f"a U-Net of depth {self.depth} halves an image {self.depth} times: its sides, "
                f"{x.shape[2]} x {x.shape[3]}, must be multiples of {step}; set data.image_size or "
                "model.depth"
            )
        beside = []
        for level in self.down:
            x = level(x)
            beside.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for halve, level in zip(self.halve, self.up, strict=True):
            x = functional.interpolate(halve(x), scale_factor=2, mode="nearest")
            x = level(torch.cat([beside.pop(), x], dim=1))
        logits: Tensor = self.head(x)
        return logits


def _level(fan_in: int, fan_out: int) -> nn.Sequential:
    level = nn.Sequential()
    for channels in (fan_in, fan_out):
        level.append(nn.Conv2d(channels, fan_out, 3, padding=1, bias=False))
        level.append(nn.BatchNorm2d(fan_out))
        level.append(nn.ReLU(inplace=True))
    return level
