"""What the dashboard shows, as data: sections of charts of what :mod:`..sinks.metrics` names.

No word of W&B here; patterns are such as Go and JavaScript both read. A test holds every name
against what the sink really logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["line", "area", "bar", "scatter", "media", "text"]

WORLD_SIZE = "environment.world_size"
"""Where W&B's config of a run has its number of ranks."""
GROUPS = ("model.name", "optimizer.name", "kfac.enabled")
"""Options by which runs are grouped: the seeds of a setting are one line, with its range."""
STAGES = (
    "ComputeFactor",
    "ComputeSecondMoment",
    "ReduceScales",
    "ReduceFactors",
    "ReduceSecondMoments",
    "Decompose",
    "ShareDecompositions",
    "GatherGradients",
    "Precondition",
    "ReduceProducts",
    "ShareGradients",
    "WriteBack",
)
"""Kinds of op in the order in which a step runs them."""


@dataclass(frozen=True)
class Chart:
    """One panel. ``keys`` are metrics by name, ``pattern`` a regular expression of names.

    Lines are drawn over ``x``; bars show a run's last value; a scatter has ``x``, an option, and
    one key. ``by`` is an option to group runs by instead of :data:`GROUPS`.
    """

    title: str
    kind: Kind
    keys: tuple[str, ...] = ()
    pattern: str = ""
    x: str = ""
    by: str = ""
    log: bool = False
    unit: str = ""


@dataclass(frozen=True)
class Section:
    """Charts under a heading; ``about`` stands above them in the report."""

    name: str
    about: str
    charts: tuple[Chart, ...]


def _over(x: str, *charts: Chart) -> tuple[Chart, ...]:
    return tuple(Chart(**{**vars(chart), "x": x}) for chart in charts)


_MEAN = r"kfac/stage_mean_s/.+"
_CURVES = (
    Chart("validation", "line", pattern=r"eval/.+"),
    Chart("training loss", "line", ("train/loss",), log=True),
)

SECTIONS = (
    Section(
        "Time to target",
        "Seconds of the training clock and steps until the validation figure met its target. "
        "A run that missed has no bar: it counts as infinite, see the table.",
        (
            Chart("seconds to target", "bar", ("target/time_to_target_s",), unit="s"),
            Chart("steps to target", "bar", ("target/steps_to_target",), unit="steps"),
            Chart("figure when it was met", "bar", ("target/value",)),
        ),
    ),
    Section(
        "Over training seconds",
        "The clock stands still in evaluation, checkpoints and logging.",
        _over("train_s", *_CURVES),
    ),
    Section(
        "Over steps",
        "What each update brings, whatever it takes.",
        (
            *_over("step", *_CURVES),
            Chart("learning rate", "line", ("train/lr",), x="step"),
        ),
    ),
    Section(
        "Clip and angles",
        "nu is the KL clip factor (1: no clipping); the cosine is that of a layer's gradient and "
        "its preconditioned gradient (1: K-FAC does nothing there).",
        (
            Chart("nu", "line", ("kfac/nu",), x="step", log=True),
            Chart("cosine, median of layers", "line", ("kfac/cosine_median",), x="step"),
            Chart("cosine, smallest of layers", "line", ("kfac/cosine_min",), x="step"),
            Chart("cosine by layer", "line", pattern=r"kfac/cosine/.+", x="step"),
        ),
    ),
    Section(
        "Damping",
        "Of the next step; it moves where it adapts itself.",
        (Chart("damping", "line", ("kfac/damping",), x="step", log=True),),
    ),
    Section(
        "Stages of a K-FAC step",
        "Means over steps and ranks, rare stages spread over the steps between.",
        (
            Chart("stages, mean of a step", "area", pattern=_MEAN, x="step", unit="s"),
            Chart(
                "stages, last mean",
                "bar",
                tuple(f"kfac/stage_mean_s/{s}" for s in STAGES),
                unit="s",
            ),
            Chart("stages of the step", "line", pattern=r"kfac/stage_s/.+", x="step", unit="s"),
        ),
    ),
    Section(
        "Scaling",
        "Throughput of all ranks. Efficiency is per rank, against the fewest ranks: the table.",
        (
            Chart("examples/s by ranks", "scatter", ("train/examples_per_s",), x=WORLD_SIZE),
            Chart("examples/s", "line", ("train/examples_per_s",), x="step", by=WORLD_SIZE),
        ),
    ),
    Section(
        "Memory and waiting",
        "The most that a rank has held; the time that the slowest rank waited for batches.",
        (
            Chart("memory", "line", ("memory/peak_bytes",), x="step", unit="bytes"),
            Chart("share waiting for data", "line", ("train/data_wait_share",), x="step"),
            Chart("wait for a checkpoint", "line", ("checkpoint/write_s",), x="step", unit="s"),
        ),
    ),
    Section(
        "Failures",
        "Zero everywhere, or something was left out.",
        (
            Chart("decompositions", "line", ("kfac/failed_decompositions",), x="step"),
            Chart("statistics, not finite", "line", ("kfac/dropped_statistics",), x="step"),
            Chart("files not readable", "line", ("data/skipped_files",), x="step"),
            Chart("examples left out", "line", ("eval/left_out",), x="train_s"),
        ),
    ),
    Section(
        "Predictions",
        "Held-out examples with what the model made of them when the run ended.",
        (Chart("predictions", "media", ("predictions", "predicted_texts")),),
    ),
)
