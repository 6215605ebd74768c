"""The models: the options of each, and how it is built from them.

This file imports no torch: ``kfac-train --help`` and the completion read it. The networks that
torchvision and transformers lack are in the other files of this folder.
:mod:`kfac_bench.models.library_options` has the options of models that libraries build by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config import problem_file
from kfac_bench.config.groups import ModelConfig
from kfac_bench.config.options import PLACE, RESULT, option
from kfac_bench.errors import MissingPackageError, UsageError
from kfac_bench.models.library_options import HuggingFaceConfig, TimmConfig, TorchvisionConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass
class AutoencoderConfig(ModelConfig):
    """A deep autoencoder of fully connected layers."""

    tasks: ClassVar[tuple[str, ...]] = ("reconstruction",)

    hidden: list[int] = option(
        [128, 64, 32, 12], "widths down to the code; mirrored on the way up", RESULT
    )
    activation: str = option(
        "tanh", "activation between layers", RESULT, choices=("tanh", "relu", "sigmoid")
    )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        from kfac_bench.models.image_networks import Autoencoder

        return Autoencoder(math.prod(shape), self.hidden, self.activation)


@dataclass
class BertConfig(ModelConfig):
    """BERT; its head comes from the task, its vocabulary from the dataset."""

    tasks: ClassVar[tuple[str, ...]] = ("pretraining", "question_answering")

    dropout: float = option(
        0.1, "dropout of hidden states and of attention", RESULT, at_least=0, below=1
    )
    hidden: int | None = option(
        None, "hidden size; null: the size that belongs to the name", RESULT, at_least=1
    )
    layers: int | None = option(
        None, "encoder layers; null: the number that belongs to the name", RESULT, at_least=1
    )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        try:
            from kfac_bench.models import bert
        except ImportError:
            raise MissingPackageError("transformers", f"model={self.name}") from None
        if shape[0] > bert.MAX_POSITIONS:
            raise UsageError(
                f"data.sequence_length={shape[0]}: model={self.name} has {bert.MAX_POSITIONS} "
                "positions; set a smaller data.sequence_length"
            )
        sizes = bert.config(self.name, num_classes, self.dropout, self.hidden, self.layers)
        if sizes.hidden_size % sizes.num_attention_heads:
            raise UsageError(
                f"model.hidden={sizes.hidden_size}: {sizes.num_attention_heads} heads of 64 units "
                f"cannot share it. Set a multiple of 64, such as {64 * sizes.num_attention_heads}"
            )
        heads = {
            "pretraining": bert.PretrainingBert,
            "question_answering": bert.QuestionAnsweringBert,
        }
        return heads[task](sizes)


@dataclass
class CifarResNetConfig(ModelConfig):
    """A small ResNet for CIFAR; the name gives the number of layers."""

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        from kfac_bench.models.image_networks import cifar_resnet

        return cifar_resnet(int(self.name.removeprefix("resnet")), num_classes, shape[0])


@dataclass
class LSTMConfig(ModelConfig):
    """An LSTM that gives each symbol of a text the logits of the next symbol."""

    tasks: ClassVar[tuple[str, ...]] = ("language_model",)

    embedding: int = option(64, "width of a symbol's embedding", RESULT, at_least=1)
    width: int = option(128, "units of a layer", RESULT, at_least=1)
    layers: int = option(1, "LSTM layers, one above the other", RESULT, at_least=1)

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        from kfac_bench.models.token_networks import LSTMLanguageModel

        return LSTMLanguageModel(num_classes, self.embedding, self.width, self.layers)


@dataclass
class TinyMaskRCNNConfig(ModelConfig):
    """A tiny Mask R-CNN, which learns drawn shapes in a minute."""

    tasks: ClassVar[tuple[str, ...]] = ("detection",)

    box_samples: int = option(
        512,
        "boxes of an image that the heads are trained on; at most a quarter of them hold objects",
        RESULT,
        at_least=4,
    )
    detections: int = option(100, "objects found in an image, at most", RESULT, at_least=1)

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        from kfac_bench.models.maskrcnn import maskrcnn_tiny

        return maskrcnn_tiny(
            num_classes,
            min_size=shape[1],
            max_size=shape[2],
            box_samples=self.box_samples,
            detections=self.detections,
        )


@dataclass
class MaskRCNNConfig(TinyMaskRCNNConfig):
    """torchvision's Mask R-CNN with a ResNet-50."""

    backbone_weights: str | None = option(
        None,
        "file with the weights of a ResNet-50 (.pth, .safetensors); null: random weights, with "
        "which the model hardly learns",
        RESULT,
    )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        from kfac_bench.models.maskrcnn import maskrcnn_resnet50_fpn

        return maskrcnn_resnet50_fpn(
            num_classes,
            min_size=shape[1],
            max_size=shape[2],
            backbone_weights=self.backbone_weights,
            box_samples=self.box_samples,
            detections=self.detections,
        )


