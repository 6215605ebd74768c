"""The floor: the FLOPs that K-FAC cannot avoid, as a lower limit for its measured stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.models import Workload
from kfac_bench.core import KFAC
from kfac_bench.core.planning.estimate import flops


def floor_flops(kfac: KFAC, workload: Workload) -> dict[str, float]:
    """Return the FLOPs that K-FAC cannot avoid when an op runs, by kind of op.

    The count follows core/planning/estimate.py with two exceptions. A symmetric product counts
    half. A 3x3 convolution of stride 1 needs 13 offsets of the input's autocorrelation for A,
    instead of 9x9 products of patches.
    """
    rows = _Rows()
    handles = [
        module.register_forward_hook(rows.hook(name))
        for name, module in workload.model.named_modules()
    ]
    with torch.no_grad():
        workload.loss()
    for handle in handles:
        handle.remove()
    total: dict[str, float] = defaultdict(float)
    for op in kfac.plan.ops():
        kind = type(op).__name__
        share = 0.5 if kind == "ComputeFactor" else 1.0
        total[kind] += share * flops(op, kfac.plan.method, rows)
    modules = dict(workload.model.named_modules())
    for name in {placement.layer.name for placement in kfac.plan.placements}:
        if _is_3x3_of_stride_1(conv := modules.get(name)):
            assert isinstance(conv, nn.Conv2d)
            channels = conv.in_channels
            full = 9 * channels + (conv.bias is not None)
            total["ComputeFactor"] += rows[name] * (26.0 * channels**2 - full**2)
    return {kind: flop for kind, flop in total.items() if flop}


def _is_3x3_of_stride_1(m: nn.Module | None) -> bool:
    geometry = ((3, 3), (1, 1), (1, 1), 1)
    return (
        isinstance(m, nn.Conv2d)
        and (m.kernel_size, m.stride, m.dilation, m.groups) == geometry
        and m.padding_mode == "zeros"
    )


class _Rows(dict[str, int]):
    """The number of rows (batch times positions) by module. A part of a module inherits it."""

    def __missing__(self, name: str) -> int:
        parent = name.rpartition(".")[0]
        return self[parent] if parent else 0

    def hook(self, name: str) -> Callable[..., None]:
        def on_forward(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, torch.Tensor) and output.ndim > 1:
                features = output.shape[1 if output.ndim == 4 else -1]
                self[name] = output.numel() // features

        return on_forward
