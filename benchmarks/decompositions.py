"""Measure the time of decomposing one factor, by its size, for `core/planning/planner.py`.

`python benchmarks/decompositions.py` measures the CPU time of one thread, on which other programs
have little influence. With `--device cuda` it measures wall time on the GPU. The factors come from
random activations. Each number is the fastest of several runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kfac_bench.core.kernels import linalg

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4608)
DAMPING = 1e-3


def main() -> None:
    """Print one row of the table per method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for method in ("eigen", "inverse"):
        row = {n: _least_s(method, n, options.device) for n in options.sizes}
        inner = ", ".join(f"{n}: {s:.3g}" for n, s in row.items())
        print(f'("{method}", "{options.device}"): {{{inner}}},', flush=True)


def _least_s(method: str, n: int, device: str) -> float:
    rows = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(n))
    factor = (rows.T @ rows / len(rows)).unsqueeze(0).to(device)
    damping = torch.tensor(DAMPING, device=device)
    now = time.process_time if device == "cpu" else _now_on_gpu
    repeats = max(2, min(200, int(2e8 / n**3)))
    return min(_seconds(method, factor, damping, now) for _ in range(repeats))


def _seconds(method: str, factor: Tensor, damping: Tensor, now: Callable[[], float]) -> float:
    start = now()
    if method == "eigen":
        linalg.eigendecompose(factor)
    else:
        linalg.damped_inverse(factor, damping)
    return now() - start


def _now_on_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
