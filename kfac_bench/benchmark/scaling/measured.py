"""The measured step, from event files: its seconds, its K-FAC stages and its bytes. No torch.

The first window between two Trained events is left out, because it warms up and all of its
decompositions are due at once. The rounds of a point (same strategy, ranks and batch) become
medians.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kfac_bench.output import counted
from kfac_bench.record.events import Resumed, Trained
from kfac_bench.record.runs import Run, has_kfac, number, option, plain

STAGES: Mapping[str, tuple[str, ...]] = {
    "factors": ("ComputeFactor", "ComputeSecondMoment"),
    "factor reduction": ("ReduceScales", "ReduceFactors", "ReduceSecondMoments"),
    "decompositions": ("Decompose",),
    "their share": ("ShareDecompositions",),
    "precondition": ("Precondition",),
    "gradient share": ("GatherGradients", "ShareGradients"),
    "scale": ("ReduceProducts", "WriteBack"),
}
"""The stages of the paper's Fig. 7, each with our kinds of op. Waiting for a message belongs to the
stage that sends the message."""
EVERY = {
    **dict.fromkeys(("factors", "factor reduction"), "factor_update_freq"),
    **dict.fromkeys(("decompositions", "their share"), "update_freq"),
}
"""The option of kfac with the interval of a stage. All other stages run in each step."""


@dataclass(frozen=True)
class ScalingPoint:
    """One strategy on one number of ranks: medians over rounds, with the seconds of a step."""

    task: str
    strategy: str
    world_size: int
    batch_size: int
    """Examples of all ranks in a step."""
    step_s: float
    low_s: float
    """The fastest round; ``high_s`` is the slowest round."""
    high_s: float
    stages_s: Mapping[str, float]
    """Mean seconds of each stage in :data:`STAGES` per step; empty without K-FAC."""
    every: Mapping[str, int]
    """Steps between two runs of each stage."""
    payload_bytes: float
    """Mean bytes of K-FAC's messages per step."""
    rounds: int
    steps: int
    """Number of measured steps in all rounds."""
    is_short_of_cores: bool

    @property
    def series(self) -> tuple[object, ...]:
        """The values that all points of a line in the figure share."""
        return self.task, self.strategy, tuple(self.every.values())

    @property
    def examples_per_s(self) -> float:
        """The throughput of all ranks."""
        return self.batch_size / self.step_s

    @property
    def rest_s(self) -> float:
        """The seconds of everything but K-FAC: forward, backward, gradients and optimizer."""
        return max(0.0, self.step_s - sum(self.stages_s.values()))


def efficiency(points: Sequence[ScalingPoint], point: ScalingPoint) -> float:
    """Return the scaling efficiency E(n) = (X(n) / n) / (X(b) / b), or NaN if X(b) is zero.

    X(n) is the throughput of n ranks in examples per second. b is the smallest number of ranks on
    which the same strategy was measured. T(n) is the time of a step. Weak scaling (the same
    examples per rank) has E(n) = T(b) / T(n). Strong scaling (the same batch) has
    E(n) = b T(b) / (n T(n)).
    """
    alike = [p for p in points if p.series == point.series]
    base = min(alike, key=lambda p: p.world_size, default=point)
    each = base.examples_per_s / base.world_size
    return point.examples_per_s / point.world_size / each if each > 0 else math.nan


def over_first_order(points: Sequence[ScalingPoint], point: ScalingPoint) -> float | None:
    """Return the time of a K-FAC step over that without K-FAC, on the same ranks and batch.

    It is None for a step without K-FAC, and if there is no single step to compare with.
    """
    key = (point.task, point.world_size, point.batch_size)
    bare = [p for p in points if not p.every and (p.task, p.world_size, p.batch_size) == key]
    return point.step_s / bare[0].step_s if len(bare) == 1 and point.every else None


def step_finding(points: Sequence[ScalingPoint]) -> str:
    """Return by how much K-FAC lengthens a step on the most ranks; "" if that is not known."""
    most = max((p.world_size for p in points), default=0)
    last = [(over_first_order(points, p), p) for p in points if p.world_size == most]
    ratios = sorted(ratio for ratio, _ in last if ratio is not None)
    if not ratios:
        return ""
    low, high = f"{ratios[0]:.2f}x", f"{ratios[-1]:.2f}x"
    extent = low if low == high else f"{low} to {high}"
    return f"On {counted(most, 'rank')} a step with K-FAC takes {extent} the time of a step without"


def efficiency_finding(points: Sequence[ScalingPoint]) -> str:
    """Return the best and the worst efficiency on the most ranks; "" for one number of ranks."""
    most = max((p.world_size for p in points), default=0)
    shares = {p.strategy: 100 * efficiency(points, p) for p in points if p.world_size == most}
    shares = {name: share for name, share in shares.items() if math.isfinite(share)}
    if not shares or len({p.world_size for p in points}) < 2:
        return ""
    best, worst = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    words = f"On {counted(most, 'rank')} {best} has an efficiency of {shares[best]:.0f} %"
    return words + (f", {worst} of {shares[worst]:.0f} %" if worst != best else "")


