"""Step times of SGD and K-FAC, interleaved in one process, by kind of step.

Decompositions are rare, so intervals are not run: each kind of step is timed apart, in blocks that
alternate; :mod:`benchmarks.intervals` puts an interval together. :func:`run_intervals` runs whole
ones.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.floor import floor_flops
from benchmarks.models import Size, Workload, build
from kfac_bench.core import KFAC
from kfac_bench.core.schedule import Schedule
from kfac_bench.errors import UsageError

KINDS = ("plain", "factors", "decompose")
"""Steps that only precondition; that update factors, too; that decompose them, too."""
PRECISIONS = ("fp32", "tf32", "bf16")
BLOCK_S = 1.0
"""A block runs about so long, where a step is short."""


@dataclass(frozen=True)
class Case:
    """One model in one precision on one device; the variants of a case differ in K-FAC alone."""

    name: str
    size: Size = field(default_factory=Size)
    device: str = "cpu"
    precision: str = "fp32"
    kfac: dict[str, Any] = field(default_factory=dict)
    """Keywords of every KFAC."""
    clock: str = "wall"
    """Or ``cpu``: the process' own time, for one thread on a core that others use, too."""

    def now(self) -> float:
        """Seconds of the clock; the device has finished its work."""
        synchronize(self.device)
        return time.process_time() if self.clock == "cpu" else time.perf_counter()


@dataclass
class Timing:
    """Seconds per step, a figure per round."""

    shape: str
    block_steps: int
    sgd_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    """CPU seconds over wall seconds: what one thread got of its core."""
    gemm_flop_s: list[float] = field(default_factory=list)
    """Of :func:`matmul_rate`: the machine's speed at the time of the round."""
    methods: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By method and kind of step."""
    stage_s: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    """Host seconds of ``statistics()``, by method, kind of step and kind of op."""
    first_step_s: dict[str, float] = field(default_factory=dict)
    floor_flop: dict[str, dict[str, float]] = field(default_factory=dict)
    """By method and kind of op; see :func:`floor_flops`."""


class Variant:
    """A training loop of its own: model, SGD with momentum, and K-FAC unless ``method`` is None."""

    def __init__(
        self, case: Case, method: str | None, factors: Schedule = 1, decompose: Schedule = 1,
        **options: Any,
    ) -> None:  # fmt: skip
        self.case = case
        self.workload: Workload = build(case.name, case.size, case.device)
        model = self.workload.model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.kfac: KFAC | None = None
        if method is not None:
            known = inspect.signature(KFAC).parameters
            skip = (*known["skip"].default, *self.workload.skip)
            keywords: dict[str, Any] = {"damping": 0.03, "skip": skip}
            keywords |= case.kfac | options
            try:
                self.kfac = KFAC(
                    model, self.optimizer, method=method,
                    factor_update_freq=factors, update_freq=decompose, **keywords,
                )  # fmt: skip
            except (TypeError, ValueError) as error:
                raise UsageError(f"KFAC of {case.name}: {error}") from error

    def step(self) -> None:
        """One training step on the workload's batch."""
        self.backward()
        if self.kfac is not None:
            self.kfac.step()
        self.optimizer.step()

    def backward(self) -> None:
        """The part of the step before K-FAC's."""
        self.optimizer.zero_grad()
        with autocast(self.case):
            loss = self.workload.loss()
        loss.backward()  # type: ignore[no-untyped-call]

    def block(self, steps: int) -> float:
        """Seconds per step of so many; the device has finished before both clock readings."""
        start = self.case.now()
        for _ in range(steps):
            self.step()
        return (self.case.now() - start) / steps


class Cycle:
    """Kinds of steps as a function of the step: each once, then blocks of each, again and again.

    Of short steps one more goes before the blocks, not timed: caches hold another variant's data.
    """

    def __init__(self, block_steps: int) -> None:
        self.start = ("decompose", "plain", "factors")  # KFAC decomposes in its first step
        self.warm = 1 if block_steps > 1 else 0
        self.blocks = (("plain", block_steps), ("factors", block_steps), ("decompose", 1))
        self.cycle = ["plain"] * self.warm + [kind for kind, n in self.blocks for _ in range(n)]

    def kind(self, step: int) -> str:
        """The kind of a step."""
        if step < len(self.start):
            return self.start[step]
        return self.cycle[(step - len(self.start)) % len(self.cycle)]

    def every(self, *kinds: str) -> Schedule:
        """For KFAC: an interval of 1 at steps of these kinds, one that misses the step else."""
        return lambda step: 1 if self.kind(step) in kinds else step + 1


