"""Measure the memory of one rank with DDP, FSDP2 and tensor parallel, by strategy.

Run: torchrun --nproc-per-node 2 benchmarks/sharded_memory.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from kfac_bench.core import KFAC
from kfac_bench.core.distributed.dtensor import local

BLOCKS, WIDTH, HIDDEN, BATCH = 6, 512, 2048, 64


class Block(nn.Module):
    """A two-layer perceptron with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, WIDTH] to [N, WIDTH]."""
        out: Tensor = x + self.down(self.up(x).relu())
        return out


def ddp(model: nn.Sequential) -> nn.Module:
    """Keep the whole model on each rank."""
    return DistributedDataParallel(model)


def fsdp2(model: nn.Sequential) -> nn.Module:
    """Split each parameter, and gather block by block."""
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    """Split the hidden features."""
    style: dict[str, Any] = {f"{i}.up": ColwiseParallel() for i in range(BLOCKS)}
    style |= {f"{i}.down": RowwiseParallel() for i in range(BLOCKS)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, style)


def measure(wrap: Callable[[nn.Sequential], nn.Module], strategy: str) -> list[float]:
    """Return the MiB of parameters, gradients, factors and decompositions between steps."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*(Block() for _ in range(BLOCKS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"update_freq": 1, "factor_update_freq": 1, "spread": False}
    kfac = KFAC(model, optimizer, strategy=strategy, method="inverse", **options)  # type: ignore[arg-type]
    for _ in range(3):
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        kfac.step()
        optimizer.step()
        params = list(model.parameters())
        held = [size(params), size(p.grad for p in params if p.grad is not None)]
        optimizer.zero_grad()
    entries = [e for layer in kfac.state_dict()["layers"].values() for e in layer.values()]
    held += [size(e["factor"] for e in entries if "factor" in e)]
    held += [size(x for e in entries for x in e.get("inverse", ()))]
    kfac.detach()
    return held


def size(tensors: Iterable[Tensor]) -> float:
    """Return the MiB of this rank's parts."""
    return sum(local(t.detach()).nbytes for t in tensors) / 2**20


def main() -> None:
    """Print a row for each combination, with the largest value of any rank."""
    rows = ["| MiB of a rank | parameters | gradients | factors | decompositions |"]
    rows.append("| --- |" + " ---: |" * 4)
    for strategy in ("comm_opt", "mem_opt", "owner_reduce"):
        for wrap in (ddp, fsdp2, tensor_parallel):
            most = torch.tensor(measure(wrap, strategy))
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            name = f"{wrap.__name__}, {strategy}"
            rows.append(f"| {name} | " + " | ".join(f"{x:.1f}" for x in most.tolist()) + " |")
    if dist.get_rank() == 0:
        print("\n".join(rows))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
