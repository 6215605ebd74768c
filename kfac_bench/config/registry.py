"""The table of all models, datasets, tasks, optimizers, schedules, backends and loggers.

A row maps a name of the command line (``model=unet``) to the import path of its options. To add a
model, for example, write one Python file, one YAML file and one row; CONTRIBUTING.md shows complete
files. The Python file is imported when its name is chosen. It imports torch only when it builds the
model.
"""

import importlib
from collections.abc import Mapping
from typing import Any

MODELS = {
    "autoencoder": "kfac_bench.models.autoencoder:AutoencoderConfig",
    "bert_base": "kfac_bench.models.bert:BertConfig",
    "bert_large": "kfac_bench.models.bert:BertConfig",
    "bert_tiny": "kfac_bench.models.bert:BertConfig",
    "lstm": "kfac_bench.models.lstm:LSTMConfig",
    "maskrcnn_resnet50_fpn": "kfac_bench.models.maskrcnn:MaskRCNNConfig",
    "maskrcnn_tiny": "kfac_bench.models.maskrcnn:TinyMaskRCNNConfig",
    "problem": "kfac_bench.models.problem:ProblemModelConfig",
    "resnet8": "kfac_bench.models.cifar_resnet:CifarResNetConfig",
    "resnet18": "kfac_bench.models.torchvision_resnet:TorchvisionResNetConfig",
    "resnet20": "kfac_bench.models.cifar_resnet:CifarResNetConfig",
    "resnet32": "kfac_bench.models.cifar_resnet:CifarResNetConfig",
    "resnet34": "kfac_bench.models.torchvision_resnet:TorchvisionResNetConfig",
    "resnet44": "kfac_bench.models.cifar_resnet:CifarResNetConfig",
    "resnet50": "kfac_bench.models.torchvision_resnet:TorchvisionResNetConfig",
    "resnet56": "kfac_bench.models.cifar_resnet:CifarResNetConfig",
    "resnet101": "kfac_bench.models.torchvision_resnet:TorchvisionResNetConfig",
    "resnet110": "kfac_bench.models.cifar_resnet:CifarResNetConfig",
    "resnet152": "kfac_bench.models.torchvision_resnet:TorchvisionResNetConfig",
    "transformer": "kfac_bench.models.transformer:TransformerConfig",
    "unet": "kfac_bench.models.unet:UNetConfig",
    "vit": "kfac_bench.models.vit:ViTConfig",
}

DATASETS = {
    "cifar10": "kfac_bench.data.cifar10:CIFAR10Config",
    "coco": "kfac_bench.data.coco:COCOConfig",
    "digits": "kfac_bench.data.digits:DigitsConfig",
    "fashion_mnist": "kfac_bench.data.fashion_mnist:FashionMNISTConfig",
    "imagefolder": "kfac_bench.data.imagefolder:ImageFolderConfig",
    "lgg": "kfac_bench.data.lgg:LGGConfig",
    "patches": "kfac_bench.data.patches:PatchesConfig",
    "pictures": "kfac_bench.data.pictures:PicturesConfig",
    "problem": "kfac_bench.data.problem:ProblemDataConfig",
    "pydoc": "kfac_bench.data.pydoc:PydocConfig",
    "shards": "kfac_bench.data.shards:ShardsConfig",
    "squad": "kfac_bench.data.squad:SquadConfig",
    "text": "kfac_bench.data.text:TextConfig",
}

TASKS = {
    "classification": "kfac_bench.tasks.classification:ClassificationConfig",
    "denoising": "kfac_bench.tasks.denoising:DenoisingConfig",
    "detection": "kfac_bench.tasks.detection:DetectionConfig",
    "language_model": "kfac_bench.tasks.language_model:LanguageModelConfig",
    "pretraining": "kfac_bench.tasks.pretraining:PretrainingConfig",
    "problem": "kfac_bench.tasks.problem:ProblemTaskConfig",
    "question_answering": "kfac_bench.tasks.question_answering:QuestionAnsweringConfig",
    "reconstruction": "kfac_bench.tasks.reconstruction:ReconstructionConfig",
    "segmentation": "kfac_bench.tasks.segmentation:SegmentationConfig",
}

OPTIMIZERS = {
    "adam": "kfac_bench.optimizers.adam:AdamConfig",
    "adamw": "kfac_bench.optimizers.adamw:AdamWConfig",
    "eigen_adam": "kfac_bench.optimizers.eigen_adam:EigenAdamConfig",
    "fused_lamb": "kfac_bench.optimizers.fused_lamb:FusedLAMBConfig",
    "lamb": "kfac_bench.optimizers.lamb:LAMBConfig",
    "lars": "kfac_bench.optimizers.lars:LARSConfig",
    "muon": "kfac_bench.optimizers.muon:MuonConfig",
    "sgd": "kfac_bench.optimizers.sgd:SGDConfig",
    "shampoo": "kfac_bench.optimizers.shampoo:ShampooConfig",
    "soap": "kfac_bench.optimizers.soap:SOAPConfig",
}

SCHEDULES = {
    "constant": "kfac_bench.schedules.constant:ConstantConfig",
    "cosine": "kfac_bench.schedules.cosine:CosineConfig",
    "polynomial": "kfac_bench.schedules.polynomial:PolynomialConfig",
    "step": "kfac_bench.schedules.step:StepConfig",
}

BACKENDS = {
    "ddp": "kfac_bench.distributed.ddp:DDPConfig",
    "deepspeed": "kfac_bench.distributed.deepspeed:DeepSpeedConfig",
    "fsdp2": "kfac_bench.distributed.fsdp2:FSDP2Config",
    "horovod": "kfac_bench.distributed.horovod:HorovodConfig",
}

LOGGERS = {
    "csv": "kfac_bench.record.sinks.csv:CsvSink",
    "tensorboard": "kfac_bench.record.sinks.tensorboard:TensorboardSink",
    "wandb": "kfac_bench.record.sinks.wandb:WandbSink",
}
"""The views of a run by the names of ``logger=[wandb,csv]``. Each has an option of its name."""

TABLES: Mapping[str, Mapping[str, str]] = {
    "model": MODELS,
    "data": DATASETS,
    "task": TASKS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "backend": BACKENDS,
}
"""The table of each group, by the group's name on the command line."""


def options_class(group: str, name: str) -> type[Any]:
    """Import and return the class of the options of one row."""
    return _imported(TABLES[group][name])


def logger_class(name: str) -> type[Any]:
    """Import and return the sink of a logger, which is made from a ``ShownRun``."""
    return _imported(LOGGERS[name])


def _imported(row: str) -> type[Any]:
    module, _, class_name = row.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), class_name)
    return found
