"""A benchmark is data: what conf/benchmark/NAME.yaml may say, and its reading.

A value of an axis is called by what the paper calls it ("K-FAC every 500"); ``each`` says which
options it stands for, and a profile may say others for the same value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kfac_bench.config import compose
from kfac_bench.config.profiles import PROFILES
from kfac_bench.errors import UsageError

Each = dict[str, dict[str, list[str]]]


@dataclass
class Before:
    """A run that cells start from, such as the first phase of a pre-training; kept in runs/shared.

    Texts may name ``{seed}``, ``{profile}``, ``{shared}`` and the axes.
    """

    run_id: str = MISSING
    overrides: list[str] = MISSING


@dataclass
class BenchmarkProfile:
    """What a size of the row changes: smoke, one_gpu, paper."""

    axes: dict[str, list[str]] = field(default_factory=dict)
    """Instead of the row's own values of these axes; [] leaves out every cell."""
    overrides: list[str] = field(default_factory=list)
    """After the row's own, before those of ``each``."""
    each: Each = field(default_factory=dict)
    """Instead of the row's own options of these values."""
    seeds: list[int] | None = None
    before: list[Before] | None = None
    level: float | None = None
    """The figure that ``..._to_level`` is about, where runs do not stop at a target."""
    notes: list[str] = field(default_factory=list)


@dataclass
class Computed:
    """Cells that are no training: a function of the plan or the simulation, no event of a run.

    ``words`` are what :mod:`kfac_bench.benchmark.computed` understands of this ``kind``.
    """

    kind: str = MISSING
    axes: dict[str, list[str]] = MISSING
    words: list[str] = MISSING
    each: Each = field(default_factory=dict)
    """As a row's; a key may join axes and values by a space."""
    notes: list[str] = field(default_factory=list)


@dataclass
class Quantity:
    """A number of each point, from the events of its runs; a computed cell has it by its name.

    Or one number beside another: ``of`` a quantity, ``how`` it stands to that of the point
    which differs in ``against`` (same seed): ``less`` is percent less, ``percent`` the share in
    percent, ``ratio``, ``difference``. ``{axis: least}`` is the smallest number of the axis.
    """

    measure: str = ""
    """A name of :mod:`kfac_bench.benchmark.measures`."""
    of: str = ""
    against: dict[str, str] = field(default_factory=dict)
    how: str = ""
    scale: float = 1.0
    times: dict[str, Any] = field(default_factory=dict)
    """By axis and value, a factor: the epochs to solution."""
    unit: str = ""
    higher: bool = False
    """Whether more is better: a miss counts as the worst."""
    only: dict[str, list[str]] = field(default_factory=dict)
    """Points that have it, by the values of an axis; {}: all."""


@dataclass
class Published:
    """Numbers of a paper: ``values`` by the axes of ``by``, a mapping in each other.

    A number is a number, or [low, high] where only a range is printed.
    """

    quantity: str = MISSING
    source: str = MISSING
    by: list[str] = MISSING
    values: Any = MISSING
    notes: list[str] = field(default_factory=list)


@dataclass
class FigureSpec:
    """Bars: a group for each value of the axis ``x``, a bar for each of ``colour``.

    With several quantities ``x`` is ``quantity``. Other axes make a panel for each of their values.
    """

    quantities: list[str] = MISSING
    x: str = MISSING
    colour: str = MISSING
    lines: bool = False
    """Lines over a numeric x instead of bars."""


@dataclass
class Tuning:
    """How the settings of the cells are found: the same number of trials for each optimizer."""

    overrides: list[str] = MISSING
    """Of every trial, with the axes' values filled in."""
    trials: int = MISSING
    """Of each study."""
    seeds: list[int] = MISSING
    """A study each; not those of the table: settings must not be picked by the runs shown."""
    space: dict[str, dict[str, Any]] = MISSING
    """Optimizer to override to range: ``{log: [low, high]}`` or ``{choice: [...]}``, or what
    the option always is."""
    experiment: str = MISSING
    """The experiment file that the best trial becomes, with the axes' values filled in."""
    labels: dict[str, str] = field(default_factory=dict)
    """Optimizer to what tables call it; null: as they call others."""


@dataclass
class Benchmark:
    """One table or figure: conf/benchmark/NAME.yaml."""

    title: str = MISSING
    axes: dict[str, list[str]] = MISSING
    overrides: list[str] = MISSING
    """Of every cell; texts may name the axes, ``{profile}``, ``{seed}`` and ``{shared}``. []: no
    cell trains."""
    seeds: list[int] = field(default_factory=lambda: [0])
    tuning: Tuning | None = None
    source: str = ""
    """The paper and its table, figure or section."""
    each: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Axis to value to the overrides it stands for; ``ranks=N`` among them starts N ranks."""
    before: list[Before] = field(default_factory=list)
    """Runs that each cell starts from, in this order."""
    profiles: dict[str, BenchmarkProfile] = field(default_factory=dict)
    computed: list[Computed] = field(default_factory=list)
    quantities: dict[str, Quantity] = field(default_factory=dict)
    published: list[Published] = field(default_factory=list)
    figure: FigureSpec | None = None
    curves: bool = False
    """Whether the figure is of curves: validation against steps."""
    notes: list[str] = field(default_factory=list)


def load(name: str) -> Benchmark:
    """conf/benchmark/NAME.yaml, checked against the schema."""
    path = compose.CONF_DIR / "benchmark" / f"{name}.yaml"
    known = compose.options_of("benchmark")
    if name not in known:
        raise UsageError(f"{name}: no such benchmark; choose one of {', '.join(known)}")
    try:
        result = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(Benchmark), OmegaConf.load(path))
        )
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path}: {str(error).splitlines()[0]}") from None
    assert isinstance(result, Benchmark)
    return result


def profile_of(benchmark: Benchmark, name: str | None) -> tuple[str, BenchmarkProfile]:
    """The profile of that name (None: smoke) and what it changes; raises :class:`UsageError`."""
    if not benchmark.profiles:
        if name is not None:
            raise UsageError(f"profile={name}: {benchmark.title!r} has no profiles")
        return "", BenchmarkProfile()
    name = name or PROFILES[0]
    if name not in benchmark.profiles:
        raise UsageError(f"profile={name}: choose one of {', '.join(benchmark.profiles)}")
    return name, benchmark.profiles[name]


def points(
    benchmark: Benchmark, profile: BenchmarkProfile | None = None
) -> Iterator[dict[str, str]]:
    """Every combination of the axes' values."""
    axes = benchmark.axes | (profile.axes if profile else {})
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))
