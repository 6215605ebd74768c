"""Measured scaling as tables: efficiency, and the stages of a step beside each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kfac_bench.benchmark.scaling.measured import STAGES, ScalingPoint, efficiency, measure
from kfac_bench.record.runs import Run
from kfac_bench.report.tables import DASH, Table, Value


def tables(runs: Iterable[Run]) -> list[Table]:
    """Those that the runs say something for: none of runs on one number of ranks without K-FAC."""
    points = measure(runs)
    several = len({p.world_size for p in points}) > 1
    found = [_scaling(points)] if several else []
    return found + ([_stages(points)] if any(p.stages_s for p in points) else [])


def scaling_table(runs: Iterable[Run]) -> Table:
    """Step, throughput and scaling efficiency of each strategy on each number of ranks.

    See :func:`~kfac_bench.benchmark.scaling.measured.efficiency`.
    """
    return _scaling(measure(runs))


def stage_table(runs: Iterable[Run]) -> Table:
    """Milliseconds of K-FAC's stages, each time that they run (the paper's Fig. 7)."""
    return _stages(measure(runs))


def _scaling(points: Sequence[ScalingPoint]) -> Table:
    columns = (
        "task",
        "strategy",
        "ranks",
        "batch",
        "ms/step",
        "range",
        "examples/s",
        "efficiency, %",
        "x without K-FAC",
        "payload, MB",
    )
    rows: list[Sequence[Value]] = [
        (
            p.task,
            p.strategy,
            p.world_size,
            p.batch_size,
            1e3 * p.step_s,
            f"{1e3 * p.low_s:.4g} {DASH} {1e3 * p.high_s:.4g}",
            p.examples_per_s,
            _percent(efficiency(points, p)),
            _over_first_order(points, p),
            p.payload_bytes / 1e6 if p.stages_s else None,
        )
        for p in points
    ]
    notes = [
        "efficiency: of a rank, against the fewest ranks of the same strategy",
        "x without K-FAC: the step against the optimizer's alone",
        "payload: of K-FAC's messages, mean of a step",
        *_notes(points),
    ]
    return _table("Scaling, measured", points, columns, rows, notes)


def _stages(points: Sequence[ScalingPoint]) -> Table:
    kfac = [p for p in points if p.stages_s]
    columns = ("task", "strategy", "ranks", *STAGES, "mean of a step", "steps between")
    rows: list[Sequence[Value]] = []
    for p in kfac:
        stages_ms = [1e3 * p.stages_s[stage] * p.every[stage] for stage in STAGES]
        mean_ms = 1e3 * sum(p.stages_s.values())
        intervals = " / ".join(map(str, sorted(set(p.every.values()))))
        rows.append((p.task, p.strategy, p.world_size, *stages_ms, mean_ms, intervals))
    notes = [
        "milliseconds each time the stage runs, but for the mean of a step; mean of the ranks; "
        "waiting for a message is in the stage that sends it",
        *_shares(kfac),
        *_parts_of_intervals(kfac),
        *_notes(kfac),
    ]
    return _table("Stages of a K-FAC step, measured", kfac, columns, rows, notes)


def _table(
    title: str,
    points: Sequence[ScalingPoint],
    columns: Sequence[str],
    rows: Sequence[Sequence[Value]],
    notes: Sequence[str],
) -> Table:
    """Return the table. One task stands in the title; several tasks keep the first column."""
    tasks = list(dict.fromkeys(p.task for p in points))
    if len(tasks) > 1:
        return Table(title, columns, rows, notes)
    title += "".join(f": {task}" for task in tasks)
    return Table(title, columns[1:], [row[1:] for row in rows], notes)


def _shares(points: Sequence[ScalingPoint]) -> list[str]:
    """The paper's one number of Fig. 7, where both its strategies were measured on many ranks."""
    found = []
    for p in (p for p in points if p.strategy == "comm_opt" and p.world_size > 1):
        other = [q for q in points if (q.task, q.strategy) == (p.task, "layer_wise")]
        for q in (q for q in other if q.world_size == p.world_size):
            gradients = q.stages_s["gradient share"] * q.every["gradient share"]
            if gradients > 0:
                ratio = p.stages_s["their share"] * p.every["their share"] / gradients
                found.append(
                    f"{p.world_size} ranks: comm_opt's share of decompositions takes {ratio:.2g} "
                    f"times layer_wise's share of gradients (the paper, 64 V100: 3.4)"
                )
    return found


def _parts_of_intervals(points: Sequence[ScalingPoint]) -> list[str]:
    odd = [p for p in points if p.steps % (p.rounds * math.lcm(*p.every.values()))]
    if not odd:
        return []
    which = ", ".join(f"{p.strategy} on {p.world_size}" for p in odd)
    return [f"not measured over whole intervals: {which}; rare stages are over or under"]


def _notes(points: Sequence[ScalingPoint]) -> list[str]:
    notes = []
    if points:
        rounds = sorted({p.rounds for p in points})
        steps = sorted({p.steps for p in points})
        said = " to ".join(map(str, (rounds[0], rounds[-1]) if len(rounds) > 1 else rounds))
        some = " to ".join(map(str, (steps[0], steps[-1]) if len(steps) > 1 else steps))
        notes.append(
            f"medians of {said} rounds, {some} steps each point, the first window left out"
        )
    short = sorted({p.world_size for p in points if p.short_of_cores})
    if short:
        which = ", ".join(map(str, short))
        notes.append(f"{which} ranks share cores: their seconds say nothing of more machines")
    return notes


def _over_first_order(points: Sequence[ScalingPoint], point: ScalingPoint) -> float | None:
    """How many steps without K-FAC, on as many ranks and with the same batch, one of this takes."""
    key = (point.task, point.world_size, point.batch_size)
    bare = [p for p in points if not p.every and (p.task, p.world_size, p.batch_size) == key]
    return point.step_s / bare[0].step_s if len(bare) == 1 and point.every else None


def _percent(value: float) -> float | None:
    return None if math.isnan(value) else 100 * value
