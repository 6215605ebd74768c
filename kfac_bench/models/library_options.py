"""The models that libraries build by name: the options of torchvision, timm and transformers.

This file imports no torch, as :mod:`kfac_bench.models.options`, which has the table of all models.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kfac_bench.config.groups import TABLES, ModelConfig
from kfac_bench.config.options import RESULT, option
from kfac_bench.errors import MissingPackageError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from kfac_bench.config.train import TrainConfig


@dataclass
class ArchitectureConfig(ModelConfig):
    """An image classifier of a library, by its name there; weights start at random."""

    usual_data: ClassVar[str | None] = "imagefolder"

    architecture: str | None = option(
        None, "name of the architecture; for an unknown name, the nearest names are listed", RESULT
    )
    image_size: int | None = option(
        None,
        "side in pixels to which the model resizes images; null: it takes them as they are",
        RESULT,
        at_least=1,
    )

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if not self.architecture:
            raise UsageError(
                f"model={self.name} needs the name of an architecture: set "
                "model.architecture=NAME, such as model.architecture=mobilenet_v2"
            )

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        from kfac_bench.models import classifiers

        return classifiers.build(self, shape, num_classes)


@dataclass
class HuggingFaceConfig(ModelConfig):
    """A language network of transformers, from a local folder with config.json.

    Its vocabulary or its classes come from the dataset. If the folder has weights, it starts from
    them; nothing is downloaded.
    """

    tasks: ClassVar[tuple[str, ...]] = ("language_model", "pretraining", "classification")

    path: str | None = option(
        None, "folder with config.json, and model.safetensors to start from its weights", RESULT
    )
    head: str = option(
        "auto",
        "kind of network; auto: the kind that architectures in config.json names",
        RESULT,
        choices=("auto", "causal", "masked", "classifier"),
    )

    @classmethod
    def option_for(cls, name: str) -> str:
        """Return the option for a name on the hub, such as bert-base-uncased, or nothing."""
        if difflib.get_close_matches(name, TABLES["model"], cutoff=0.8):
            return ""  # more likely a typing error, such as bert_tin
        try:
            from transformers.models.auto import modeling_auto as kinds
        except ImportError:
            return ""
        names = (
            *kinds.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            *kinds.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        )
        if not name.lower().replace("-", "_").startswith(tuple(n.replace("-", "_") for n in names)):
            return ""
        return "model.path=FOLDER, with the folder that save_pretrained of transformers wrote"

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if not self.path:
            raise UsageError("model=huggingface reads config.json: set model.path=FOLDER")

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        try:
            from kfac_bench.models import huggingface
        except ImportError:
            raise MissingPackageError("transformers", "model=huggingface") from None
        return huggingface.build(Path(str(self.path)), self.head, shape, num_classes, task)


@dataclass
class TimmConfig(ArchitectureConfig):
    """An image classifier of timm."""

    @classmethod
    def architectures(cls) -> Sequence[str]:
        try:
            import timm
        except ImportError:
            return ()
        names: list[str] = timm.list_models()
        return names

    def build(self, shape: tuple[int, ...], num_classes: int, task: str) -> nn.Module:
        if not self.architectures():
            raise MissingPackageError("timm", "model=timm")
        return super().build(shape, num_classes, task)


@dataclass
class TorchvisionConfig(ArchitectureConfig):
    """An image classifier of torchvision."""

    @classmethod
    def architectures(cls) -> Sequence[str]:
        import torchvision

        # Detectors and other networks are in modules below this one.
        names: list[str] = torchvision.models.list_models(module=torchvision.models)
        return names
