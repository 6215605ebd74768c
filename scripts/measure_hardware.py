"""Measure this machine's rates and write conf/hardware/NAME.yaml.

    python scripts/measure_hardware.py NAME [--out FILE] [--device cpu]

The script takes about a minute. It measures:

* on one process with one thread (or on one GPU): matrix products; forward, backward and factors of
  a ResNet-20; eigh, Cholesky and a QR step,
* on a CPU also the ResNet-20 on as many ranks as cores, and on twice as many,
* all-reduce and broadcast on 2 gloo ranks.

Products, decompositions and messages are the fastest of several runs. The network's steps are
medians, because they depend on the contents of the caches.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kfac_bench.config import compose
from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.capture.moments import Moments
from kfac_bench.core.kernels.linalg import orthogonal_iteration
from kfac_bench.core.layers.coverage import find_layers
from kfac_bench.simulate import workload
from kfac_bench.training import environment

ALL_REDUCES = (1 << 12, 1 << 18, 1 << 22)
"""Sizes of messages, in fp32 elements."""
EXAMPLES, NETWORK_STEPS, CROWD_ROUNDS = 32, 20, 4
"""For the network: examples per batch, steps of each kind, and rounds into which they are split."""
MOST_RANKS = 8
"""Most ranks to time on full cores. If the cores are no more than that, twice as many are timed."""
SIZES = (16, 64, 256, 512, 1024)
"""Sizes of the matrices to decompose."""
LEAST_S = 1.0
"""Least total time of the repetitions of one measurement."""


def best(work: Callable[[], object], device: torch.device, least: int = 5) -> float:
    """Return the fastest of at least `least` repetitions, which together take LEAST_S seconds."""
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
    """Return the FLOP/s of [512, 512] @ [512, 512]."""
    x = torch.randn(512, 512, device=device)
    return 2 * 512**3 / best(lambda: x @ x, device)


class ResNet20:
    """A CIFAR ResNet-20 with one batch, for forward and backward."""

    def __init__(self, device: torch.device) -> None:
        environment.keep_freed_memory()  # like kfac-train
        config = compose.load(["model=resnet20", "data=cifar10", f"trainer.batch_size={EXAMPLES}"])
        self.work = workload.of_config(config)
        self.model = config.model.build((3, 32, 32), 10, "classification").to(device)
        self._x = torch.randn(EXAMPLES, 3, 32, 32, device=device)
        self._device = device

    def seconds(self, then: Callable[[], object] = lambda: None) -> float:
        """Return the seconds of one step, followed by `then`."""
        _wait(self._device)
        start = time.perf_counter()
        self.model(self._x).sum().backward()
        then()
        _wait(self._device)
        return time.perf_counter() - start


def training(device: torch.device) -> tuple[float, float]:
    """Return the FLOP/s of a ResNet-20's step, and of the factors of its layers.

    The time of the factors is the difference of steps with and without A and G, which take turns.
    Their FLOPs are those of full products of all patches, although this code needs fewer.
    """
    net = ResNet20(device)
    capture = Capture(net.model, find_layers(net.model)[0], moments=Moments())
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * NETWORK_STEPS):
        capture.enabled = i % 2 == 0
        seconds[capture.enabled].append(net.seconds(capture.pop))
    step_s = statistics.median(seconds[False])
    factors_s = max(1e-9, statistics.median(seconds[True]) - step_s)
    squares = ((x, x.a_dim**2 + x.g_dim**2) for x in net.work.layers)
    factor_flops = sum(2 * net.work.rows[spec.name] * spec.groups * n for spec, n in squares)
    return net.work.step_flops / step_s, factor_flops / factors_s


def _in_crowd(rank: int, counts: Sequence[int], steps: int, path: str, results: str) -> None:
    """Run the steps of one rank, on each number of ranks in `counts` in turn.

    The ranks wait for each other after each step, as in data-parallel training.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=max(counts))
    net = ResNet20(torch.device("cpu"))
    groups = {n: dist.new_group(list(range(n))) for n in counts}
    seconds: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(CROWD_ROUNDS):
        for n in counts:
            dist.barrier()
            for _ in range(steps // CROWD_ROUNDS if rank < n else 0):
                start = time.perf_counter()
                net.seconds()
                dist.barrier(groups[n])
                seconds[n].append(time.perf_counter() - start)
    dist.barrier()
    if rank == 0:
        torch.save({n: statistics.median(s) for n, s in seconds.items()}, results)
    dist.destroy_process_group()


def crowding() -> dict[int, float]:
    """Return the relative time of a step, by number of ranks on this machine.

    One number of ranks fills all cores, the other puts two ranks on each core. On a machine with
    more than MOST_RANKS cores, the factor of MOST_RANKS ranks counts for all cores.
    """
    cores = len(os.sched_getaffinity(0))
    full = min(cores, MOST_RANKS)
    counts = sorted({1, full, 2 * full if full == cores else full})
    with tempfile.TemporaryDirectory() as folder:
        path, results = f"{folder}/join", f"{folder}/seconds.pt"
        mp.spawn(_in_crowd, (counts, NETWORK_STEPS, path, results), nprocs=counts[-1])
        seconds = torch.load(results, weights_only=True)
    factors = {n: seconds[n] / seconds[1] for n in counts[1:]}
    return factors if full == cores else {**factors, cores: factors[full]}


def decompositions(device: torch.device) -> dict[str, dict[int, float]]:
    """Return the seconds of eigh, of a Cholesky inverse and of a QR step, by size."""
    eigen: dict[int, float] = {}
    inverse: dict[int, float] = {}
    qr: dict[int, float] = {}
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
        basis = torch.linalg.eigh(factor).eigenvectors.contiguous()
        qr[n] = best(
            lambda factor=factor, basis=basis: orthogonal_iteration(factor, basis), device, least
        )
    return {"eigen_s": eigen, "inverse_s": inverse, "qr_s": qr}


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
        # No rank may leave while another rank still reads its last message.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def messages() -> tuple[float, float]:
    """Return latency per hop and bytes per second of the ring model (simulate/hardware.py).

    On two ranks an all-reduce takes 2 alpha + m / beta, and a broadcast takes alpha + m / beta. A
    line through the smallest and the largest message gives alpha and beta. The result is the mean
    over both operations.
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


def usable_device(text: str) -> torch.device:
    """Return the device of this name, which this machine must have."""
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used ({reason}). Use cpu or cuda"
        ) from None
    return device


def main() -> int:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu", type=usable_device, help="cpu (default), cuda")
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = options.out or Path("conf/hardware") / f"{options.name}.yaml"
    # Find out before half a minute is spent.
    if not out.parent.is_dir():
        parser.error(f"{out.parent}: no such folder")
    latency, bandwidth = messages()
    gemm = products(options.device)
    step, factor = training(options.device)
    each = decompositions(options.device)
    link = f"{{latency_s: {latency:.3g}, bandwidth_bytes_per_s: {bandwidth:.4g}}}"
    tables = "\n".join(
        f"  {name}: {{{', '.join(f'{n}: {s:.3g}' for n, s in table.items())}}}  # measured"
        for name, table in each.items()
    )
    crowd = ""
    if options.device.type == "cpu":
        factors = ", ".join(f"{n}: {factor:.3g}" for n, factor in crowding().items())
        crowd = f"crowding: {{{factors}}}  # measured: forward and backward, by number of ranks\n"
    day, processor = datetime.datetime.now(datetime.UTC).date(), environment.cpu_name()
    out.write_text(
        f"""\
# Measured by scripts/measure_hardware.py on {day}: {processor}, torch {torch.__version__},
# {options.device.type}, one thread per rank. All ranks are on this machine, so no link is
# between nodes.
network:
  ranks_per_node: 1024  # all on one machine
  intra: {link}  # measured: gloo, 2 ranks
  inter: {link}  # not measured: same as intra
  algorithm: ring  # the algorithm of gloo
rates:
  step_flops_per_s: {{default: {step:.4g}}}  # measured: a CIFAR ResNet-20
  factor_flops_per_s: {factor:.4g}  # measured: factors A and G of the same model
  precondition_flops_per_s: {gemm:.4g}  # measured: products of [512, 512]
{tables}
overlap: 0.0  # assumed: the processor that computes also sends
{crowd}""",
        encoding="utf-8",
    )
    print(f"{out}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
