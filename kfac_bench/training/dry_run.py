"""A dry run: what a configuration would train, and what that costs on each of many ranks.

``kfac-train dry_run=true`` and ``kfac-plan`` print a dry run, and the simulator takes its layers
from a dry run. All numbers follow from shapes. The model is on torch's meta device, so a dry run
allocates no weights, reads no data and starts no ranks.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.flop_counter import FlopCounterMode

from kfac_bench.config import TrainConfig
from kfac_bench.core.capture.safe_hooks import forward_contexts
from kfac_bench.core.distributed.collective import SingleProcess
from kfac_bench.core.layer_plan import Report
from kfac_bench.core.layers.base import Call, Layer
from kfac_bench.core.planning.estimate import RankCost, flops, rank_costs
from kfac_bench.core.planning.plan import Op
from kfac_bench.training import build
from kfac_bench.training.build import Builders
from kfac_bench.training.update import check_parts


@dataclass(frozen=True)
class DryRun:
    """One configuration on ``world_size`` ranks; the FLOPs are those of one rank and one step."""

    config: TrainConfig
    world_size: int
    shape: tuple[int, ...]
    """Shape of one input."""
    parameters: int
    """Numbers in all parameters."""
    forward_flops: float
    step_flops: float
    """FLOPs of forward and backward, without K-FAC."""
    fisher_flops: float
    """FLOPs of the extra backward passes of ``kfac.fisher``, in a step with a factor update."""
    report: Report | None
    """The layers that K-FAC covers; None if K-FAC is off."""
    ranks: Sequence[RankCost]
    tensors: int
    """Number of parameters, as tensors."""
    rows: Mapping[str, int]
    """Rows that the factors of each covered layer are made of: examples of one rank times shared
    positions."""

    @property
    def examples(self) -> int:
        """Examples of a batch on the rank that has most."""
        return -(-self.config.trainer.batch_size // self.world_size)


class _ImaginedRank(SingleProcess):
    """A rank of a world of any size that is never started."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


def trace(config: TrainConfig, world_size: int = 1) -> DryRun:
    """Build the model and its plan, and take one step on the meta device.

    Args:
        config: The options of the run.
        world_size: Number of ranks to assume.

    Raises:
        UsageError: The run would raise it too.
    """
    builders = Builders.of(config)
    smallest_part, examples = _examples_of_a_rank(config, world_size)
    if torch.__version__ < "2.11":
        # torchvision imports it, and torch 2.6 cannot import it where tensors have no values.
        importlib.import_module("torch._dynamo")
    with torch.device("meta"):
        model = builders.assumed_model()
        inputs = builders.example_inputs(examples)
    build.check_batch_norm(model, config.model, smallest_part)
    optimizer = build.build_optimizer(config.optimizer, model)
    kfac = build.build_kfac(config.kfac, model, optimizer, _ImaginedRank(world_size))
    report = None
    if kfac is not None:
        # With its hooks, the work of K-FAC would count as forward and backward.
        kfac.detach()
        report = kfac.report()
    layers = [] if report is None else report.layers
    forward_pass = partial(builders.output, model, inputs)
    step = _step(model, forward_pass, layers, has_seeds=config.kfac.fisher in _SEEDED)
    seeds = _seeds(config, builders.likelihood, step.outputs)
    reduced = step.samples if config.kfac.weight_sharing == "reduce" else None

    def work(op: Op) -> float:
        assert report is not None
        return flops(op, report.plan.method, step.rows, reduced=reduced, seeds=max(1, seeds))

    return DryRun(
        config=config,
        world_size=world_size,
        shape=builders.shape,
        parameters=sum(p.numel() for p in model.parameters()),
        forward_flops=step.forward,
        step_flops=step.forward + step.backward,
        fisher_flops=seeds * step.to_layers,
        report=report,
        ranks=[]
        if report is None
        else rank_costs(report.plan, work, background=config.kfac.background),
        tensors=sum(1 for _ in model.parameters()),
        rows=step.rows if reduced is None else reduced,
    )


def _examples_of_a_rank(config: TrainConfig, world_size: int) -> tuple[int, int]:
    """Return the examples of the smallest part of a rank's batch, and of the largest batch."""
    batch, parts = config.trainer.batch_size, config.trainer.accumulate
    check_parts(config.trainer, world_size)
    return batch // world_size // parts, -(-batch // world_size)


_SEEDED = ("mc", "type2")
"""The values of ``kfac.fisher`` with extra backward passes."""


def _seeds(config: TrainConfig, likelihood: str, outputs: torch.Size) -> int:
    """Return the number of extra gradients that ``kfac.fisher`` sends back from the output."""
    if config.kfac.fisher == "type2":
        # One gradient for each class, or for each element of the output of an example.
        one = outputs[-1:] if likelihood == "categorical" else outputs[1:]
        return one.numel()
    return 1 if config.kfac.fisher == "mc" else 0


@dataclass
class _Step:
    """FLOPs of one step without K-FAC, and what the cost of K-FAC on each layer follows from."""

    forward: float
    backward: float
    to_layers: float
    """FLOPs of sending a gradient of the output back to the covered layers, and no further.
    0 if ``kfac.fisher`` sends none."""
    outputs: torch.Size
    """Shape of the output."""
    samples: Mapping[str, int]
    """Samples of each layer."""
    rows: Mapping[str, int]
    """Samples times shared positions of each layer."""


def _step(
    model: nn.Module, forward_pass: Callable[[], Any], layers: Sequence[Layer], *, has_seeds: bool
) -> _Step:
    """Take one training step, and count what the covered layers see in it."""
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
        rows[layer.name] += round(n * positions)

    handles = [
        module.register_forward_hook(partial(on_forward, layer), with_kwargs=True)
        for layer in layers
        for module in layer.modules
    ]
    # Forward hooks run in order, so the hooks that leave a context come last.
    contexts = [*forward_contexts(layers, lambda: True)]
    with FlopCounterMode(display=False) as forward:
        made = forward_pass()
        outputs = made if isinstance(made, tuple) else (made,)
        total = sum((x.sum() for x in outputs if x is not None), torch.zeros((), device="meta"))
    with FlopCounterMode(display=False) as to_layers:
        if edges and has_seeds:
            torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True)
    rows.clear()  # the pass to the layers has counted them too
    with FlopCounterMode(display=False) as backward:
        total.backward()
    for handle in handles:
        handle.remove()
    for context in contexts:
        context.remove()
    counts = [float(c.get_total_flops()) for c in (forward, backward, to_layers)]
    return _Step(counts[0], counts[1], counts[2], outputs[0].shape, samples, rows)
