"""What would be trained and what it costs on each of many ranks, from shapes alone.

The model lives on the meta device: nothing is allocated, no data is read, no rank is started.
:mod:`kfac_bench.simulate.plan_report` prints it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.flop_counter import FlopCounterMode

from kfac_bench.config import TrainConfig
from kfac_bench.core.coverage_report import Report
from kfac_bench.core.distributed.collective import SingleProcess
from kfac_bench.core.layers.base import Call, Layer
from kfac_bench.core.planning.estimate import RankCost, flops, rank_costs
from kfac_bench.core.planning.ops import Op
from kfac_bench.errors import UsageError
from kfac_bench.training import build


@dataclass(frozen=True)
class DryRun:
    """One configuration on ``world_size`` ranks; FLOPs are those of one rank."""

    config: TrainConfig
    world_size: int
    shape: tuple[int, ...]
    parameters: int
    forward_flops: float
    step_flops: float
    """Of forward and backward, without K-FAC."""
    fisher_flops: float
    """Of what ``kfac.fisher`` sends back beside the loss' own gradient, where factors are due."""
    report: Report | None
    """None: K-FAC is off."""
    ranks: Sequence[RankCost]
    tensors: int
    """That the parameters are."""
    rows: Mapping[str, int]
    """By covered layer: examples times shared positions of one rank, of which factors are made."""

    @property
    def examples(self) -> int:
        """Of a batch, on the rank that has most."""
        return -(-self.config.trainer.batch_size // self.world_size)


class _Imagined(SingleProcess):
    """A rank of a world that is not there."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


def trace(config: TrainConfig, world_size: int = 1) -> DryRun:
    """Build the model and its plan, take one step; raises :class:`UsageError` as the run would."""
    shape, classes = config.data.shape()
    batch, parts = config.trainer.batch_size, config.trainer.accumulate
    if batch < world_size:
        raise UsageError(
            f"trainer.batch_size={batch} leaves some of world_size={world_size} ranks without an "
            "example: it is the batch of all ranks"
        )
    least, examples = batch // world_size, -(-batch // world_size)
    if parts > least:
        raise UsageError(
            f"trainer.accumulate={parts} is more than the {least} examples of a rank: "
            f"trainer.batch_size={batch} over {world_size} ranks"
        )
    with torch.device("meta"):
        model = config.model.build(shape, classes, config.task.name)
        inputs = config.data.example_inputs(examples)
    build.check_batch_norm(model, config.model, least // parts)
    optimizer = build.build_optimizer(config.optimizer, model)
    kfac = build.build_kfac(config.kfac, model, optimizer, _Imagined(world_size))
    report = None
    if kfac is not None:
        kfac.detach()  # or what its hooks compute would count as forward and backward
        report = kfac.report()
    step = _step(model, inputs, [] if report is None else report.layers)
    seeds = _seeds(config, step.outputs)

    reduced = step.samples if config.kfac.weight_sharing == "reduce" else None

    def work(op: Op) -> float:
        assert report is not None
        return flops(op, report.plan.method, step.rows, reduced=reduced, seeds=max(1, seeds))

    return DryRun(
        config,
        world_size,
        shape,
        sum(p.numel() for p in model.parameters()),
        step.forward,
        step.forward + step.backward,
        seeds * step.to_layers,
        report,
        [] if report is None else rank_costs(report.plan, work),
        sum(1 for _ in model.parameters()),
        step.rows if reduced is None else reduced,
    )


def _seeds(config: TrainConfig, outputs: torch.Size) -> int:
    """Gradients that ``kfac.fisher`` sends back from the output beside the loss' own."""
    if config.kfac.fisher == "type2":
        one = outputs[-1:] if config.task.likelihood == "categorical" else outputs[1:]
        return one.numel()
    return 1 if config.kfac.fisher == "mc" else 0


@dataclass
class _Step:
    """FLOPs of one step without K-FAC; and by layer what K-FAC's own cost follows from."""

    forward: float
    backward: float
    to_layers: float
    """Of sending a gradient of the output back to the covered layers, and no further."""
    outputs: torch.Size
    samples: Mapping[str, int]
    rows: Mapping[str, int]
    """Samples times shared positions."""


def _step(model: nn.Module, inputs: Any, layers: Sequence[Layer]) -> _Step:
    """One training step, and what the covered layers meet in it."""
    samples: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    edges: list[GradientEdge] = []

    def on_forward(
        layer: Layer, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        for call in layer.calls(module, args, kwargs, output):
            edges.append(call.edge)
            call.edge.node.register_prehook(partial(on_backward, layer, call))

    def on_backward(layer: Layer, call: Call, grads: tuple[Tensor, ...]) -> None:
        g = grads[call.edge.output_nr]
        n, positions = layer.size(call.x, g if call.prepare is None else call.prepare(g))
        samples[layer.name] = n
        rows[layer.name] += n * positions

    handles = [
        module.register_forward_hook(partial(on_forward, layer), with_kwargs=True)
        for layer in layers
        for module in layer.modules
    ]
    with FlopCounterMode(display=False) as forward:
        made = getattr(model, "outline", model)(inputs)  # a detector's depends on values
        outputs = made if isinstance(made, tuple) else (made,)
        total = sum((x.sum() for x in outputs), torch.zeros((), device="meta"))
    with FlopCounterMode(display=False) as to_layers:
        if edges:
            torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True)
    rows.clear()
    with FlopCounterMode(display=False) as backward:
        total.backward()
    for handle in handles:
        handle.remove()
    counts = [float(c.get_total_flops()) for c in (forward, backward, to_layers)]
    return _Step(counts[0], counts[1], counts[2], outputs[0].shape, samples, rows)
