"""Numbers of training beside the curves: at equal work, of a step by stage, and of K-FAC's layers.

Event files are not trusted: a number may not be finite, and steps may run backwards.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kfac_bench.output import duration_text, size_text
from kfac_bench.record import score
from kfac_bench.record.events import Resumed, Trained
from kfac_bench.record.runs import Run, Setting, number, plain, target
from kfac_bench.record.score import HUGE, median_run
from kfac_bench.record.sinks.panels import STAGES
from kfac_bench.report.comparison import equal_work
from kfac_bench.report.page_parts import HtmlCell, HtmlTable, cell
from kfac_bench.report.tables import DASH, metric

MODEL, WAITING, OTHER = "forward, backward, optimizer", "waiting for data", "other"
PARTS = (MODEL, WAITING, *STAGES, OTHER)
"""The parts of a step: those of every optimizer, then those of K-FAC."""
_STAGE_OF = {op: stage for stage, ops in STAGES.items() for op in ops}


@dataclass(frozen=True)
class StepTime:
    """Mean milliseconds of a step by part, for each setting that recorded training steps.

    ``names`` are the parts that are not 0 everywhere. A row has a setting and its values.
    """

    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]

    @property
    def longest(self) -> float:
        """The largest sum of a row, above zero."""
        return max(sum(means) for _, means in self.rows)


def step_time(settings: Sequence[Setting]) -> StepTime | None:
    """Return the times of one task; None if no run recorded the time of steps."""
    found = {s.optimizer: means for s in settings if sum((means := _means_ms(s)).values()) > 0}
    names = [name for name in PARTS if any(means.get(name) for means in found.values())]
    rows = [(label, [means.get(name, 0.0) for name in names]) for label, means in found.items()]
    return StepTime(names, rows) if rows else None


def _means_ms(setting: Setting) -> dict[str, float]:
    """Return the means over all steps of all runs, by part."""
    steps, total_s = part_seconds(setting.runs)
    return {part: 1e3 * max(0.0, seconds) / steps for part, seconds in total_s.items()}


def part_seconds(runs: Iterable[Run]) -> tuple[float, dict[str, float]]:
    """Return the number of steps of all runs, and their seconds by part.

    The means of an event hold for the steps since the event before, so they weigh as many steps.
    Steps before the start of a run from another run's checkpoint are not its own.
    """
    steps, total_s = 0.0, defaultdict[str, float](float)
    for run in runs:
        before, before_s = 0.0, 0.0
        for event in run.events:
            if isinstance(event, Resumed):
                # The means of the next event hold since this start, not since the event before.
                before, before_s = number(event.step), number(event.train_s)
            if not isinstance(event, Trained):
                continue
            step, train_s = number(event.step), number(event.train_s)
            here, here_s = step - before, train_s - before_s
            before, before_s = step, train_s
            if not (0 < here < HUGE and 0 < here_s < HUGE):
                continue
            steps += here
            total_s[MODEL] += here_s
            share = number(event.data_wait_share)
            parts = {WAITING: here_s * share if 0 <= share <= 1 else 0.0}
            for op, mean_s in event.stage_mean_s.items():
                if 0 < number(mean_s) < HUGE:
                    stage = _STAGE_OF.get(op, OTHER)
                    parts[stage] = parts.get(stage, 0.0) + here * mean_s
            for part, seconds in parts.items():
                total_s[part] += seconds
                total_s[MODEL] -= seconds
    return steps, total_s


def numbers_table(settings: Sequence[Setting]) -> HtmlTable:
    """Return the medians over seeds of one task: metric at equal work, time and memory."""
    name = plain(settings[0].runs[0].started.metric).replace("_", " ")
    works = equal_work(settings)
    columns = [f"{name} after {each.work}" for each in works]
    final = target(settings[0].runs[0]) is None
    rows = []
    for i, setting in enumerate(settings):
        values = [each.values[i] for each in works]
        values += [score.row(setting).final] if final else []
        step_ms = sum(_means_ms(setting).values())
        rows.append(
            [
                HtmlCell(setting.optimizer),
                *(cell(value, metric(value)) for value in values),
                _shown(median_of(map(_train_s, setting.runs)), duration_text),
                _shown(step_ms or math.nan, milliseconds),
                _shown(median_of(map(memory_bytes, setting.runs)), size_text),
            ]
        )
    names = ["optimizer", *columns, *([f"final {name}"] if final else [])]
    return HtmlTable("Numbers", (*names, "training time", "time per step", "memory"), rows)


def milliseconds(value: float) -> str:
    """Write milliseconds with three digits, or as seconds from 1 s on; a dash for 0."""
    if value == 0:
        return DASH
    return f"{value:.3g} ms" if value < 999.5 else duration_text(value / 1e3)


def _shown(value: float, write: Callable[[float], str]) -> HtmlCell:
    return cell(value, write(value)) if math.isfinite(value) else cell(None)


def median_of(values: Iterable[float]) -> float:
    """Return the median of the finite values; NaN without a finite value."""
    known = [value for value in values if math.isfinite(value)]
    return statistics.median(known) if known else math.nan


def _train_s(run: Run) -> float:
    return max((number(e.train_s) for e in run.events if abs(e.train_s) < HUGE), default=math.nan)


def memory_bytes(run: Run) -> float:
    """Return the peak memory of a rank; NaN if it was not recorded."""
    values = [number(event.peak_memory_bytes) for event in run.trained]
    return max((x for x in values if 0 < x < HUGE), default=math.nan)


MOST_LAYERS, AT_AN_END, MOST_CELLS, LEVELS = 12, 3, 24, 6
"""Layers of a table, layers that it shows at each end of the model, cells of a layer's strip, and
shades of a cell."""


@dataclass(frozen=True)
class LayerRow:
    """A layer: the shades of its cosines over the steps, and its numbers as text.

    ``cosines`` and ``conditions`` are the first and the last value.
    """

    name: str
    shades: Sequence[int]
    cosines: tuple[HtmlCell, HtmlCell]
    conditions: tuple[HtmlCell, HtmlCell]


@dataclass(frozen=True)
class LayerTable:
    """The layers of K-FAC in the median run of a setting, in the order of the model."""

    optimizer: str
    rows: Sequence[LayerRow]
    count: int
    """All layers. If there are more than rows, the table has the first and the last layers, and
    those with the smallest cosine or the largest condition number at the end."""


def layer_tables(settings: Sequence[Setting]) -> list[LayerTable]:
    """Return the tables of the settings that recorded cosines or condition numbers of layers."""
    return [table for setting in settings if (table := _layer_table(setting))]


def _layer_table(setting: Setting) -> LayerTable | None:
    trained = median_run(setting).trained
    cosines = _by_layer(event.cosine for event in trained)
    conditions = _by_layer(event.condition for event in trained)
    names = list(dict.fromkeys([*cosines, *conditions]))
    if not names:
        return None
    rows = [
        LayerRow(
            plain(name),
            _shades(cosines.get(name, [])),
            _ends(cosines.get(name, []), lambda value: f"{value:.2f}"),
            _ends(conditions.get(name, []), condition_text),
        )
        for name in _chosen(names, cosines, conditions)
    ]
    return LayerTable(setting.optimizer, rows, len(names))


def _by_layer(rows: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    found = defaultdict[str, list[float]](list)
    for row in rows:
        for name, value in row.items():
            if abs(value) < HUGE:
                found[name].append(value)
    return dict(found)


def _chosen(
    names: Sequence[str],
    cosines: Mapping[str, Sequence[float]],
    conditions: Mapping[str, Sequence[float]],
) -> list[str]:
    """Return the layers to show, in their order."""
    if len(names) <= MOST_LAYERS:
        return list(names)
    worst = sorted((x for x in names if x in cosines), key=lambda x: cosines[x][-1])
    stiff = sorted((x for x in names if x in conditions), key=lambda x: -conditions[x][-1])
    kept = {*names[:AT_AN_END], *names[-AT_AN_END:], *worst[:AT_AN_END], *stiff[:AT_AN_END]}
    return [name for name in names if name in kept]


def _shades(values: Sequence[float]) -> list[int]:
    """Return a shade for each of at most ``MOST_CELLS`` stretches of the cosines, by their mean."""
    count = min(len(values), MOST_CELLS)
    edges = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    return [min(LEVELS - 1, max(0, int(LEVELS * mean))) for mean in means]


def _ends(values: Sequence[float], write: Callable[[float], str]) -> tuple[HtmlCell, HtmlCell]:
    if not values:
        return HtmlCell(DASH, "none"), HtmlCell(DASH, "none")
    return cell(values[0], write(values[0])), cell(values[-1], write(values[-1]))


def condition_text(value: float) -> str:
    """Write a condition number with two digits, or all before the point: ``7.3``, ``1,940``."""
    if value >= 1e7:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits} \u00b7 10^{int(exponent)}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
