"""Every option of a training run, typed, with its range and its meaning: the schema of conf/.

Values live in YAML, names and types here; ``kfac-train --help`` prints the fields' help texts.
Nothing past :func:`kfac_bench.config.compose.load` sees a DictConfig.
"""

from kfac_bench.config.checks import check
from kfac_bench.config.data import (
    COCOConfig,
    DataConfig,
    LGGConfig,
    PicturesConfig,
    PydocConfig,
    SquadConfig,
    TextConfig,
)
from kfac_bench.config.kfac import CONVENTIONS, FISHERS, WEIGHT_SHARING, KFACConfig
from kfac_bench.config.models import (
    BERTS,
    CIFAR_RESNETS,
    DETECTORS,
    MODELS,
    RESNETS,
    AutoencoderConfig,
    BertConfig,
    DetectorConfig,
    MaskRCNNConfig,
    ModelConfig,
    TransformerConfig,
    UNetConfig,
)
from kfac_bench.config.optimizers import (
    OF_WHOLE_WEIGHTS,
    OPTIMIZERS,
    AdamConfig,
    LAMBConfig,
    LARSConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    ShampooConfig,
    SOAPConfig,
)
from kfac_bench.config.options import options
from kfac_bench.config.schedules import (
    DecayScheduleConfig,
    ScheduleConfig,
    StepScheduleConfig,
)
from kfac_bench.config.tasks import (
    DetectionConfig,
    QuestionAnsweringConfig,
    SegmentationConfig,
    TaskConfig,
)
from kfac_bench.config.train import (
    BACKENDS,
    PRECISIONS,
    VARIANTS,
    BackendConfig,
    DeepSpeedConfig,
    LoggerConfig,
    TrainConfig,
    TrainerConfig,
)

__all__ = [
    "BACKENDS",
    "BERTS",
    "CIFAR_RESNETS",
    "CONVENTIONS",
    "DETECTORS",
    "FISHERS",
    "MODELS",
    "OF_WHOLE_WEIGHTS",
    "OPTIMIZERS",
    "PRECISIONS",
    "RESNETS",
    "VARIANTS",
    "WEIGHT_SHARING",
    "AdamConfig",
    "AutoencoderConfig",
    "BackendConfig",
    "BertConfig",
    "COCOConfig",
    "DataConfig",
    "DecayScheduleConfig",
    "DeepSpeedConfig",
    "DetectionConfig",
    "DetectorConfig",
    "KFACConfig",
    "LAMBConfig",
    "LARSConfig",
    "LGGConfig",
    "LoggerConfig",
    "MaskRCNNConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "PicturesConfig",
    "PydocConfig",
    "QuestionAnsweringConfig",
    "SGDConfig",
    "SOAPConfig",
    "ScheduleConfig",
    "SegmentationConfig",
    "ShampooConfig",
    "SquadConfig",
    "StepScheduleConfig",
    "TaskConfig",
    "TextConfig",
    "TrainConfig",
    "TrainerConfig",
    "TransformerConfig",
    "UNetConfig",
    "check",
    "options",
]
