"""The U-Net of Ronneberger et al. 2015, with batch norm, made of plain convolutions only."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.errors import UsageError


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
