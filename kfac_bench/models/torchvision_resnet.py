"""torchvision's ResNets, for images of any number of channels."""

from torch import nn

from kfac_bench.errors import UsageError

NAMES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


def torchvision_resnet(name: str, num_classes: int, in_channels: int) -> nn.Module:
    """Return torchvision's untrained ResNet `name`: [n, in_channels, H, W] to [n, num_classes].

    For other than 3 channels the first convolution is replaced by one of the same shape and
    initialisation. Raises UsageError for an unknown name.
    """
    if name not in NAMES:
        raise UsageError(f"unknown ResNet {name!r}: choose one of {', '.join(NAMES)}")
    import torchvision  # takes a second: not for those who use another model

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    if in_channels != 3:
        conv = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        model.conv1 = conv
    return model
