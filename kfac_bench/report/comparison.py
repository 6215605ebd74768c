"""A comparison of runs: settings, a result row per setting, notes, and one sentence per task."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.errors import UsageError
from kfac_bench.output import duration_text
from kfac_bench.record import score
from kfac_bench.record.runs import (
    Run,
    Setting,
    clock,
    find,
    group,
    has_kfac,
    load,
    option,
    plain,
    target,
    was_computed,
)
from kfac_bench.record.score import Row, notes, row


@dataclass(frozen=True)
class Comparison:
    """Settings, their result rows in the same order, and notes on both."""

    settings: list[Setting]
    rows: list[Row]
    notes: list[str]


def read(paths: Iterable[Path]) -> Comparison:
    """Read the runs at ``paths``: run directories, event files, or folders of runs.

    A path without a readable run is left out with a note, so a user can name ``runs/*``. Computed
    cells of a benchmark are not runs. Raises :class:`UsageError` for a path that does not exist,
    and if no run is left.
    """
    runs: list[Run] = []
    faults: list[UsageError] = []
    for path in paths:
        try:
            files = find(path)
        except UsageError as error:
            if not path.exists():
                raise  # Most likely a typing error: a note below a table would be overlooked.
            files = []
            faults.append(error)
        for file in files:
            try:
                run = load(file)
            except UsageError as error:
                faults.append(error)
            else:
                runs += [] if was_computed(run) else [run]
    if not runs:
        nothing = UsageError("no runs to compare; give run directories or a folder of runs")
        raise next(iter(faults), nothing)
    settings = group(runs)
    alone = len(settings) > 1 and len({s.task for s in settings}) == len(settings)
    left_out = [f"left out: {text}" for text in dict.fromkeys(plain(fault) for fault in faults)]
    left_out += [UNLIKE] if alone else []
    return Comparison(settings, [row(s) for s in settings], notes(settings) + left_out)


UNLIKE = (
    "nothing is compared: no two settings have the same data, model, metric and target; "
    "give runs that differ in the optimizer or in kfac.enabled"
)


def folder_of(path: Path) -> Path:
    """Return the resolved folder of the page at ``path``; raise :class:`UsageError` without one."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist; create it first")
    return folder.resolve()


LEVEL = 1.05
"""Two medians whose ratio is below this number are about equal."""


def finding(settings: Sequence[Setting]) -> str:
    """Return the sentence that compares K-FAC with the best other optimizer of one task.

    Without a target it compares the metric after equal time and after equal steps. It is empty if
    there is no setting to compare with, nothing was evaluated, or the settings have two clocks.
    """
    if len({clock(run) for setting in settings for run in setting.runs}) > 1:
        return ""
    started, goal = settings[0].runs[0].started, target(settings[0].runs[0])
    with_kfac = [s for s in settings if has_kfac(s.runs[0])]
    others = [s for s in settings if not has_kfac(s.runs[0])]
    if not with_kfac or not others:
        return ""
    name_of_metric = plain(started.metric).replace("_", " ")
    if goal is None:
        return _after_equal_work(with_kfac, others, name_of_metric)
    ours, best = _fastest(with_kfac), _fastest(others)
    name = _our_name(with_kfac, ours.optimizer)
    rival, metric = plain(best.optimizer), f"{name_of_metric} {goal:.12g}"
    ours_s, best_s = ours.seconds.median, best.seconds.median
    if any(math.isinf(each.seconds.median) and each.reached for each in (ours, best)):
        # At least half of the seeds missed the target, but not all.
        return f"{name} reaches {metric} {_on_seeds(ours)}, {rival} {_on_seeds(best)}"
    if math.isinf(ours_s):
        if math.isinf(best_s):
            return f"No optimizer reaches {metric}"
        return f"{rival} reaches {metric}, {name} does not"
    if math.isinf(best_s):
        return f"Only {name} reaches {metric}"
    if min(ours_s, best_s) <= 0 or _level(ours, best):
        return f"No difference is shown between {name} and {rival} to {metric}"
    if ours_s < best_s:
        return f"{name} is {best_s / ours_s:.1f}x faster than {rival} to {metric}"
    return f"{rival} is {ours_s / best_s:.1f}x faster than {name} to {metric}"


@dataclass(frozen=True)
class EqualWork:
    """The metric of settings after the same work, such as ``100 steps``.

    ``values`` has the median over seeds of each setting, in order.
    """

    work: str
    values: Sequence[float]


def equal_work(settings: Sequence[Setting]) -> list[EqualWork]:
    """Return the metric of one task's settings after the time and after the steps that all have.

    Empty if a run was never evaluated, or diverged: the comparison would end just before. A time
    or a number of steps is left out if a run was evaluated only later: it began at a checkpoint of
    another run.
    """
    runs = [run for s in settings for run in s.runs]
    if not all(math.isfinite(score.final_metric(run)) for run in runs):
        return []
    curves = [[score.points(run, metric=True) for run in s.runs] for s in settings]
    if not all(curve for runs in curves for curve in runs):
        return []
    found = []
    for axis in (1, 0):
        limit = min(curve[-1][axis] for runs in curves for curve in runs)
        early = [[[p for p in curve if p[axis] <= limit] for curve in runs] for runs in curves]
        if not all(each for runs in early for each in runs):
            continue
        # A point begins with its step, so the largest is the last.
        values = [statistics.median(max(each)[2] for each in runs) for runs in early]
        time = f"{limit:.3g} s" if limit < 60 else duration_text(limit)
        found.append(EqualWork(f"{time} of training" if axis else f"{limit:.0f} steps", values))
    return found


def _after_equal_work(ours: Sequence[Setting], others: Sequence[Setting], metric: str) -> str:
    """Return the sentence that compares the metric after equal work; empty if it is unknown."""
    sign = 1 if ours[0].runs[0].started.higher_is_better else -1
    parts = []
    for each in equal_work([*ours, *others]):
        values = each.values
        mine = max(range(len(ours)), key=lambda i: sign * values[i])
        best = max(range(len(ours), len(values)), key=lambda i: sign * values[i])
        name = _our_name(ours, ours[mine].optimizer)
        rival = plain(others[best - len(ours)].optimizer)
        parts.append(
            f"after {each.work} {name} has {metric} {values[mine]:.4g}, {rival} {values[best]:.4g}"
        )
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]


def _our_name(with_kfac: Sequence[Setting], label: str) -> str:
    """Return the name of the setting with this label: K-FAC if only one setting has K-FAC."""
    name = option(with_kfac[0].runs[0].started.config, "optimizer", "name")
    return "K-FAC" if len(with_kfac) == 1 and name != EIGEN_ADAM else plain(label)


def _fastest(settings: Sequence[Setting]) -> Row:
    """Return the row with the shortest median time; of misses the one with the most good seeds."""
    rows = [row(setting) for setting in settings]
    return min(rows, key=lambda line: (line.seconds.median, -line.reached / line.seeds))


def _on_seeds(line: Row) -> str:
    return f"on {line.reached} of {line.seeds} seeds"


def _level(one: Row, other: Row) -> bool:
    """Return whether medians are about equal, or each median is within the seeds of the other."""
    fast, slow = sorted((one, other), key=lambda line: line.seconds.median)
    if slow.seconds.median < LEVEL * fast.seconds.median:
        return True
    # Seeds differ by more than the medians do: the difference may be chance.
    return fast.seconds.high > slow.seconds.median and slow.seconds.low < fast.seconds.median
