"""A benchmark as data: the content of conf/benchmark/NAME.yaml, and how it is read.

The value of an axis has the name that the paper uses, such as "K-FAC every 500". ``each`` maps the
value to the options that it stands for. A profile may map the same value to other options.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kfac_bench import plain_yaml
from kfac_bench.config import compose, conf_files
from kfac_bench.errors import UsageError, first_line


@dataclass
class Check:
    """A number that must stay on one side of a limit. The limit is set before any run."""

    quantity: str = MISSING
    at: dict[str, str] = field(default_factory=dict)
    """The point, by axis and value."""
    at_most: float | None = None
    at_least: float | None = None


@dataclass
class Claim:
    """A short sentence that is supported if all checks hold."""

    text: str = MISSING
    checks: list[Check] = field(default_factory=list)
    goal: bool = False
    """True for a goal of this repository, which no paper claims."""
    not_testable: str = ""
    """The reason why this table cannot test the claim; empty if it can."""


Each = dict[str, dict[str, list[str]]]
"""Axis to value to the overrides that the value stands for. A key may join several axes, and their
values, by spaces."""


@dataclass
class Before:
    """A run that cells start from, such as the first phase of a pre-training.

    The run is kept in runs/shared. Texts may contain ``{seed}``, ``{profile}``, ``{shared}`` and
    the names of the axes.
    """

    run_id: str = MISSING
    overrides: list[str] = MISSING


@dataclass
class BenchmarkProfile:
    """The changes of one size of the row: ``smoke``, ``cpu``, ``one_gpu`` or ``paper``."""

    ran: str = ""
    """Model and data of the cells, if they are not those of the paper. Tables then name them over
    the measured numbers, and print no ratio of a measured number to a published one."""
    axes: dict[str, list[str]] = field(default_factory=dict)
    """Values that replace the row's values of these axes; [] leaves out every cell."""
    overrides: list[str] = field(default_factory=list)
    """Overrides after those of the row, and before those of ``each``."""
    each: Each = field(default_factory=dict)
    """Options that replace the row's options of these values."""
    seeds: list[int] | None = None
    before: list[Before] | None = None
    level: float | None = None
    """Level of the metric for the measures ``..._to_level``, if runs do not stop at a target."""
    notes: list[str] = field(default_factory=list)


@dataclass
class Known:
    """A quantity of computed cells that is no prediction."""

    quantity: str = MISSING
    how: str = "fitted"
    """The word beside the number: ``fitted`` to the same table, ``given`` by the same table, or
    ``chosen afterwards`` for an assumption that was chosen after the published number was seen."""
    only: dict[str, list[str]] = field(default_factory=dict)
    """The points, by the values of an axis; {}: all points."""


@dataclass
class Computed:
    """Cells that train nothing: their numbers follow from a plan or from the simulation.

    :mod:`kfac_bench.benchmark.computed_numbers` documents the ``words`` of each kind.
    """

    kind: str = MISSING
    axes: dict[str, list[str]] = MISSING
    words: list[str] = MISSING
    each: Each = field(default_factory=dict)
    """As in :attr:`Benchmark.each`."""
    known: list[Known] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Quantity:
    """A number of each point of the axes.

    The number comes from the events of the point's runs (``measure``). Or it compares two points:
    ``of`` names a quantity, and ``against`` the values of the axes of the other point, with the
    same seed. ``{axis: least}`` stands for the smallest number on the axis.
    """

    measure: str = ""
    """A name of :mod:`kfac_bench.benchmark.measures`."""
    of: str = ""
    against: dict[str, str] = field(default_factory=dict)
    phases: list[str] = field(default_factory=list)
    """Run ids of earlier runs (see :class:`Before`) with ``{profile}`` and ``{seed}``. For cells
    that train, the number is then how much less training time these runs took than the runs of
    ``than``, in percent. A phase counts up to the checkpoint that the cell starts from."""
    than: list[str] = field(default_factory=list)
    """Run ids, as in ``phases``. Another row may train these runs."""
    level_of: dict[str, str] = field(default_factory=dict)
    """For the measures ``..._to_level``: the values of the axes of another point. Its final metric,
    with the same seed, is the level."""
    how: str = ""
    """The comparison of two points: ``less`` (percent less), ``percent`` (the share in percent),
    ``ratio`` or ``difference``."""
    scale: float = 1.0
    times: dict[str, Any] = field(default_factory=dict)
    """A factor by axis and value, such as the epochs to solution."""
    unit: str = ""
    higher: bool = False
    """True if a larger number is better. A missed target counts as the worst value."""
    only: dict[str, list[str]] = field(default_factory=dict)
    """The points that have this quantity, by the values of an axis; {}: all points."""


