"""Every option of a training run, with its type, its range and its meaning: the schema of conf/.

Values live in YAML, names and types in dataclasses. The options of a model, a dataset and so on
are in the file of this model or dataset, which :mod:`kfac_bench.config.registry` names.
``kfac-train --help`` prints the help texts. After :func:`kfac_bench.config.compose.load` there is
no DictConfig.
"""

from kfac_bench.config.backends import BackendConfig
from kfac_bench.config.checks import check
from kfac_bench.config.data import DataConfig
from kfac_bench.config.kfac import (
    KFACConfig,
)
from kfac_bench.config.models import ModelConfig
from kfac_bench.config.optimizers import OptimizerConfig
from kfac_bench.config.options import PLACE, RECORD, RESULT, option, options
from kfac_bench.config.schedules import ScheduleConfig
from kfac_bench.config.tasks import TaskConfig
from kfac_bench.config.train import PRECISIONS, LoggerConfig, TrainConfig, TrainerConfig

__all__ = [
    "PLACE",
    "PRECISIONS",
    "RECORD",
    "RESULT",
    "BackendConfig",
    "DataConfig",
    "KFACConfig",
    "LoggerConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "TaskConfig",
    "TrainConfig",
    "TrainerConfig",
    "check",
    "option",
    "options",
]
