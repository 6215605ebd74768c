"""``kfac-train dry_run=true``: what would be trained and what it costs, from shapes alone."""

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

from kfac_bench import build
from kfac_bench.config import KFACConfig, TrainConfig
from kfac_bench.core import KFAC
from kfac_bench.core.estimate import flops, memory_bytes
from kfac_bench.core.layer import Call, Layer
from kfac_bench.core.plan import ComputeFactor, ComputeSecondMoment, Op, Stage
from kfac_bench.run_directory import run_id

_SHAPES = {"digits": (1, 10), "cifar10": (3, 10), "imagefolder": (3, 1000)}
"""Channels and classes per data set: a dry run reads no data (ImageNet's for imagefolder)."""


def describe(config: TrainConfig) -> str:
    """The text to print; the model is built on the meta device, nothing is allocated."""
    channels, classes = _SHAPES[config.data.name]
    shape = (channels, config.data.image_size, config.data.image_size)
    with torch.device("meta"):
        model = build.build_model(config.model, shape, classes)
    batch, parts = config.trainer.batch_size, config.trainer.accumulate
    build.check_batch_norm(model, config.model, batch // parts)
    optimizer = build.build_optimizer(config.optimizer, model)
    kfac = build.build_kfac(config.kfac, model, optimizer)
    if kfac is not None:
        kfac.detach()  # or what its hooks compute would count as forward and backward
    layers = [] if kfac is None else kfac.report().layers
    cost = _trace(model, torch.empty(batch, *shape, device="meta"), layers)
    params = sum(p.numel() for p in model.parameters())
    lines = [
        f"run {run_id(config)}: {config.model.name} on {config.data.name} {list(shape)}, "
        f"task {config.task.name}, optimizer {config.optimizer.name}, batch {batch}"
        f"{f' in {parts} parts' if parts > 1 else ''}, {config.trainer.precision}",
        f"parameters {params:,} ({4 * params / 1e6:.1f} MB in fp32)",
        f"forward and backward: {_flop(cost.step)} per step",
    ]
    if kfac is None:
        return "\n".join([*lines, "K-FAC: off (kfac=none)"])
    seeds = _seeds(config, cost.outputs)
    return "\n".join([*lines, str(kfac.report()), *_stages(config.kfac, kfac, cost, seeds)])


@dataclass
class _Cost:
    """Of one step without K-FAC, in FLOPs; and what K-FAC's own cost follows from, by layer."""

    forward: float
    step: float
    to_layers: float
    """Of sending a gradient of the output back to the covered layers, and no further."""
    outputs: torch.Size
    samples: Mapping[str, int]
    rows: Mapping[str, int]
    """Samples times shared positions."""


def _seeds(config: TrainConfig, outputs: torch.Size) -> int:
    """Gradients that ``kfac.fisher`` sends back from the output beside the loss' own."""
    if config.kfac.fisher == "type2":
        one = outputs[-1:] if config.task.name == "classification" else outputs[1:]
        return one.numel()
    return 1 if config.kfac.fisher == "mc" else 0


def _stages(config: KFACConfig, kfac: KFAC, cost: _Cost, seeds: int) -> list[str]:
    """FLOPs of each stage, when it runs and averaged over steps."""
    every = {
        Stage.FACTORS: config.factor_update_freq,
        Stage.DECOMPOSE: config.update_freq,
        Stage.PRECONDITION: 1,
    }

    def work(op: Op) -> float:
        """``reduce`` makes one row of a sample; each seed has a G and a second moment."""
        reduced = config.weight_sharing == "reduce" and isinstance(op, ComputeFactor)
        once = flops(op, kfac.plan.method, cost.samples if reduced else cost.rows)
        by_seed = isinstance(op, ComputeSecondMoment) or getattr(op, "factor", "A") == "G"
        return once * (max(1, seeds) if by_seed else 1)

    found = [(s.value, sum(map(work, kfac.plan.ops(s))), every[s]) for s in Stage]
    if seeds:
        found.insert(0, ("fisher", seeds * cost.to_layers, config.factor_update_freq))
    if config.adaptive_damping:
        found.append(("damping", cost.forward, config.damping_freq))
    lines = [f"stage {name:12} {_flop(n):>10} every {freq} step(s)" for name, n, freq in found]
    mean = sum(flop / freq for _, flop, freq in found)
    state = sum(memory_bytes(kfac.plan, 0).values())
    lines.append(
        f"K-FAC adds {_flop(mean)} per step on average ({100 * mean / cost.step:.0f} % of forward "
        f"and backward) and {state / 1e6:.1f} MB"
    )
    return lines


def _trace(model: nn.Module, x: Tensor, layers: Sequence[Layer]) -> _Cost:
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
        output = model(x)
    with FlopCounterMode(display=False) as to_layers:
        if edges:
            torch.autograd.grad(output.sum(), edges, retain_graph=True, allow_unused=True)
    rows.clear()
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    for handle in handles:
        handle.remove()
    counts = [float(c.get_total_flops()) for c in (forward, backward, to_layers)]
    return _Cost(counts[0], counts[0] + counts[1], counts[2], output.shape, samples, rows)


def _flop(n: float) -> str:
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n / 1e3:.2f} kFLOP"
