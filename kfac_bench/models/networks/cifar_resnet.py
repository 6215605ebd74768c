"""The small ResNets for CIFAR of He et al. 2016, section 4.2."""

from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.errors import UsageError

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