@dataclass
class Published:
    """Numbers of a paper: ``values`` are nested mappings, one level for each axis in ``by``.

    A value is a number, or [low, high] if the paper prints only a range.
    """

    quantity: str = MISSING
    source: str = MISSING
    by: list[str] = MISSING
    values: Any = MISSING


@dataclass
class FigureSpec:
    """A figure of bars: a group for each value of the axis ``x``, a bar for each of ``colour``.

    With several quantities ``x`` is ``quantity``. Other axes get a panel for each of their values.
    """

    quantities: list[str] = MISSING
    x: str = MISSING
    colour: str = MISSING
    lines: bool = False
    """Lines over a numeric x instead of bars."""
    compared: str = ""
    """The axis whose values the title compares; empty: the axis of the colours."""


@dataclass
class MatrixSpec:
    """A table in the shape of the paper's: a line for each value of an axis.

    Each quantity has a column for each value of another axis.
    """

    quantities: list[str] = MISSING
    rows: str = MISSING
    columns: str = MISSING


@dataclass
class Tuning:
    """The search for settings, with the same number of trials for each optimizer."""

    overrides: list[str] = MISSING
    """Overrides of every trial, with the axes' values filled in."""
    trials: int = MISSING
    """Number of trials of each study."""
    seeds: list[int] = MISSING
    """One study per seed. These are not the seeds of the table, because the runs of the table must
    not choose the settings."""
    space: dict[str, dict[str, Any]] = MISSING
    """By optimizer and override, a range or a fixed value. A range is ``{log: [low, high]}``,
    ``{uniform: [low, high]}``, ``{integer: [low, high]}`` with both ends, or ``{choice: [...]}``.
    """
    experiment: str = MISSING
    """Name of the experiment file of the best trial, with the axes' values filled in."""
    starts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By optimizer, settings that ``kfac-bench try`` runs before the points of the space."""
    labels: dict[str, str] = field(default_factory=dict)
    """By optimizer, its name in tables; null: the usual name."""
    studies: dict[str, int] = field(default_factory=dict)
    """By optimizer, the number of studies that it takes part in. An optimizer that is not named
    takes part in all. Only ``python -m benchmarks.contest study`` reads it."""
    patience: float = 1.0
    """A trial stops when it has taken this many times as long as the best trial of its study."""


@dataclass
class Benchmark:
    """One table or figure: the content of conf/benchmark/NAME.yaml."""

    title: str = MISSING
    axes: dict[str, list[str]] = MISSING
    overrides: list[str] = MISSING
    """Overrides of every cell. Texts may contain the names of the axes, ``{profile}``, ``{seed}``
    and ``{shared}``. []: no cell trains."""
    seeds: list[int] = field(default_factory=lambda: [0])
    tuning: Tuning | None = None
    source: str = ""
    """The paper and its table, figure or section."""
    each: Each = field(default_factory=dict)
    """``ranks=N`` among the overrides starts N ranks. Trials of the tuning get the other overrides,
    too, and run on one rank."""
    held_out: list[str] = field(default_factory=list)
    """Values of the axis ``task`` that no optimizer in ``frozen`` meets before its commit."""
    frozen: dict[str, str] = field(default_factory=dict)
    """By optimizer, the commit that froze its rule and its defaults. An empty text means: not
    yet."""
    baseline: list[str] = field(default_factory=list)
    """Overrides of the run that each sitting repeats, with the axis ``task`` filled in. The run has
    a fixed number of steps and no target, so that its seconds tell how fast the machine is."""
    before: list[Before] = field(default_factory=list)
    """Runs that each cell starts from, in the order in which they run."""
    profiles: dict[str, BenchmarkProfile] = field(default_factory=dict)
    computed: list[Computed] = field(default_factory=list)
    quantities: dict[str, Quantity] = field(default_factory=dict)
    published: list[Published] = field(default_factory=list)
    figure: FigureSpec | None = None
    matrix: MatrixSpec | None = None
    """Second table with these quantities in the shape of the paper's table; None: no such table."""
    curves: bool = False
    """True if the report has a second figure: the curves of the runs."""
    notes: list[str] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    """Claims of a paper that the numbers of this table test."""
    labels: dict[str, str] = field(default_factory=dict)
    """By value of an axis, its name in the tables of verdicts: what ran, in a few words. Optimizers
    that the tuning names need none."""
    extends: str | None = None
    """Another benchmark whose values hold where this file has none. A list replaces a list."""


