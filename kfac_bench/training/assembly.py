"""All parts of a run, built and joined to a :class:`Trainer`. All ranks do this together."""

import torch
from torch import nn

from kfac_bench.config import TrainConfig
from kfac_bench.data.base.dataset import Data
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from kfac_bench.record.event_log import EventLog
from kfac_bench.training import build, weights
from kfac_bench.training.blueprint import Blueprint
from kfac_bench.training.course import Course
from kfac_bench.training.run_directory import RunDirectory
from kfac_bench.training.trainer import Trainer
from kfac_bench.training.update import least_part


def build_trainer(
    config: TrainConfig,
    backend: Backend,
    directory: RunDirectory,
    blueprint: Blueprint | None = None,
) -> Trainer:
    """Return the trainer of a run, which writes no events yet.

    Args:
        config: The configuration of the run.
        backend: The backend that connects the ranks.
        directory: The directory of the run.
        blueprint: The builders of model, data and task; None: as the configuration says.

    Raises:
        UsageError: A part cannot be built, or ranks read other data.
    """
    blueprint = blueprint or Blueprint.of(config)
    ranks = backend.ranks
    data, model, notes = ranks.together(lambda: _data_and_model(config, blueprint, ranks))
    about = f"{data.train_size} {data.eval_size} {data.shape} {data.num_classes}"
    if others := ranks.unlike_main(about):
        raise UsageError(
            f"ranks {others} read other data than rank 0. Copy the same dataset to every node"
        )
    model = backend.shard(model)
    optimizer = build.build_optimizer(config.optimizer, model)
    steps = Course.of(config.trainer, data.train_size).steps_per_epoch
    kfac = build.build_kfac(config.kfac, model, optimizer, backend.collective(), steps)
    model, optimizer = backend.wrap(model, optimizer)
    return Trainer(
        blueprint.task(data),
        data,
        model,
        optimizer,
        kfac,
        config.trainer,
        config.schedule,
        config.seed,
        backend,
        EventLog([]),
        directory.path,
        notes,
        timeout_s=config.backend.timeout_s,
    )


def _data_and_model(
    config: TrainConfig, blueprint: Blueprint, ranks: Ranks
) -> tuple[Data, nn.Module, list[str]]:
    data = blueprint.data()
    torch.manual_seed(config.seed)
    model = blueprint.model(data.shape, data.num_classes)
    notes = weights.load(model, config.model)
    model = model.to(ranks.device)
    if config.trainer.channels_last:
        model.to(memory_format=torch.channels_last)
    blueprint.try_out(model, data)
    least = least_part(data.train_size, config.trainer, ranks.world_size)
    build.check_batch_norm(model, config.model, least)
    usual = config.trainer.batch_size // ranks.world_size // config.trainer.accumulate
    notes += build.batch_norm_notes(model, usual)
    return data, model, notes