@dataclass
class ProblemModelConfig(ModelConfig):
    """The model of a user's own problem; choose it with problem=FILE."""

    tasks: ClassVar[tuple[str, ...]] = ("problem",)

    file: str | None = option(None, "Python file of the problem; problem=FILE sets it", PLACE)
    arguments: str = option(
        "", "arguments of the file's function; problem.NAME=VALUE sets them", PLACE
    )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        import torch
        from torch import nn

        from kfac_bench import randomness

        file = problem_file.named(self.file, "model.file", self.arguments)
        with randomness.preserve_rng():
            # The caller has seeded torch; a model may also draw from NumPy and Python.
            randomness.seed_all(torch.initial_seed() & (2**63 - 1))
            model = file.call("the model cannot be built", file.problem.model)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{self.file}: the function `model` returned an object of class "
                f"{type(model).__name__}. Return an nn.Module"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(f"{self.file}: the model has no parameter to train")
        return model


@dataclass
class TorchvisionResNetConfig(ModelConfig):
    """torchvision's ResNet of this name, untrained, for images of any number of channels."""

    usual_data: ClassVar[str | None] = "imagefolder"

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        import torchvision
        from torch import nn

        model: nn.Module = torchvision.models.get_model(
            self.name, weights=None, num_classes=num_classes
        )
        if shape[0] != 3:
            # A first convolution of the same size and initialisation, for other channels.
            conv = nn.Conv2d(shape[0], 64, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            model.conv1 = conv
        return model


@dataclass
class TransformerConfig(ModelConfig):
    """A decoder-only transformer."""

    tasks: ClassVar[tuple[str, ...]] = ("language_model",)

    width: int = option(
        64, "width of the residual stream; a block is four times as wide inside", RESULT, at_least=1
    )
    layers: int = option(2, "blocks", RESULT, at_least=1)
    heads: int = option(4, "attention heads; their number divides the width", RESULT, at_least=1)

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        from kfac_bench.models.token_networks import Transformer

        return Transformer(num_classes, shape[0], self.width, self.layers, self.heads)


@dataclass
class UNetConfig(ModelConfig):
    """A U-Net, which gives each pixel a logit."""

    tasks: ClassVar[tuple[str, ...]] = ("segmentation", "denoising")

    width: int = option(
        32, "channels of the first level; each further level has twice as many", RESULT, at_least=1
    )
    depth: int = option(4, "times that the image is halved", RESULT, at_least=1, at_most=10)

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        from kfac_bench.models.image_networks import UNet

        return UNet(shape[0], num_classes, self.width, self.depth)


@dataclass
class ViTConfig(ModelConfig):
    """A small vision transformer."""

    tasks: ClassVar[tuple[str, ...]] = ("classification", "denoising")

    patch: int = option(
        4, "side of the square that becomes a token; divides the image's sides", RESULT, at_least=1
    )
    width: int = option(
        64, "width of the residual stream; a block is four times as wide inside", RESULT, at_least=1
    )
    layers: int = option(2, "blocks", RESULT, at_least=1)
    heads: int = option(4, "attention heads; their number divides the width", RESULT, at_least=1)

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        from kfac_bench.models.token_networks import VisionTransformer

        classes = num_classes if task == "classification" else None
        return VisionTransformer(shape, classes, self.patch, self.width, self.layers, self.heads)


CHOICES: Mapping[str, type[ModelConfig]] = {
    "autoencoder": AutoencoderConfig,
    "bert_base": BertConfig,
    "bert_large": BertConfig,
    "bert_tiny": BertConfig,
    "huggingface": HuggingFaceConfig,
    "lstm": LSTMConfig,
    "maskrcnn_resnet50_fpn": MaskRCNNConfig,
    "maskrcnn_tiny": TinyMaskRCNNConfig,
    "problem": ProblemModelConfig,
    "resnet8": CifarResNetConfig,
    "resnet18": TorchvisionResNetConfig,
    "resnet20": CifarResNetConfig,
    "resnet32": CifarResNetConfig,
    "resnet34": TorchvisionResNetConfig,
    "resnet44": CifarResNetConfig,
    "resnet50": TorchvisionResNetConfig,
    "resnet56": CifarResNetConfig,
    "resnet101": TorchvisionResNetConfig,
    "resnet110": CifarResNetConfig,
    "resnet152": TorchvisionResNetConfig,
    "timm": TimmConfig,
    "torchvision": TorchvisionConfig,
    "transformer": TransformerConfig,
    "unet": UNetConfig,
    "vit": ViTConfig,
}