def load(name: str) -> Benchmark:
    """Return conf/benchmark/NAME.yaml, or a file of the user's own, checked against the schema.

    Args:
        name: The name, or the path of a file that ends in ``.yaml`` or ``.yml``.

    Raises:
        UsageError: The file does not exist or is not valid.
    """
    path = _path(name)
    try:
        # The merge with the dataclass checks names and types.
        schema = OmegaConf.structured(Benchmark)
        result = OmegaConf.to_object(OmegaConf.merge(schema, *_parts(name, [])))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        key = getattr(error, "full_key", None)
        raise UsageError(f"{path}: {f'{key}: ' if key else ''}{first_line(error)}") from None
    assert isinstance(result, Benchmark)
    _check_contest(result, path)
    if result.tuning is not None:
        _check_tuning(result, result.tuning, path)
    return result


def _parts(name: str, before: Sequence[Path]) -> list[Any]:
    """Return the content of a benchmark, after that of the benchmarks that it extends."""
    path = _path(name, f"{before[-1]}: extends: " if before else "")
    if path in before:
        raise UsageError(f"{path}: extends: this benchmark extends itself")
    if is_file(name):  # not ours, which have aliases
        plain_yaml.refuse_aliases(path.read_text(encoding="utf-8"))
    own = OmegaConf.load(path)
    if not isinstance(own, DictConfig) or not own:
        raise UsageError(f"{path}: is no benchmark: expected title:, axes: and overrides:")
    if (base := own.get("extends")) is None:
        return [own]
    # A file of the user's own may name one beside it.
    name = str(path.parent / str(base)) if is_file(str(base)) else str(base)
    return [*_parts(name, [*before, path]), own]


def is_file(name: str) -> bool:
    """Return whether the name of a benchmark is the path of a file."""
    return name.endswith((".yaml", ".yml"))


def stem(name: str) -> str:
    """Return the name of a benchmark in paths: that of the file, without folder and ending."""
    return Path(name).stem if is_file(name) else name


def _path(name: str, where: str = "") -> Path:
    if is_file(name):
        if not (file := Path(name)).is_file():
            raise UsageError(
                f"{where}{name}: no such file; kfac-bench list prints the names of benchmarks"
            )
        return file
    known = compose.options_of("benchmark")
    if name not in known:
        raise UsageError(f"{where}{name}: no such benchmark; choose one of {', '.join(known)}")
    return conf_files.file_of("benchmark", name)