def at_once() -> dict[str, bool]:
    """Keywords with which KFAC makes all decompositions in one step."""
    return {"spread": False} if "spread" in inspect.signature(KFAC).parameters else {}


def time_kinds(
    case: Case, methods: Sequence[str], rounds: int, *, budget_s: float = float("inf"),
    on_round: Callable[[int, float], None] = lambda done, seconds: None,
) -> Timing:  # fmt: skip
    """SGD and each method, block by block in turn, in an order that rotates with the round.

    Ends after ``rounds``, or before a round (never the first) that would not fit ``budget_s``.
    """
    started, cpu = time.perf_counter(), time.process_time()
    sgd = Variant(case, None)
    sgd.block(2)
    steps = min(5 if case.device == "cpu" else 20, max(1, int(BLOCK_S / sgd.block(1))))
    result, cycle = Timing(sgd.workload.shape, steps), Cycle(steps)
    variants: dict[str, Variant] = {}
    for m in methods:
        factors, decompose = cycle.every("factors", "decompose"), cycle.every("decompose")
        variants[m] = variant = Variant(case, m, factors, decompose, **at_once())
        result.first_step_s[m] = variant.block(1)
        variant.block(len(cycle.start) - 1)
        assert variant.kfac is not None
        result.floor_flop[m] = floor_flops(variant.kfac, sgd.workload)
        result.methods[m] = {kind: [] for kind in KINDS}
        result.stage_s[m] = {kind: {} for kind in KINDS}
    turns: list[str | None] = [None, *methods]
    for done in range(rounds):
        begun = time.perf_counter()
        result.gemm_flop_s.append(matmul_rate(case))
        for name in turns[done % len(turns) :] + turns[: done % len(turns)]:
            variant = sgd if name is None else variants[name]
            for _ in range(cycle.warm):
                variant.step()
            if name is None:
                result.sgd_s.append(sgd.block(steps))
            else:
                _time_blocks(variant, cycle, result.methods[name], result.stage_s[name])
        now = time.perf_counter()
        on_round(done + 1, now - begun)
        if now - started + (now - begun) > budget_s:
            break
    result.cpu_share = (time.process_time() - cpu) / (time.perf_counter() - started)
    return result


def _time_blocks(
    variant: Variant,
    cycle: Cycle,
    times: dict[str, list[float]],
    stages: dict[str, dict[str, list[float]]],
) -> None:
    for kind, steps in cycle.blocks:
        times[kind].append(variant.block(steps))
        if variant.kfac is not None and variant.case.device == "cpu":  # a GPU's host runs ahead
            for op, seconds in variant.kfac.statistics()["stage_s"].items():
                stages[kind].setdefault(op, []).append(seconds)


def run_intervals(
    case: Case, methods: Sequence[str], factor_freq: int, update_freq: int, intervals: int
) -> dict[str, list[float]]:
    """Seconds of every step of whole intervals, K-FAC's own spreading included; turns of a tenth.

    By method, and ``sgd``. The first step, which makes every decomposition, comes before the
    intervals: 1 + intervals * update_freq figures.
    """
    variants = {"sgd": Variant(case, None)}
    variants |= {m: Variant(case, m, factor_freq, update_freq) for m in methods}
    seconds: dict[str, list[float]] = {name: [v.block(1)] for name, v in variants.items()}
    turn = max(1, update_freq // 10)
    for start in range(0, intervals * update_freq, turn):
        for name, variant in variants.items():
            n = min(turn, intervals * update_freq - start)
            seconds[name] += [variant.block(1) for _ in range(n)]
    return seconds


def set_precision(precision: str) -> None:
    """For the process: fp32 is IEEE's; tf32, and bf16 in what autocast leaves alone, TF32."""
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}: choose from {', '.join(PRECISIONS)}")
    mode = "ieee" if precision == "fp32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]


def autocast(case: Case) -> Any:
    """bf16 autocast of the forward pass where the case asks for it."""
    if case.precision == "bf16":
        return torch.autocast(case.device, dtype=torch.bfloat16)
    return nullcontext()


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def matmul_rate(case: Case, n: int = 2048) -> float:
    """FLOP/s of an fp32 product of n x n (TF32 unless the precision is fp32): the floor's unit."""
    x = torch.ones(n, n, device=case.device)
    seconds = []
    for _ in range(2):
        start = case.now()
        x @ x
        seconds.append(case.now() - start)
    return float(2 * n**3 / min(seconds))
