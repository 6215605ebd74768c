"""Build the parts of a run from their options: data, task, model, optimizer and K-FAC.

Runs, dry runs, ``kfac-plan`` and ``kind: fit`` of benchmarks build their parts here alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from kfac_bench.config import DataConfig, KFACConfig, ModelConfig, OptimizerConfig, TrainConfig
from kfac_bench.config.groups import ParameterGroup
from kfac_bench.core import KFAC
from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.core.distributed.collective import Collective, PlansDifferError
from kfac_bench.core.kfac_options import OPTIONS, state_dtypes
from kfac_bench.core.schedule import Milestones
from kfac_bench.data.base.dataset import Data
from kfac_bench.errors import UsageError, shortage
from kfac_bench.tasks.task import Task
from kfac_bench.training.update import has_batch_norm


@dataclass(frozen=True)
class Builders:
    """The functions that build what a run trains: its dataset, its task and its model.

    :meth:`Builders.of` is the only place that derives them from the options.
    """

    data: Callable[[], Data]
    task: Callable[[Data], Task]
    model: Callable[[tuple[int, ...], int], nn.Module]
    """The network for the shape of one input and a number of classes."""
    shape: tuple[int, ...]
    """Shape of one input that a dry run assumes, because a dry run reads no data."""
    num_classes: int
    """Number of classes that a dry run assumes."""
    example_inputs: Callable[[int], Any]
    """Inputs of the model for so many examples of that shape, on torch's default device."""
    output: Callable[[nn.Module, Any], Any]
    """The output of the model for example inputs; see ``TaskConfig.output``."""
    try_out: Callable[[nn.Module, Data], None]
    """Tries one batch before a run begins; see ``TaskConfig.try_out``."""
    likelihood: str
    """Distribution that the output of the model stands for; see ``TaskConfig.likelihood``."""

    @classmethod
    def of(cls, config: TrainConfig) -> Builders:
        """Return the builders of a configuration."""
        task = config.task.name
        shape, num_classes = config.data.shape()
        return cls(
            data=partial(_build_data, config.data, task),
            task=config.task.build,
            model=partial(config.model.build, task=task),
            shape=shape,
            num_classes=num_classes,
            example_inputs=partial(config.data.example_inputs, task=task),
            output=config.task.output,
            try_out=config.task.try_out,
            likelihood=config.task.likelihood,
        )

    def assumed_model(self) -> nn.Module:
        """Return the network of a dry run."""
        model = self.model(self.shape, self.num_classes)
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
            # As in a run, lazy modules learn their shapes from a batch.
            model.eval()
            with torch.no_grad():
                self.output(model, self.example_inputs(2))
            model.train()
        return model


def _build_data(config: DataConfig, task: str) -> Data:
    """Build the dataset; raise :class:`UsageError` if a file or folder cannot be read."""
    try:
        data: Data = config.build(task)
    except OSError as error:
        if shortage(error):
            raise
        place = error.filename or config.root
        reason = error.strerror or error
        raise UsageError(f"data={config.name}: {place} cannot be read ({reason})") from None
    return data


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """Return the optimizer over all parameters that are trained.

    The ``initial_lr`` of its groups are the rates that a schedule scales.
    """
    optimizer = config.build(_parameter_groups(config.no_decay, model), model)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _parameter_groups(no_decay: Sequence[str], model: nn.Module) -> list[ParameterGroup]:
    """Return the trained parameters with weight decay, and those without."""
    groups: list[ParameterGroup] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    # Tied weights have two names, but belong to one group.
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                found = (re.search(p, s) for p in no_decay for s in (name, type(module).__name__))
                groups[any(found)]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def build_kfac(
    config: KFACConfig,
    model: nn.Module,
    optimizer: Optimizer,
    collective: Collective | None = None,
    steps_per_epoch: int | None = None,
) -> KFAC | None:
    """Return the preconditioner, or None if K-FAC is off.

    Args:
        config: The options of K-FAC.
        model: The model.
        optimizer: The optimizer.
        collective: The ranks; None: the default of KFAC.
        steps_per_epoch: Steps of an epoch; None: unknown, as in a dry run, which has no data. Then
            damping and intervals stay at their first values.

    Raises:
        UsageError: The options of K-FAC do not fit the model.
    """
    if not config.enabled:
        return None
    keywords = {name: value for name, value in asdict(config).items() if name in OPTIONS}
    keywords["state_dtype"] = state_dtypes()[config.state_dtype]
    if config.adaptive_damping:
        keywords["damping"] = _adaptive_damping(config)
    keywords |= _changing(config, steps_per_epoch)
    try:
        return KFAC(model, optimizer, collective=collective, **keywords)
    except (ValueError, PlansDifferError) as error:
        in_one_line = str(error).replace("\n ", ";")  # it may list the skipped modules
        raise UsageError(f"kfac: {in_one_line}") from None


def _changing(config: KFACConfig, steps_per_epoch: int | None) -> dict[str, Milestones]:
    """Return the options that change at given epochs, as functions of the step.

    The functions know nothing but the step, so a resumed run continues exactly.
    """

    def steps(epochs: Sequence[float]) -> tuple[int, ...]:
        return () if steps_per_epoch is None else tuple(round(e * steps_per_epoch) for e in epochs)

    changing: dict[str, Milestones] = {}
    if config.damping_decay_epochs and config.damping is not None:
        at = steps(config.damping_decay_epochs)
        changing["damping"] = Milestones(config.damping, config.damping_decay, at)
    if config.interval_growth_epochs:
        at = steps(config.interval_growth_epochs)
        for name in ("update_freq", "factor_update_freq"):
            changing[name] = Milestones(getattr(config, name), config.interval_growth, at)
    return changing


def _adaptive_damping(config: KFACConfig) -> LevenbergMarquardt:
    least, most = LevenbergMarquardt.least, LevenbergMarquardt.most
    if config.damping is None:
        return LevenbergMarquardt(interval=config.damping_freq)
    if not least <= config.damping <= most:
        raise UsageError(
            f"kfac.damping={config.damping:g}: an adaptive damping starts between {least:g} and "
            f"{most:g}"
        )
    return LevenbergMarquardt(initial=config.damping, interval=config.damping_freq)


FEW_IMAGES = 16
"""With fewer images at a time the statistics of batch norm are noisy (Wu and He, 2018)."""


def batch_norm_notes(model: nn.Module, examples: int) -> list[str]:
    """Return a line if batch norm gets few examples, or nothing.

    Args:
        model: The network.
        examples: Examples of a rank that go through the model at a time.
    """
    if examples >= FEW_IMAGES or not has_batch_norm(model):
        return []
    return [
        f"{examples} examples of a rank go through the model at a time. With fewer than "
        f"{FEW_IMAGES} the statistics of batch norm are noisy: set a larger trainer.batch_size or "
        "a smaller trainer.accumulate, or use fewer ranks."
    ]


def check_batch_norm(model: nn.Module, config: ModelConfig, examples: int) -> None:
    """Raise :class:`UsageError` if batch norm would get a single example, which has no variance.

    Args:
        model: The network.
        config: The options of the model, for the error message.
        examples: Examples that go through the model at a time: the batch of a rank, or the
            smallest part of that batch.
    """
    if examples == 1 and has_batch_norm(model):
        raise UsageError(
            f"model={config.name} has batch norm, which needs two examples per rank: set "
            "trainer.batch_size to at least twice the number of ranks times trainer.accumulate "
            "(and trainer.drop_last=true, if the last batch is too small)"
        )
