"""Two contests beside each other: what another budget of tuning, for example, changes.

Only seeds that an optimizer has in both contests are compared.
"""

import math
from statistics import median

from kfac_bench.benchmark import machine_speed
from kfac_bench.benchmark.contest_tables import ContestResult
from kfac_bench.errors import UsageError
from kfac_bench.report.tables import Table, Value


def compared(result: ContestResult, name: str, other: ContestResult, other_name: str) -> Table:
    """Return the median seconds to target in both contests, and their ratio.

    The seconds of all sittings are scaled to those of the earliest sitting of both contests.

    Args:
        result: The contest.
        name: Its name.
        other: The contest with which it is compared.
        other_name: Its name.

    Raises:
        UsageError: The contests have no run on the same task with the same optimizer and seed, or
            their baselines differ.
    """
    if result.benchmark.baseline != other.benchmark.baseline:
        raise UsageError(
            f"{name} and {other_name} have different baselines, so their seconds cannot be scaled "
            "to one machine. Compare benchmarks with the same baseline"
        )
    rows: list[list[Value]] = []
    for task, row in result.runs.items():
        if task not in other.runs:
            continue
        speed = machine_speed.factors([*other.baselines[task], *result.baselines[task]])
        for optimizer, runs in row.items():
            own, its = (
                {run.seed: machine_speed.comparable_time_s(run, speed) for run in each}
                for each in (runs, other.runs[task].get(optimizer, []))
            )
            if seeds := own.keys() & its.keys():
                before, after = (median(times[s] for s in seeds) for times in (its, own))
                is_missed = math.isinf(before) and math.isinf(after)
                ratio = None if is_missed or before == 0 else after / before
                rows.append([task, optimizer, len(seeds), before, after, ratio])
    if not rows:
        raise UsageError(f"{name} and {other_name} have no task, optimizer and seed in common")
    columns = ["task", "optimizer", "seeds", f"seconds in {other_name}", f"seconds in {name}"]
    notes = [
        f"Ratio: median seconds to target in {name} over those in {other_name}, on the seeds that "
        "both have; below 1 if the target is reached earlier. It is inf if half of the seeds miss "
        f"the target only in {name}, and 0 if they miss it only in {other_name}",
        "The seconds of all sittings are scaled to the earliest sitting of both contests",
    ]
    return Table(f"Compared with {other_name}", [*columns, "ratio"], rows, notes)
