"""Measured scaling as tables: the efficiency of strategies, and the stages of their steps."""

import math
from collections.abc import Iterable, Sequence

from kfac_bench.benchmark.scaling.measured import (
    STAGES,
    ScalingPoint,
    efficiency,
    measure,
    over_first_order,
)
from kfac_bench.record.runs import Run
from kfac_bench.report.tables import DASH, Table, Value


def tables(runs: Iterable[Run]) -> list[Table]:
    """Return the tables that these runs can fill.

    The table of efficiency needs several numbers of ranks. The table of stages needs K-FAC.
    """
    points = measure(runs)
    several = len({p.world_size for p in points}) > 1
    tables = [_scaling(points)] if several else []
    return tables + ([_stages(points)] if any(p.stages_s for p in points) else [])


def scaling_table(runs: Iterable[Run]) -> Table:
    """Return the step, throughput and efficiency of each strategy on each number of ranks.

    :func:`~kfac_bench.benchmark.scaling.measured.efficiency` defines the efficiency.
    """
    return _scaling(measure(runs))


def stage_table(runs: Iterable[Run]) -> Table:
    """Return the milliseconds of one run of each of K-FAC's stages (the paper's Fig. 7)."""
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
            over_first_order(points, p),
            p.payload_bytes / 1e6 if p.stages_s else None,
        )
        for p in points
    ]
    notes = [
        "efficiency: throughput per rank over that of the same strategy on its fewest ranks",
        "x without K-FAC: time of the step over that of the optimizer alone",
        "payload: mean bytes of K-FAC's messages per step",
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
        "milliseconds of one run of a stage; only the column of the mean divides by all steps; "
        "mean over ranks; waiting for a message belongs to the stage that sends the message",
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
    """Return the ratio that the paper states for Fig. 7, if both its strategies were measured."""
    notes = []
    for p in (p for p in points if p.strategy == "comm_opt" and p.world_size > 1):
        other = [q for q in points if (q.task, q.strategy) == (p.task, "layer_wise")]
        for q in (q for q in other if q.world_size == p.world_size):
            gradients = q.stages_s["gradient share"] * q.every["gradient share"]
            if gradients > 0:
                ratio = p.stages_s["their share"] * p.every["their share"] / gradients
                notes.append(
                    f"{p.world_size} ranks: sharing decompositions in comm_opt takes {ratio:.2g} "
                    f"times as long as sharing gradients in layer_wise (the paper, 64 V100: 3.4)"
                )
    return notes


def _parts_of_intervals(points: Sequence[ScalingPoint]) -> list[str]:
    """Return a note on points whose steps are no whole number of intervals."""
    odd = [p for p in points if p.steps % (p.rounds * math.lcm(*p.every.values()))]
    if not odd:
        return []
    which = ", ".join(f"{p.strategy} on {p.world_size}" for p in odd)
    return [
        f"not measured over whole intervals: {which}; rare stages count too often or too rarely"
    ]


def _notes(points: Sequence[ScalingPoint]) -> list[str]:
    notes = []
    if points:
        rounds, steps = _range(p.rounds for p in points), _range(p.steps for p in points)
        notes.append(
            f"medians of {rounds} rounds, {steps} steps per point, without the first window"
        )
    short = sorted({p.world_size for p in points if p.is_short_of_cores})
    if short:
        which = ", ".join(map(str, short))
        notes.append(f"{which} ranks share cores: their times do not hold for more machines")
    return notes


def _range(numbers: Iterable[int]) -> str:
    """Return ``3``, or ``3 to 5`` if the numbers differ."""
    ends = sorted(set(numbers))
    return str(ends[0]) if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def _percent(value: float) -> float | None:
    return None if math.isnan(value) else 100 * value
