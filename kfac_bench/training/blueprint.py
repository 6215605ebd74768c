"""What a run trains: the functions that build its dataset, its task and its model.

Runs, dry runs, ``kfac-plan`` and ``kind: fit`` of benchmarks build these three through a
:class:`Blueprint` alone. :meth:`Blueprint.of` is the only place that derives one from the options;
a blueprint from elsewhere goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from kfac_bench.config import DataConfig, TrainConfig
from kfac_bench.data.base.dataset import Data
from kfac_bench.errors import UsageError, shortage
from kfac_bench.tasks.task import Task


@dataclass(frozen=True)
class Blueprint:
    """The functions that build what a run trains."""

    data: Callable[[], Data]
    task: Callable[[Data], Task]
    model: Callable[[tuple[int, ...], int], nn.Module]
    """The network for the shape of one input and a number of classes."""
    shape: tuple[int, ...]
    """Shape of one input that a dry run assumes, because a dry run reads no data."""
    num_classes: int
    """Number of classes that a dry run assumes."""
    example_inputs: Callable[[int], Any]
    """What the model takes for so many examples of that shape, on torch's default device."""
    output: Callable[[nn.Module, Any], Any]
    """The output of the model for example inputs; see ``TaskConfig.output``."""
    try_out: Callable[[nn.Module, Data], None]
    """Tries one batch before a run begins; see ``TaskConfig.try_out``."""
    likelihood: str
    """Distribution that the output of the model stands for; see ``TaskConfig.likelihood``."""

    @classmethod
    def of(cls, config: TrainConfig) -> Blueprint:
        """Return the blueprint of a configuration."""
        task = config.task.name
        shape, num_classes = config.data.shape()
        return cls(
            data=partial(_build_data, config.data, task),
            task=config.task.build,
            model=partial(config.model.build, task=task),
            shape=shape,
            num_classes=num_classes,
            example_inputs=config.data.example_inputs,
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
