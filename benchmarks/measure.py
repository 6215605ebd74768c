"""Measure step times of SGD and K-FAC, interleaved in one process, by kind of step.

Decompositions are rare, so whole intervals would take long. Each kind of step is therefore timed
separately, in blocks that alternate, and `benchmarks.intervals` puts an interval together.
`run_intervals` runs whole intervals.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.floor import floor_flops
from benchmarks.models import Size, Workload, build
from kfac_bench.core import KFAC
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.core.schedule import Schedule
from kfac_bench.errors import UsageError

KINDS = ("plain", "factors", "decompose")
"""Kinds of steps: precondition only; also update factors; also decompose them."""
PRECISIONS = ("fp32", "tf32", "bf16")
BLOCK_S = 1.0
"""Approximate duration of a block of short steps."""


@dataclass(frozen=True)
class Case:
    """One model in one precision on one device. The variants of a case differ in K-FAC only."""

    name: str
    size: Size = field(default_factory=Size)
    device: str = "cpu"
    precision: str = "fp32"
    kfac: dict[str, Any] = field(default_factory=dict)
    """Keywords for KFAC, in all variants."""
    adam: bool = False
    """AdamW is the optimizer, in place of SGD; method eigen_adam always has EigenAdam."""
    clock: str = "wall"
    """`wall`, or `cpu`: processor time of one thread, on a core that other programs use too."""

    def now(self) -> float:
        """Wait for the device, and return the seconds of the clock."""
        synchronize(self.device)
        return time.process_time() if self.clock == "cpu" else time.perf_counter()


@dataclass
class Timing:
    """Seconds per step, one value per round."""

    shape: str
    block_steps: int
    sgd_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    """CPU seconds divided by wall seconds: the share of its core that one thread got."""
    gemm_flop_s: list[float] = field(default_factory=list)
    """Results of `matmul_rate`: the machine's speed at the time of the round."""
    methods: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Seconds by method and kind of step."""
    stage_s: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    """Host seconds of `KFAC.statistics`, by method, kind of step and kind of op."""
    first_step_s: dict[str, float] = field(default_factory=dict)
    floor_flop: dict[str, dict[str, float]] = field(default_factory=dict)
    """Results of `floor_flops`, by method and kind of op."""


class Variant:
    """A training loop: model, optimizer, and K-FAC unless `method` is None.

    The optimizer is SGD with momentum if the case does not say otherwise.
    """

    def __init__(
        self, case: Case, method: str | None, factors: Schedule = 1, decompose: Schedule = 1,
        **options: Any,
    ) -> None:  # fmt: skip
        self.case = case
        self.workload: Workload = build(case.name, case.size, case.device)
        model = self.workload.model
        self.optimizer = _optimizer(case, method, model)
        self.kfac: KFAC | None = None
        if method is not None:
            skip = (*inspect.signature(KFAC).parameters["skip"].default, *self.workload.skip)
            # Without early updates the first interval is like the later ones.
            keywords: dict[str, Any] = {"skip": skip, "early_updates": False}
            if method == EIGEN_ADAM:
                keywords |= {"trust_ratio": None, "grafting": False}
            else:
                keywords |= {"damping": 0.03}
            keywords |= case.kfac | options
            try:
                self.kfac = KFAC(
                    model, self.optimizer, method=method,
                    factor_update_freq=factors, update_freq=decompose, **keywords,
                )  # fmt: skip
            except (TypeError, ValueError) as error:
                raise UsageError(f"KFAC of {case.name}: {error}") from error

    def step(self) -> None:
        """Train one step on the workload's batch."""
        self.backward()
        if self.kfac is not None:
            self.kfac.step()
        self.optimizer.step()

    def backward(self) -> None:
        """Run the part of the step before K-FAC."""
        self.optimizer.zero_grad()
        with autocast(self.case):
            loss = self.workload.loss()
        loss.backward()  # type: ignore[no-untyped-call]

    def block(self, steps: int) -> float:
        """Run `steps` steps and return the seconds per step, with the device's work included."""
        start = self.case.now()
        for _ in range(steps):
            self.step()
        return (self.case.now() - start) / steps


def _optimizer(case: Case, method: str | None, model: nn.Module) -> Optimizer:
    if method == EIGEN_ADAM:
        return EigenAdam(model.parameters())
    if case.adam:
        return AdamW(model.parameters())
    return SGD(model.parameters(), lr=1e-3, momentum=0.9)


