"""Measure this machine's rates and write conf/hardware/NAME.yaml.

    python scripts/measure_hardware.py NAME [--out FILE] [--device cpu]

Products, a convolution's forward and backward, eigh and Cholesky on one process of one thread (or
one GPU); all-reduce and broadcast on 2 gloo ranks of this machine. About half a minute. Each
figure is the fastest of several: other processes can only slow it down.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

ALL_REDUCES = (1 << 12, 1 << 18, 1 << 22)
"""Elements of fp32."""
SIZES = (16, 64, 256, 512, 1024)
"""Of matrices to decompose."""
LEAST_S = 1.0
"""For the repetitions of one thing, together."""


def best(work: Callable[[], object], device: torch.device, least: int = 5) -> float:
    """Seconds of the fastest of at least ``least`` repetitions that took LEAST_S together."""
    work()
    fastest, total, count = float("inf"), 0.0, 0
    while count < least or total < LEAST_S:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        took = time.perf_counter() - start
        fastest, total, count = min(fastest, took), total + took, count + 1
    return fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def products(device: torch.device) -> float:
    """FLOP/s of [512, 512] @ [512, 512]."""
    x = torch.randn(512, 512, device=device)
    return 2 * 512**3 / best(lambda: x @ x, device)


def convolutions(device: torch.device) -> float:
    """FLOP/s of forward and backward of convolutions, batch norm and ReLU, 32 examples.

    Of the three shapes that a CIFAR ResNet is made of, which have equal FLOPs.
    """
    seconds, flops = 0.0, 0.0
    for channels, side in ((16, 32), (32, 16), (64, 8)):
        blocks = nn.Sequential(
            *(
                layer
                for _ in range(4)
                for layer in (
                    nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                    nn.BatchNorm2d(channels),
                    nn.ReLU(),
                )
            )
        ).to(device)
        x = torch.randn(32, channels, side, side, device=device, requires_grad=True)

        def step(blocks: nn.Module = blocks, x: torch.Tensor = x) -> None:
            blocks(x).sum().backward()

        seconds += best(step, device)
        flops += 3 * 4 * 2 * 32 * side * side * channels * channels * 9
    return flops / seconds


def decompositions(device: torch.device) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of eigh and of a Cholesky inverse, by size."""
    eigen, inverse = {}, {}
    for n in SIZES:
        x = torch.randn(n, 2 * n, device=device)
        factor = x @ x.T / (2 * n) + 0.1 * torch.eye(n, device=device)
        least = 2 if n > 512 else 5
        eigen[n] = best(lambda factor=factor: torch.linalg.eigh(factor), device, least)
        inverse[n] = best(
            lambda factor=factor: torch.cholesky_inverse(torch.linalg.cholesky(factor)),
            device,
            least,
        )
    return eigen, inverse


def _rank(rank: int, path: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        seconds = {}
        for kind in ("all_reduce", "broadcast"):
            for n in ALL_REDUCES:
                x = torch.zeros(n)
                took = []
                for _ in range(8):
                    dist.barrier()
                    start = time.perf_counter()
                    if kind == "all_reduce":
                        dist.all_reduce(x)
                    else:
                        dist.broadcast(x, 0)
                    took.append(time.perf_counter() - start)
                slowest = torch.tensor(took)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                seconds[kind, n] = float(slowest.min())
        if rank == 0:
            torch.save({f"{k} {n}": s for (k, n), s in seconds.items()}, results)
    finally:
        dist.destroy_process_group()


def messages() -> tuple[float, float]:
    """Latency per hop and bytes per second of the ring model (simulate/network.py) on 2 ranks.

    Two ranks' all-reduce takes 2 alpha + m / beta, a broadcast alpha + m / beta: a line through
    the least and the most elements of each, and the mean of both.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, results = f"{folder}/join", f"{folder}/seconds.pt"
        mp.spawn(_rank, (path, results), nprocs=2)
        seconds = torch.load(results, weights_only=True)
    alphas, betas = [], []
    for kind, hops in (("all_reduce", 2), ("broadcast", 1)):
        few, many = ALL_REDUCES[0], ALL_REDUCES[-1]
        rate = 4 * (many - few) / (seconds[f"{kind} {many}"] - seconds[f"{kind} {few}"])
        betas.append(rate)
        alphas.append(max(1e-7, (seconds[f"{kind} {few}"] - 4 * few / rate) / hops))
    return sum(alphas) / 2, sum(betas) / 2


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu", type=torch.device)
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = options.out or Path("conf/hardware") / f"{options.name}.yaml"
    if not out.parent.is_dir():  # before half a minute is spent
        parser.error(f"{out.parent}: no such folder")
    latency, bandwidth = messages()
    gemm = products(options.device)
    convolution = convolutions(options.device)
    eigen, inverse = decompositions(options.device)
    link = f"{{latency_s: {latency:.3g}, bandwidth_bytes_per_s: {bandwidth:.4g}}}"
    tables = (", ".join(f"{n}: {s:.3g}" for n, s in each.items()) for each in (eigen, inverse))
    day = datetime.datetime.now(datetime.UTC).date()
    out.write_text(
        f"""\
# Measured by scripts/measure_hardware.py on {day}: {_processor()}, torch {torch.__version__},
# {options.device.type}, one thread a rank. All ranks on this machine: no link between nodes.
network:
  ranks_per_node: 1024  # all on one machine
  intra: {link}  # measured: gloo, 2 ranks
  inter: {link}  # the same: not measured
  algorithm: ring  # gloo's
rates:
  step_flops_per_s: {{default: {convolution:.4g}}}  # measured: a CIFAR ResNet's blocks
  factor_flops_per_s: {gemm:.4g}  # measured: products of [512, 512]
  precondition_flops_per_s: {gemm:.4g}  # measured, the same
  eigen_s: {{{next(tables)}}}  # measured
  inverse_s: {{{next(tables)}}}  # measured
overlap: 0.0  # assumed: ranks share the processor that sends
""",
        encoding="utf-8",
    )
    print(f"{out}: written")
    return 0


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
