"""The panels of runs as data: sections of charts of the metrics that runs log.

W&B's workspace, TensorBoard's page "Custom Scalars" and the HTML page of ``kfac-bench compare``
show these panels under the same names. :mod:`kfac_bench.record.sinks.view` names the metrics, and a
test compares the names. This file does not depend on W&B. Go and JavaScript must both understand
its patterns.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["line", "area", "bar", "scatter", "options", "media"]

WORLD_SIZE = "environment.world_size"
"""Key of the number of ranks in W&B's config of a run."""
GROUPS = ("model.name", "optimizer.name", "kfac.enabled")
"""Options by which runs are grouped. The seeds of a setting are one line with its range."""
OPTIONS = ("optimizer.name", "optimizer.lr", "kfac.enabled", "kfac.damping", "kfac.update_freq")
"""Options of a panel that has a line for each run through its options and its result."""
STAGES = {
    "statistics": ("ComputeFactor", "ComputeSecondMoment"),
    "decompositions": ("Decompose",),
    "preconditioning": ("Precondition", "WriteBack"),
    "communication": (
        "ReduceScales",
        "ReduceFactors",
        "ReduceSecondMoments",
        "ShareDecompositions",
        "GatherGradients",
        "ReduceProducts",
        "ShareGradients",
    ),
}
"""The stages of K-FAC's step, each with its kinds of op."""


@dataclass(frozen=True)
class Chart:
    """One panel.

    A line or an area is drawn over ``x``. A bar shows a run's last value. A scatter plot has the
    option ``x`` and one key. The kind ``options`` has :data:`OPTIONS` and one key.
    """

    title: str
    kind: Kind
    keys: tuple[str, ...] = ()
    """Names of metrics."""
    pattern: str = ""
    """Regular expression of names of metrics, instead of ``keys``."""
    x: str = ""
    by: str = ""
    """Option to group runs by, instead of :data:`GROUPS`."""
    log: bool = False
    unit: str = ""


@dataclass(frozen=True)
class ChartSection:
    """Charts below a heading; ``about`` is the text between the two in the report."""

    name: str
    about: str
    charts: tuple[Chart, ...]


def _over(x: str, *charts: Chart) -> tuple[Chart, ...]:
    return tuple(Chart(**{**vars(chart), "x": x}) for chart in charts)


_STAGE_MEANS = tuple(f"kfac/stage_mean_s/{op}" for ops in STAGES.values() for op in ops)
_CURVES = (
    Chart("validation", "line", pattern=r"eval/.+"),
    Chart("training loss", "line", ("train/loss",), log=True),
)

CURVES = (
    Chart("learning rate", "line", ("train/lr",), x="step"),
    Chart("nu", "line", ("kfac/nu",), x="step", log=True),
    Chart("cosine, median of layers", "line", ("kfac/cosine_median",), x="step"),
    Chart("cosine, smallest of layers", "line", ("kfac/cosine_min",), x="step"),
    Chart("condition, largest of layers", "line", ("kfac/condition_max",), x="step", log=True),
    Chart("damping", "line", ("kfac/damping",), x="step", log=True),
)
"""Panels that the HTML page also has."""

SECTIONS = (
    ChartSection(
        "Time to target",
        "Seconds of the training clock and steps until the validation metric met its target. "
        "A run that missed the target has no bar. It counts as infinite in the table.",
        (
            Chart("seconds to target", "bar", ("target/time_to_target_s",), unit="s"),
            Chart("steps to target", "bar", ("target/steps_to_target",), unit="steps"),
            Chart("metric when the target was met", "bar", ("target/value",)),
            Chart("options and seconds to target", "options", ("target/time_to_target_s",)),
        ),
    ),
    ChartSection(
        "Over training seconds",
        "The clock stands still during evaluation, checkpoints and logging.",
        _over("train_s", *_CURVES),
    ),
    ChartSection(
        "Over steps",
        "What each update achieves, however long it takes.",
        (
            *_over("step", *_CURVES),
            CURVES[0],
        ),
    ),
    ChartSection(
        "Limits, angles and conditions",
        "nu is the factor by which the limits shrink a step (1: not at all). The cosine is taken "
        "between a layer's gradient and its preconditioned gradient (1: K-FAC changes nothing in "
        "this layer). The condition number is the ratio of the largest to the smallest eigenvalue "
        "that K-FAC inverts.",
        (
            *CURVES[1:5],
            Chart("cosine by layer", "line", pattern=r"kfac/cosine/.+", x="step"),
            Chart("condition by layer", "line", pattern=r"kfac/condition/.+", x="step", log=True),
        ),
    ),
    ChartSection(
        "Damping",
        "The damping of the next step. It changes if it is adaptive, or at the epochs of "
        "kfac.damping_decay_epochs.",
        (CURVES[5],),
    ),
    ChartSection(
        "Time of a step",
        "Means over steps and ranks. The time of a rare stage is spread over all steps.",
        (
            Chart(
                "time of a step, by stage",
                "area",
                ("train/besides_kfac_s", *_STAGE_MEANS),
                x="step",
                unit="s",
            ),
            Chart("seconds per step", "line", ("train/step_mean_s",), x="step", unit="s"),
            Chart("stages, last mean", "bar", _STAGE_MEANS, unit="s"),
            Chart("stages of the step", "line", pattern=r"kfac/stage_s/.+", x="step", unit="s"),
        ),
    ),
    ChartSection(
        "Scaling",
        "Throughput of all ranks. The table shows the efficiency of a rank, relative to the fewest "
        "ranks.",
        (
            Chart("examples/s by ranks", "scatter", ("train/examples_per_s",), x=WORLD_SIZE),
            Chart("examples/s", "line", ("train/examples_per_s",), x="step", by=WORLD_SIZE),
        ),
    ),
    ChartSection(
        "Memory and waiting",
        "The most memory that a rank has used, and how long the slowest rank waited for batches.",
        (
            Chart("memory", "line", ("memory/peak_bytes",), x="step", unit="bytes"),
            Chart("share waiting for data", "line", ("train/data_wait_share",), x="step"),
            Chart("wait for a checkpoint", "line", ("checkpoint/write_s",), x="step", unit="s"),
        ),
    ),
    ChartSection(
        "Failures",
        "Every value should be zero. Otherwise something was left out.",
        (
            Chart("decompositions", "line", ("kfac/failed_decompositions",), x="step"),
            Chart("statistics, not finite", "line", ("kfac/dropped_statistics",), x="step"),
            Chart("files not readable", "line", ("data/skipped_files",), x="step"),
            Chart("examples left out", "line", ("eval/left_out",), x="train_s"),
        ),
    ),
    ChartSection(
        "Predictions",
        "Held-out examples with the model's predictions at the end of the run.",
        (Chart("predictions", "media", ("predictions", "predicted_texts")),),
    ),
)
