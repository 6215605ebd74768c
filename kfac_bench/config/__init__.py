"""Every option of a training run, with its type, its range and its meaning: the schema of conf/.

Values live in YAML, names and types in dataclasses. The options of a model, a dataset and so on
are in the file of this model or dataset, which :mod:`kfac_bench.config.groups` names.
``kfac-train --help`` prints the help texts. After :func:`kfac_bench.config.compose.load` there is
no DictConfig.
"""

from kfac_bench.config.groups import (
    BackendConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from kfac_bench.config.kfac import KFACConfig
from kfac_bench.config.options import options
from kfac_bench.config.train import PRECISIONS, LoggerConfig, TrainConfig, TrainerConfig, check

__all__ = [
    "PRECISIONS",
    "BackendConfig",
    "DataConfig",
    "KFACConfig",
    "LoggerConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "TrainConfig",
    "TrainerConfig",
    "check",
    "options",
]
