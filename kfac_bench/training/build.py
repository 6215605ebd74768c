"""From the configuration to the objects it names."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kfac_bench.config import (
    CIFAR_RESNETS,
    AutoencoderConfig,
    BertConfig,
    COCOConfig,
    DataConfig,
    DetectionConfig,
    DetectorConfig,
    KFACConfig,
    LGGConfig,
    MaskRCNNConfig,
    ModelConfig,
    PicturesConfig,
    PydocConfig,
    QuestionAnsweringConfig,
    SegmentationConfig,
    SquadConfig,
    TaskConfig,
    TextConfig,
    TrainConfig,
    TransformerConfig,
    UNetConfig,
)
from kfac_bench.core import KFAC
from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.core.distributed.collective import Collective, PlansDifferError
from kfac_bench.data.base.dataset import UNKNOWN, Data, Pictured
from kfac_bench.data.demo import demo_folder
from kfac_bench.data.images import cifar10, digits, lgg, pictures
from kfac_bench.data.text import masked_text, pydoc, squad_windows
from kfac_bench.errors import UsageError
from kfac_bench.models.autoencoder import Autoencoder
from kfac_bench.models.cifar_resnet import cifar_resnet
from kfac_bench.models.torchvision_resnet import torchvision_resnet
from kfac_bench.models.transformer import Transformer
from kfac_bench.models.unet import UNet
from kfac_bench.tasks.classification import Classification
from kfac_bench.tasks.denoising import Denoising
from kfac_bench.tasks.language_model import LanguageModel
from kfac_bench.tasks.pretraining import Pretraining
from kfac_bench.tasks.question_answering import QuestionAnswering
from kfac_bench.tasks.reconstruction import Reconstruction
from kfac_bench.tasks.segmentation import Segmentation
from kfac_bench.tasks.task import Task
from kfac_bench.training.update import has_batch_norm


def build_data(config: DataConfig, task: TaskConfig) -> Data:
    """The data set; raises :class:`UsageError` naming a missing folder and its layout."""
    if config.name == "digits":
        return digits.load(config.image_size, normalize=task.name == "classification")
    if isinstance(config, PydocConfig):
        return pydoc.load(config.sequence_length)
    if isinstance(config, PicturesConfig):
        return pictures.load(config.image_size, config.noise)
    if config.root is None:
        raise UsageError(
            f"data={config.name} is read from disk: set data.root=FOLDER (data.root=demo: a demo)"
        )
    root = demo_folder.folder(config.name) if config.root == "demo" else Path(config.root)
    if config.name == "cifar10":
        return cifar10.load(root, augment=config.augment)
    if isinstance(config, LGGConfig):
        return lgg.load(
            root,
            config.image_size,
            config.workers,
            augment=config.augment,
            eval_share=config.eval_share,
            on_error=config.on_error,
        )
    if isinstance(config, COCOConfig):
        from kfac_bench.data.coco import coco_dataset

        return coco_dataset.load(
            root,
            config.image_size,
            config.max_size,
            config.workers,
            min_sizes=config.min_sizes,
            augment=config.augment,
            on_error=config.on_error,
            year=config.year,
        )
    if isinstance(config, TextConfig):
        return masked_text.load(
            root,
            config.sequence_length,
            config.workers,
            masked=config.masked,
            max_predictions=config.max_predictions,
        )
    if isinstance(config, SquadConfig):
        vocabulary = config.vocabulary_file
        return squad_windows.load(
            root,
            config.sequence_length,
            config.workers,
            vocabulary_file=None if vocabulary is None else Path(vocabulary),
            stride=config.stride,
            question_length=config.question_length,
            on_error=config.on_error,
        )
    from kfac_bench.data.images import (  # torchvision, which the others do without
        imagefolder,
        tar_shards,
    )

    if config.name == "shards":
        return tar_shards.load(root, config.image_size, config.workers, config.on_error)
    return imagefolder.load(root, config.image_size, config.workers, config.on_error)


def build_task(config: TaskConfig, data: Data) -> Task:
    """The task by name; its figures may depend on how the evaluation set is made up."""
    looks = data.looks if isinstance(data, Pictured) else UNKNOWN
    if config.name == "reconstruction":
        return Reconstruction(looks)
    if config.name == "denoising":
        return Denoising(math.prod(data.shape), looks)
    if config.name == "language_model":
        return LanguageModel()
    if isinstance(config, SegmentationConfig):
        assert isinstance(data, lgg.LGG)  # or config.check would have refused
        return Segmentation(data.eval_volumes, config.smooth, config.bce)
    if isinstance(config, DetectionConfig):
        from kfac_bench.data.coco.coco_dataset import COCO
        from kfac_bench.tasks.detection import Detection

        assert isinstance(data, COCO)
        return Detection(data.truth, data.num_classes, config.bbox_goal, config.segm_goal, looks)
    if config.name == "pretraining":
        assert isinstance(data, masked_text.Text)
        return Pretraining(data.tokens)
    if isinstance(config, QuestionAnsweringConfig):
        assert isinstance(data, squad_windows.Squad)
        return QuestionAnswering(data.eval_questions, config.max_answer_tokens)
    return Classification(config.label_smoothing, looks)


def build_model(
    config: ModelConfig,
    shape: tuple[int, ...],
    num_classes: int,
    task: str = "classification",
) -> nn.Module:
    """The network for the data's ``shape`` and ``num_classes``; works on the meta device.

    ``task`` is the task's name: BERT has another head for each.
    """
    if isinstance(config, BertConfig):
        return _build_bert(config, shape[0], num_classes, task)
    if isinstance(config, AutoencoderConfig):
        inputs = shape[0] * shape[1] * shape[2]
        return Autoencoder(inputs, config.hidden, config.activation)
    if isinstance(config, UNetConfig):
        return UNet(shape[0], num_classes, config.width, config.depth)
    if isinstance(config, TransformerConfig):
        return Transformer(num_classes, shape[0], config.width, config.layers, config.heads)
    if isinstance(config, DetectorConfig):
        return _build_detector(config, shape, num_classes)
    if config.name in CIFAR_RESNETS:
        return cifar_resnet(int(config.name.removeprefix("resnet")), num_classes, shape[0])
    return torchvision_resnet(config.name, num_classes, shape[0])


def _build_detector(config: DetectorConfig, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    from kfac_bench.models.maskrcnn import maskrcnn_resnet50_fpn, maskrcnn_tiny  # slow to import

    samples, detections = config.box_samples, config.detections
    if isinstance(config, MaskRCNNConfig):
        return maskrcnn_resnet50_fpn(
            num_classes,
            *shape[1:],
            backbone_weights=config.backbone_weights,
            box_samples=samples,
            detections=detections,
        )
    return maskrcnn_tiny(num_classes, *shape[1:], box_samples=samples, detections=detections)


def _build_bert(config: BertConfig, length: int, vocabulary_size: int, task: str) -> nn.Module:
    try:
        from kfac_bench.models import bert  # transformers, which the others do without
    except ImportError:
        raise UsageError(
            f"model={config.name} needs transformers: pip install 'kfac-bench[language]'"
        ) from None
    if length > bert.MAX_POSITIONS:
        raise UsageError(
            f"data.sequence_length={length}: model={config.name} knows {bert.MAX_POSITIONS} "
            "positions"
        )
    own = bert.config(config.name, vocabulary_size, config.dropout, config.hidden, config.layers)
    return (bert.PretrainingBert if task == "pretraining" else bert.QuestionAnsweringBert)(own)


def example_inputs(config: TrainConfig, shape: tuple[int, ...], n: int) -> Any:
    """What the model takes, ``n`` examples of the data's ``shape``, on the default device."""
    if isinstance(config.model, TransformerConfig):
        return torch.zeros(n, *shape, dtype=torch.int64)
    if not isinstance(config.model, BertConfig):
        return torch.empty(n, *shape)
    from kfac_bench.models import bert

    predictions = config.data.max_predictions if isinstance(config.data, TextConfig) else None
    return bert.example_inputs(n, shape[0], predictions)


