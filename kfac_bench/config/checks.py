"""Options out of range, and options that clash."""

from __future__ import annotations

import re

from kfac_bench.config.kfac import KFACConfig
from kfac_bench.config.optimizers import OptimizerConfig
from kfac_bench.config.options import check_option, options
from kfac_bench.config.train import DeepSpeedConfig, TrainConfig
from kfac_bench.errors import UsageError


def check(config: TrainConfig) -> None:
    """Raise :class:`UsageError` for the first option out of range, or options that clash."""
    if isinstance(config.backend, DeepSpeedConfig):
        _check_deepspeed(config.backend, config.optimizer)
    for name, value, meta in options(config):
        if value is not None:
            check_option(name, value, meta)
    kfac, task = config.kfac, config.task
    for pattern in kfac.skip:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"kfac.skip: {pattern!r} is not a regular expression: {error}"
            ) from None
    if kfac.enabled:
        _check_kfac(kfac)
    trainer = config.trainer
    if trainer.accumulate > trainer.batch_size:
        raise UsageError(
            f"trainer.accumulate={trainer.accumulate} is more than "
            f"trainer.batch_size={trainer.batch_size}: a part needs an example"
        )
    if (config.model.name == "autoencoder") != (task.name == "reconstruction"):
        raise UsageError(
            f"model={config.model.name} does not fit task={task.name}: "
            "task=reconstruction goes with model=autoencoder"
        )
    masks = (config.model.name == "unet", config.data.name == "lgg", task.name == "segmentation")
    if any(masks) and not all(masks):
        raise UsageError(
            f"model={config.model.name} does not fit data={config.data.name} and task={task.name}: "
            "model=unet, data=lgg and task=segmentation go together (model=unet sets all three)"
        )


def _check_deepspeed(backend: DeepSpeedConfig, optimizer: OptimizerConfig) -> None:
    if backend.zero_stage == 3:
        raise UsageError(
            "backend.zero_stage=3: ZeRO 3 keeps no whole weight on a rank, which K-FAC's layers "
            "need; use backend.zero_stage=2, or backend=fsdp2, which shards weights too"
        )
    if optimizer.name == "fused_lamb":
        raise UsageError(
            "optimizer=fused_lamb does not fit backend=deepspeed, which copies the optimizer; use "
            "backend=ddp or another optimizer"
        )


def _check_kfac(kfac: KFACConfig) -> None:
    if kfac.update_freq % kfac.factor_update_freq:
        raise UsageError(
            f"kfac.update_freq={kfac.update_freq} must be a multiple of "
            f"kfac.factor_update_freq={kfac.factor_update_freq}: a decomposition follows a factor "
            "update"
        )
    if kfac.factored_damping and kfac.method == "ekfac":
        raise UsageError(
            "kfac.factored_damping=true does not fit kfac.method=ekfac, whose eigenvalues are not "
            "products of A's and G's"
        )