def measure(runs: Iterable[Run]) -> list[ScalingPoint]:
    """Return a point for all runs with the same task, strategy, intervals, ranks and batch.

    Runs with less than two windows of Trained events do not measure a step: they are left out.
    """
    alike: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if len(_windows(run)) > 0 and _world_size(run) > 0:
            every = tuple(_every(run, stage) for stage in STAGES) if has_kfac(run) else ()
            alike[_task(run), strategy(run), every, _world_size(run), _batch(run)].append(run)
    points = [_point(rounds) for rounds in alike.values()]
    return sorted(points, key=lambda p: (p.task, bool(p.every), p.strategy, p.world_size))


def strategy(run: Run) -> str:
    """Return ``comm_opt`` or ``hybrid_opt@0.25``; without K-FAC, the optimizer's name."""
    config = run.started.config
    if not has_kfac(run):
        return plain(option(config, "optimizer", "name") or "unknown optimizer")
    share = option(config, "kfac", "grad_worker_fraction")
    name = plain(option(config, "kfac", "strategy"))
    return with_fraction(name, None if share is None else number(share))


def with_fraction(name: str, share: float | None) -> str:
    """Return the name of a strategy with its fraction of gradient workers."""
    return name if share is None else f"{name}@{share:g}"


def _point(runs: Sequence[Run]) -> ScalingPoint:
    windows = [_windows(run) for run in runs]
    steps = [[after.step - before.step for before, after in each] for each in windows]
    each_s = [
        sum(after.train_s - before.train_s for before, after in each) / sum(taken)
        for each, taken in zip(windows, steps, strict=True)
    ]
    one = runs[0]
    every = {s: _every(one, s) for s in STAGES} if has_kfac(one) else {}
    stages = {}
    for stage in every:
        means = [_stage_s(each, taken, stage) for each, taken in zip(windows, steps, strict=True)]
        stages[stage] = statistics.median(means)
    return ScalingPoint(
        _task(one),
        strategy(one),
        _world_size(one),
        _batch(one),
        statistics.median(each_s),
        min(each_s),
        max(each_s),
        stages,
        every,
        _payload_bytes(one),
        len(runs),
        sum(map(sum, steps)),
        any(map(_short_of_cores, runs)),
    )


def _windows(run: Run) -> list[tuple[Trained, Trained]]:
    """Return the pairs of successive Trained events between which steps and clock advance.

    The steps before the first event are the first window, so they are left out. A run that was
    continued warms up again.
    """
    found: list[tuple[Trained, Trained]] = []
    before: Trained | None = None
    for event in run.events:
        if isinstance(event, Resumed):
            before = None
        elif isinstance(event, Trained):
            if before and event.step > before.step and event.train_s > before.train_s:
                found.append((before, event))
            before = event
    return found


def _stage_s(windows: Sequence[tuple[Trained, Trained]], steps: Sequence[int], stage: str) -> float:
    """Return the mean seconds of a stage per step."""
    total = 0.0
    for (_, event), taken in zip(windows, steps, strict=True):
        total += taken * sum(event.stage_mean_s.get(kind, 0.0) for kind in STAGES[stage])
    return total / sum(steps)


def _every(run: Run, stage: str) -> int:
    return max(1, _whole(option(run.started.config, "kfac", EVERY.get(stage, ""))))


def _payload_bytes(run: Run) -> float:
    """Return the mean bytes per step, for which each stage of the plan counts at its interval."""
    rarely = {"factors": "factors", "decompose": "decompositions"}
    total = 0.0
    for stage, kinds in run.started.payload_bytes.items():
        total += sum(kinds.values()) / _every(run, rarely.get(stage, ""))
    return total


def _short_of_cores(run: Run) -> bool:
    """Return whether the ranks had more threads together than the machine has cores."""
    threads = _whole(option(run.started.environment, "hardware", "threads"))
    cores = _whole(option(run.started.environment, "hardware", "cpu_count"))
    # A run on GPUs, or a job on several nodes, does not compete for the cores of one machine.
    on_cpu = option(run.started.environment, "device") == "cpu"
    one_node = not option(run.started.environment, "slurm_job_id")
    return on_cpu and one_node and 0 < cores < threads * _world_size(run)


def _task(run: Run) -> str:
    model, data = (option(run.started.config, group, "name") for group in ("model", "data"))
    return plain(f"{model} on {data}")


def _world_size(run: Run) -> int:
    return _whole(option(run.started.environment, "world_size"))


def _batch(run: Run) -> int:
    return _whole(option(run.started.config, "trainer", "batch_size"))


def _whole(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < 1 << 31 else 0