def check_batch_norm(model: nn.Module, config: ModelConfig, examples: int) -> None:
    """Raise :class:`UsageError` where batch norm would get one example, which has no variance.

    ``examples`` go through the model at a time: a rank's batch, or the least part of one.
    """
    if examples == 1 and has_batch_norm(model):
        raise UsageError(
            f"model={config.name} has batch norm, which needs two examples per rank: set "
            "trainer.batch_size to at least twice the number of ranks times trainer.accumulate "
            "(and trainer.drop_last=true, if it is the last batch that is too small)"
        )


def build_kfac(
    config: KFACConfig,
    model: nn.Module,
    optimizer: Optimizer,
    collective: Collective | None = None,
) -> KFAC | None:
    """The preconditioner; raises :class:`UsageError` where its options do not fit the model."""
    if not config.enabled:
        return None
    keywords = {k: v for k, v in asdict(config).items() if k not in _NO_KEYWORDS}
    keywords["state_dtype"] = DTYPES[config.state_dtype]
    if config.adaptive_damping:
        keywords["damping"] = _adaptive_damping(config)
    try:
        return KFAC(model, optimizer, collective=collective, **keywords)
    except (ValueError, PlansDifferError) as error:
        raise UsageError(f"kfac: {error}") from None


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the names that the configuration uses."""

_NO_KEYWORDS = ("enabled", "adaptive_damping", "damping_freq")
"""Options that KFAC does not take under their own names."""


def _adaptive_damping(config: KFACConfig) -> LevenbergMarquardt:
    least, most = LevenbergMarquardt.least, LevenbergMarquardt.most
    if not least <= config.damping <= most:
        raise UsageError(
            f"kfac.damping={config.damping:g}: an adaptive damping starts between {least:g} and "
            f"{most:g}"
        )
    return LevenbergMarquardt(initial=config.damping, interval=config.damping_freq)