class Cycle:
    """The order of the kinds of steps: each kind once, then blocks of each kind, repeatedly.

    Before the blocks of short steps goes an untimed step, because the caches hold another variant's
    data.
    """

    def __init__(self, block_steps: int) -> None:
        # KFAC decomposes in its first step.
        self.start = ("decompose", "plain", "factors")
        self.warm = 1 if block_steps > 1 else 0
        self.blocks = (("plain", block_steps), ("factors", block_steps), ("decompose", 1))
        self.cycle = ["plain"] * self.warm + [kind for kind, n in self.blocks for _ in range(n)]

    def kind(self, step: int) -> str:
        """Return the kind of `step`."""
        if step < len(self.start):
            return self.start[step]
        return self.cycle[(step - len(self.start)) % len(self.cycle)]

    def every(self, *kinds: str) -> Schedule:
        """Return a schedule for KFAC by which it works at steps of these kinds only."""
        # An interval of 1 always hits a step, and an interval of step + 1 never does.
        return lambda step: 1 if self.kind(step) in kinds else step + 1


def time_kinds(
    case: Case, methods: Sequence[str], rounds: int, *, budget_s: float = float("inf"),
    on_round: Callable[[int, float], None] = lambda done, seconds: None,
) -> Timing:  # fmt: skip
    """Time SGD and each method in alternating blocks, in an order that rotates with the round.

    The measurement ends after `rounds` rounds, or before a round (never the first) that would not
    fit into `budget_s` seconds.
    """
    started, cpu = time.perf_counter(), time.process_time()
    sgd = Variant(case, None)
    sgd.block(2)
    steps = min(5 if case.device == "cpu" else 20, max(1, int(BLOCK_S / sgd.block(1))))
    result, cycle = Timing(sgd.workload.shape, steps), Cycle(steps)
    variants = {m: _first_steps(case, m, cycle, result, sgd.workload) for m in methods}
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


def _first_steps(
    case: Case, method: str, cycle: Cycle, result: Timing, workload: Workload
) -> Variant:
    """Make a method's variant, do its first steps, and prepare its entries in `result`."""
    factors, decompose = cycle.every("factors", "decompose"), cycle.every("decompose")
    # All decompositions are in one step.
    variant = Variant(case, method, factors, decompose, spread=False)
    result.first_step_s[method] = variant.block(1)
    variant.block(len(cycle.start) - 1)
    assert variant.kfac is not None
    result.floor_flop[method] = floor_flops(variant.kfac, workload)
    result.methods[method] = {kind: [] for kind in KINDS}
    result.stage_s[method] = {kind: {} for kind in KINDS}
    return variant


def _time_blocks(
    variant: Variant,
    cycle: Cycle,
    times: dict[str, list[float]],
    stages: dict[str, dict[str, list[float]]],
) -> None:
    for kind, steps in cycle.blocks:
        times[kind].append(variant.block(steps))
        # With a GPU the host runs ahead, so its seconds say nothing about the stages.
        if variant.kfac is not None and variant.case.device == "cpu":
            for op, seconds in variant.kfac.statistics()["stage_s"].items():
                stages[kind].setdefault(op, []).append(seconds)


def run_intervals(
    case: Case, methods: Sequence[str], factor_freq: int, update_freq: int, intervals: int
) -> dict[str, list[float]]:
    """Time every step of whole intervals, in which K-FAC spreads its decompositions.

    The variants take turns, each for a tenth of an interval.

    Returns:
        The seconds of 1 + intervals * update_freq steps, by method and for `sgd`. The first step,
        which makes every decomposition, comes before the intervals.
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
    """Set the precision of fp32 products in this process: IEEE for fp32, else TF32.

    With bf16, TF32 applies to the products that autocast leaves in fp32.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}: choose from {', '.join(PRECISIONS)}")
    mode = "ieee" if precision == "fp32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]


def autocast(case: Case) -> Any:
    """Return bf16 autocast for the forward pass if the case asks for it."""
    if case.precision == "bf16":
        return torch.autocast(case.device, dtype=torch.bfloat16)
    return nullcontext()


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def matmul_rate(case: Case) -> float:
    """Return the FLOP/s of a product of 2048 x 2048 fp32 matrices; TF32 unless the case is fp32."""
    x = torch.ones(2048, 2048, device=case.device)
    seconds = []
    for _ in range(2):
        start = case.now()
        x @ x
        seconds.append(case.now() - start)
    return 2 * 2048**3 / min(seconds)
