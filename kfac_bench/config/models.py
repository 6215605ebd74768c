"""The networks."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from kfac_bench.config.options import RESULT, option

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
CIFAR_RESNETS = ("resnet8", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110")
DETECTORS = ("maskrcnn_resnet50_fpn", "maskrcnn_tiny")
BERTS = ("bert_tiny", "bert_base", "bert_large")
MODELS = (*RESNETS, *CIFAR_RESNETS, "autoencoder", "unet", "transformer", *DETECTORS, *BERTS)


@dataclass
class ModelConfig:
    """The network; its input channels and classes come from the data."""

    name: str = option(MISSING, "architecture", RESULT, choices=MODELS)
    weights: str | None = option(
        None,
        "weights to start from: a run of ours, a .safetensors file, or a folder with "
        "model.safetensors; the optimizer starts anew",
        RESULT,
    )


@dataclass
class AutoencoderConfig(ModelConfig):
    """A deep autoencoder of fully connected layers."""

    hidden: list[int] = option(
        [128, 64, 32, 12], "widths down to the code; mirrored on the way up", RESULT
    )
    activation: str = option("tanh", "between layers", RESULT, choices=("tanh", "relu", "sigmoid"))


@dataclass
class UNetConfig(ModelConfig):
    """A U-Net, which gives each pixel a logit."""

    width: int = option(
        32, "channels of the first level; twice as many at each further", RESULT, at_least=1
    )
    depth: int = option(4, "times that the image is halved", RESULT, at_least=1, at_most=10)


@dataclass
class TransformerConfig(ModelConfig):
    """A decoder-only transformer."""

    width: int = option(
        64, "of the residual stream; four times as many within a block", RESULT, at_least=1
    )
    layers: int = option(2, "blocks", RESULT, at_least=1)
    heads: int = option(4, "of attention; they divide the width", RESULT, at_least=1)


@dataclass
class DetectorConfig(ModelConfig):
    """A Mask R-CNN."""

    box_samples: int = option(
        512,
        "boxes of an image that the heads are trained on, at most a quarter of things",
        RESULT,
        at_least=4,
    )
    detections: int = option(100, "things found in an image, at most", RESULT, at_least=1)


@dataclass
class MaskRCNNConfig(DetectorConfig):
    """torchvision's, with a ResNet."""

    backbone_weights: str | None = option(
        None,
        "file of a ResNet-50's weights (.pth, .safetensors); null: random ones, of which it does "
        "not learn much",
        RESULT,
    )


@dataclass
class BertConfig(ModelConfig):
    """BERT of a size; its head comes from the task, its vocabulary from the data."""

    dropout: float = option(0.1, "of hidden states and attention", RESULT, at_least=0, below=1)
    hidden: int | None = option(None, "hidden size; null: that of the size", RESULT, at_least=1)
    layers: int | None = option(None, "encoder layers; null: those of the size", RESULT, at_least=1)