def _check_contest(benchmark: Benchmark, path: Path) -> None:
    for task in benchmark.held_out:
        if task not in benchmark.axes.get("task", []):
            raise UsageError(f"{path}: held_out: {task} is no value of the axis task")
    for optimizer, commit in benchmark.frozen.items():
        if optimizer not in benchmark.axes.get("optimizer", []):
            raise UsageError(f"{path}: frozen: {optimizer} is no value of the axis optimizer")
        if not re.fullmatch(r"|[0-9a-f]{7,40}", commit):
            raise UsageError(f"{path}: frozen: {optimizer}: {commit!r} is not the hash of a commit")


def _check_tuning(benchmark: Benchmark, tuning: Tuning, path: Path) -> None:
    if tuning.trials < 1 or not tuning.seeds or len(set(tuning.seeds)) < len(tuning.seeds):
        raise UsageError(f"{path}: tuning: needs at least one trial, and seeds that differ")
    if benchmark.overrides and "optimizer" not in benchmark.axes:
        raise UsageError(f"{path}: tuning: needs an axis optimizer")
    for optimizer in benchmark.axes.get("optimizer", []):
        if optimizer not in tuning.space:
            raise UsageError(f"{path}: tuning: the space has no optimizer {optimizer}")
    for optimizer, space in tuning.space.items():
        for name, value in space.items():
            if isinstance(value, dict) and not _is_range(value):
                raise UsageError(
                    f"{path}: tuning: {optimizer}: {name}: {value} is no range; write log, uniform "
                    "or integer: [low, high], or choice: [value, value]"
                )


def _is_range(value: Mapping[str, Any]) -> bool:
    match value:
        case {"log": [int() | float() as low, int() | float() as high]}:
            fits = 0 < low < high
        case {"uniform": [int() | float() as low, int() | float() as high]}:
            fits = low < high
        case {"integer": [int() as low, int() as high]}:
            fits = low < high
        case {"choice": [_, *_]}:
            fits = True
        case _:
            fits = False
    return fits and len(value) == 1


NOT_FROZEN = "the task is held out, and no commit has frozen the optimizer (see frozen:)"


def may_run(benchmark: Benchmark, point: Mapping[str, str]) -> bool:
    """Return whether the optimizer may meet the task: held-out tasks are for frozen rules."""
    is_frozen = benchmark.frozen.get(point.get("optimizer", ""), "none needed") != ""
    return is_frozen or point.get("task") not in benchmark.held_out


def profile_of(benchmark: Benchmark, name: str | None) -> tuple[str, BenchmarkProfile]:
    """Return the name of the profile and what it changes; None stands for the first profile.

    Raises :class:`UsageError` if the benchmark does not have the profile.
    """
    if not benchmark.profiles:
        if name is not None:
            raise UsageError(f"--profile {name}: {benchmark.title!r} has no profiles")
        return "", BenchmarkProfile()
    name = name or next(iter(benchmark.profiles))
    if name not in benchmark.profiles:
        raise UsageError(f"--profile {name}: choose one of {', '.join(benchmark.profiles)}")
    return name, benchmark.profiles[name]


def seeds_of(benchmark: Benchmark, profile: BenchmarkProfile) -> list[int]:
    """Return the seeds of every cell of the profile."""
    return benchmark.seeds if profile.seeds is None else profile.seeds


def fill_in(text: str, words: Mapping[str, str]) -> str:
    """Return the text with each ``{name}`` replaced; raise :class:`UsageError` for other names."""
    try:
        return text.format(**words)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        names = ", ".join(f"{{{name}}}" for name in words)
        raise UsageError(f"{text!r}: cannot be filled in; there are {names}") from None


def points(
    benchmark: Benchmark, profile: BenchmarkProfile | None = None
) -> Iterator[dict[str, str]]:
    """Yield every combination of the axes' values."""
    axes = benchmark.axes | (profile.axes if profile else {})
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))
