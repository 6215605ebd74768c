"""``kfac-train dry_run=true``: what would be trained and what it costs, from shapes alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kfac_bench import build
from kfac_bench.config import TrainConfig
from kfac_bench.core import KFAC
from kfac_bench.core.estimate import memory_bytes, stage_flops
from kfac_bench.run_directory import run_id

_SHAPES = {"digits": (1, 10), "cifar10": (3, 10), "imagefolder": (3, 1000)}
"""Channels and classes per data set: a dry run reads no data (ImageNet's for imagefolder)."""


def describe(config: TrainConfig) -> str:
    """The text to print; the model is built on the meta device, nothing is allocated."""
    channels, classes = _SHAPES[config.data.name]
    shape = (channels, config.data.image_size, config.data.image_size)
    with torch.device("meta"):
        model = build.build_model(config.model, shape, classes)
    batch = config.trainer.batch_size
    build.check_batch_norm(model, config.model, batch)
    rows, step_flops = _trace(model, torch.empty(batch, *shape, device="meta"))
    optimizer = build.build_optimizer(config.optimizer, model)
    kfac = build.build_kfac(config.kfac, model, optimizer)
    params = sum(p.numel() for p in model.parameters())
    lines = [
        f"run {run_id(config)}: {config.model.name} on {config.data.name} {list(shape)}, "
        f"task {config.task.name}, optimizer {config.optimizer.name}, batch {batch}",
        f"parameters {params:,} ({4 * params / 1e6:.1f} MB in fp32)",
        f"forward and backward: {_flop(step_flops)} per step",
    ]
    if kfac is None:
        return "\n".join([*lines, "K-FAC: off (kfac=none)"])
    return "\n".join([*lines, str(kfac.report()), *_stages(config, kfac, rows, step_flops)])


def _stages(config: TrainConfig, kfac: KFAC, rows: dict[str, int], step_flops: float) -> list[str]:
    """FLOPs of each stage, when it runs and averaged over steps."""
    every = {
        "factors": config.kfac.factor_update_freq,
        "decompose": config.kfac.update_freq,
        "precondition": 1,
    }
    lines, mean = [], 0.0
    for stage, flop in stage_flops(kfac.plan, 0, rows).items():
        n = every[stage.value]
        mean += flop / n
        lines.append(f"stage {stage.value:12} {_flop(flop):>10} every {n} step(s)")
    state = sum(memory_bytes(kfac.plan, 0).values())
    lines.append(
        f"K-FAC adds {_flop(mean)} per step on average ({100 * mean / step_flops:.0f} % of forward "
        f"and backward) and {state / 1e6:.1f} MB"
    )
    return lines


def _trace(model: nn.Module, x: Tensor) -> tuple[dict[str, int], float]:
    """Rows (batch times positions) of every Linear and Conv2d, and FLOPs of a training step."""
    rows: dict[str, int] = {}

    def note(name: str) -> object:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            features = output.shape[1] if isinstance(module, nn.Conv2d) else output.shape[-1]
            rows[name] = output.numel() // features

        return hook

    handles = [
        module.register_forward_hook(note(name))  # type: ignore[arg-type]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return rows, float(counter.get_total_flops())


def _flop(n: float) -> str:
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n / 1e3:.2f} kFLOP"
