"""What a file of conf/benchmark may say beside its axes: profiles, quantities, published numbers.

A value of an axis is called by what the paper calls it ("K-FAC every 500"); ``each`` says which
options it stands for, and a profile may say others for the same value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

Each = dict[str, dict[str, list[str]]]


@dataclass
class Before:
    """A run that cells start from, such as the first phase of a pre-training; kept in runs/shared.

    Texts may name ``{seed}``, ``{profile}``, ``{shared}`` and the axes.
    """

    run_id: str = MISSING
    overrides: list[str] = MISSING


@dataclass
class Profile:
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
class Figure:
    """Bars: a group for each value of the axis ``x``, a bar for each of ``colour``.

    With several quantities ``x`` is ``quantity``. Other axes make a panel for each of their values.
    """

    quantities: list[str] = MISSING
    x: str = MISSING
    colour: str = MISSING
    lines: bool = False
    """Lines over a numeric x instead of bars."""
