"""The time of the first steps and the rates of a rank, for the plan of ``KFAC(max_overhead=...)``.

Rank 0 measures, and sends to all ranks what it found. So all ranks make the same plan.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.kernels import linalg
from kfac_bench.core.planning.budget import SIZES, Rates, Seen

WITH_STATISTICS, WITHOUT = 3, 3
"""First steps whose statistics are collected, and steps of the optimizer alone. The very first step
is not timed: it allocates memory and makes the state of the optimizer."""

COPY_NUMEL = 1 << 24
"""Elements of a copy that is timed: 64 MiB, more than most caches hold."""

MESSAGE_NUMEL = 1 << 20
"""Elements of a message that is timed."""


class FirstSteps:
    """Watches the first steps, in which the optimizer works alone.

    Args:
        names: The layers that K-FAC covers.
        collective: The ranks that agree on what was seen.
        device: That of the layers.
    """

    def __init__(self, names: Sequence[str], collective: Collective, device: torch.device) -> None:
        self._names, self._collective, self._device = names, collective, device
        self._ends: list[float] = []
        self._rows: dict[str, float] = {}

    @property
    def needs_statistics(self) -> bool:
        """Whether the next step collects statistics."""
        return len(self._ends) < WITH_STATISTICS

    def end_step(self, collected: Mapping[str, Collected]) -> Seen | None:
        """Note the end of a step; return what was seen if it was the last one, else None."""
        _wait(self._device)
        self._ends.append(time.perf_counter())
        for name, statistics in collected.items():
            self._rows[name] = float(statistics.rows)
        if len(self._ends) < WITH_STATISTICS + WITHOUT:
            return None
        periods = [b - a for a, b in zip(self._ends, self._ends[1:], strict=False)]
        alone = min(periods[WITH_STATISTICS - 1 :])
        mine = [alone, max(0.0, min(periods[: WITH_STATISTICS - 1]) - alone)]
        mine += [self._rows.get(name, 0.0) for name in self._names]
        step_s, statistics_s, *rows = _of_rank_0(
            mine, self._collective, self._device, "budget/seen"
        )
        return Seen(dict(zip(self._names, rows, strict=True)), step_s, statistics_s)


def measure(collective: Collective, device: torch.device, method: str) -> Rates:
    """Measure for about a second. All ranks call it, and get the rates of rank 0.

    Args:
        collective: The ranks.
        device: That of the layers.
        method: That of KFAC.
    """
    small = torch.ones(8, device=device)
    calls = 100

    def call_often() -> None:
        for _ in range(calls):
            small.add(1)

    seconds = [_fastest(call_often, device) / calls]
    numel = COPY_NUMEL
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    seconds.append(8 * numel / _fastest(lambda: target.copy_(source), device))
    seconds += [_product_flops(n, device) for n in SIZES]
    seconds += [_decompose_s(n, device, method) for n in SIZES]
    seconds += _message_rates(collective, source)
    call_s, bytes_per_s, *rest = _of_rank_0(seconds, collective, device, "budget/rates")
    k = len(SIZES)
    return Rates(call_s, bytes_per_s, tuple(rest[:k]), tuple(rest[k : 2 * k]), *rest[2 * k :])


def _of_rank_0(
    values: Sequence[float], collective: Collective, device: torch.device, name: str
) -> list[float]:
    """Return the values of rank 0."""
    if collective.world_size == 1:
        return list(values)
    sent = torch.tensor(values, dtype=torch.float64, device=device)
    collective.broadcast(sent, 0, tuple(range(collective.world_size)), name).wait()
    found: list[float] = sent.tolist()
    return found


def _product_flops(n: int, device: torch.device) -> float:
    left, right = torch.ones(n, n, device=device), torch.ones(n, 4 * n, device=device)
    return 8.0 * n**3 / _fastest(lambda: left @ right, device)


def _decompose_s(n: int, device: torch.device, method: str) -> float:
    rows = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(0)).to(device)
    factor = rows.mT @ rows / len(rows)
    if method == "inverse":
        return _fastest(lambda: linalg.damped_inverse(factor, 1.0), device)
    return _fastest(lambda: linalg.eigendecompose(factor), device)


def _message_rates(collective: Collective, content: Tensor) -> list[float]:
    """Return the seconds of an empty message, and the bytes per second of a large one."""
    if collective.world_size == 1:
        return [0.0, float("inf")]
    world = tuple(range(collective.world_size))
    seconds = []
    for x in (content[:1].clone(), content[:MESSAGE_NUMEL].clone()):

        def send(x: Tensor = x) -> None:
            collective.all_reduce(x, world, "budget/rate").wait()

        seconds.append(_fastest(send, content.device, times=3, limit_s=float("inf")))
    passes = 2 * (len(world) - 1) / len(world)
    return [seconds[0], passes * 4 * MESSAGE_NUMEL / max(seconds[1] - seconds[0], 1e-9)]


def _fastest(
    run: Callable[[], object], device: torch.device, times: int = 5, limit_s: float = 0.1
) -> float:
    """Return the seconds of the fastest of some runs, after one that does not count."""
    run()
    best, end = float("inf"), time.perf_counter() + limit_s
    for _ in range(times):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
