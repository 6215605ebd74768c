"""Fit the simulated machine to two ResNets, predict the third: the three folds of Table 5.

    python benchmarks/simulation_folds.py [FILE.md]

The script prints Markdown tables: the prediction errors of each fold, the fitted constants, and the
errors with one assumption at a time as it was before. With FILE.md it replaces the tables between
the two marks of that page. The published minutes are those of conf/simulation/tpds2022.yaml, the
machine is conf/hardware/longhorn_v100.yaml. The fit of a fold sees the minutes of two ResNets and
no other time of the paper.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from kfac_bench.errors import UsageError
from kfac_bench.simulate.calibration import Constants, predict
from kfac_bench.simulate.conduct import OURS, SC20_CODE, Conduct
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.sweep import SGD
from kfac_bench.whole_files import around_marks, write_text
from scripts.calibrate import (
    LARGEST,
    Paper,
    Works,
    blank,
    fit_table5,
    minutes_of,
    observations,
    published,
    resnets,
)

GOAL = 10.0
"""The goal: a mean error of the times of at most so many percent."""
BEGIN, END = "<!-- made by python benchmarks/simulation_folds.py -->", "<!-- end -->"
Assumption = Callable[[Hardware, Conduct], tuple[Hardware, Conduct]]


@dataclass(frozen=True)
class HeldOut:
    """The predicted and the published times of one ResNet."""

    held_out: str
    predicted: Mapping[str | int, float]
    """Minutes of a training, by ``sgd`` or K-FAC's interval."""
    published: Mapping[str | int, float]

    def errors(self) -> dict[str | int, float]:
        """Return the errors of the times in percent, by ``sgd`` or K-FAC's interval."""
        return {key: _error(m, self.published[key]) for key, m in self.predicted.items()}

    def ratio_errors(self) -> dict[str | int, float]:
        """Return the errors of K-FAC's times divided by SGD's time in percent, by interval."""
        base, true_base = self.predicted[SGD], self.published[SGD]
        return {
            key: _error(minutes / base, self.published[key] / true_base)
            for key, minutes in self.predicted.items()
            if key != SGD
        }


@dataclass(frozen=True)
class Fold(HeldOut):
    """The prediction of one ResNet by constants that are fitted to the other two."""

    constants: Constants
    decomposition_s: float
    """Fitted seconds of a decomposition of :data:`.LARGEST` rows."""


def _optimizer(key: str | int) -> str:
    return "SGD" if key == SGD else f"K-FAC, a decomposition every {key} steps"


def _model(name: str) -> str:
    """Return the usual spelling: ``resnet50`` is ResNet-50."""
    return name.replace("resnet", "ResNet-")


def _error(found: float, true: float) -> float:
    return 100 * (found / true - 1)


def folds(paper: Paper, works: Works, known: Hardware, conduct: Conduct = SC20_CODE) -> list[Fold]:
    """Predict each model of Table 5 from the others."""
    found = []
    for held_out, minutes in paper["table5_minutes"].items():
        others = {name: work for name, work in works.items() if name != held_out}
        constants = fit_table5(paper, others, known, conduct)
        machine = constants.of(known)
        wanted = observations(paper, held_out, works[held_out])
        steps_s = predict(machine, list(wanted.values()), conduct)
        predicted = {
            key: minutes_of(paper, key, step_s) for key, step_s in zip(wanted, steps_s, strict=True)
        }
        largest_s = machine.rates.decompose(LARGEST, "eigen")
        found.append(Fold(held_out, predicted, minutes, constants, largest_s))
    return found


def time_errors(found: Sequence[HeldOut]) -> list[float]:
    """Return the absolute errors of all predicted times, in percent."""
    return [abs(error) for fold in found for error in fold.errors().values()]


def ratio_errors(found: Sequence[HeldOut]) -> list[float]:
    """Return the absolute errors of K-FAC's times divided by SGD's time, in percent."""
    return [abs(error) for fold in found for error in fold.ratio_errors().values()]


def error_table(found: Sequence[Fold]) -> Iterator[str]:
    """Yield the table of errors by quantity, and the mean of all times with the verdict."""
    names = [_model(fold.held_out) for fold in found]
    yield f"| quantity | {' | '.join(names)} | mean error | largest error |"
    yield f"| --- |{' ---: |' * (len(names) + 2)}"
    for key in found[0].errors():
        cells = [_minutes(fold, key) for fold in found]
        yield _row(f"time of {_optimizer(key)}", cells, [f.errors()[key] for f in found])
    for key in found[0].ratio_errors():
        ratios = [fold.ratio_errors()[key] for fold in found]
        cells = [f"{error:+.1f} %" for error in ratios]
        yield _row(f"time of {_optimizer(key)}, divided by the time of SGD", cells, ratios)
    ratios = ratio_errors(found)
    yield _row(f"all {len(ratios)} ratios", [""] * len(names), ratios)
    errors = time_errors(found)
    mean, largest = f"**{fmean(errors):.1f} %**", f"**{max(errors):.1f} %**"
    yield f"| **all {len(errors)} times** |{' |' * len(names)} {mean} | {largest} |"
    yield ""
    verdict = "met" if fmean(errors) <= GOAL else "missed"
    yield f"The goal was a mean error of {GOAL:g} %: {verdict}."


def _row(label: str, cells: Sequence[str], errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"| {label} | {' | '.join(cells)} | {fmean(sizes):.1f} % | {max(sizes):.1f} % |"


def _minutes(fold: Fold, key: str | int) -> str:
    error = fold.errors()[key]
    return f"{fold.predicted[key]:.0f} min, published {fold.published[key]} min ({error:+.1f} %)"


def constants_table(found: Sequence[Fold]) -> Iterator[str]:
    """Yield the fitted constants of each fold."""
    columns = (
        "predicted model",
        "rest of a step, without computation and calls",
        "one call to the GPU",
        f"eigendecomposition of a factor of {LARGEST} rows",
    )
    yield f"| {' | '.join(columns)} |"
    yield "| --- | ---: | ---: | ---: |"
    for fold in found:
        each = fold.constants
        yield (
            f"| {_model(fold.held_out)} | {1e3 * each.step_s:.1f} ms | "
            f"{1e6 * each.op_s:.1f} µs | {fold.decomposition_s:.2f} s |"
        )


def fitted_errors(paper: Paper, works: Works, known: Hardware) -> list[float]:
    """Return the errors in percent that remain if the constants are fitted to all times."""
    machine = fit_table5(paper, works, known).of(known)
    rows = [list(observations(paper, name, work).values()) for name, work in works.items()]
    return [
        abs(_error(found, each.step_s))
        for row in rows
        for each, found in zip(row, predict(machine, row, SC20_CODE), strict=True)
    ]


ASSUMPTIONS: dict[str, Assumption] = {
    "none: the simulation as it is now": lambda m, c: (m, c),
    "forward and backward: one rate of FLOPs for all ResNets": lambda m, c: (
        _with_rates(m, step_flops_per_s={"default": m.rates.step_flops_per_s["default"]}),
        c,
    ),
    "K-FAC's matrix products run at 90 % of the peak rate": lambda m, c: (
        _with_rates(m, factor_flops_per_s=1.42e13, precondition_flops_per_s=1.42e13),
        c,
    ),
    "the time of a decomposition grows with n³": lambda m, c: (
        _with_rates(m, eigen_s={LARGEST: 1.0}),
        c,
    ),
    "calls to the GPU take no time": lambda m, c: (
        m,
        replace(
            c,
            tensor_calls=0,
            factor_calls=0,
            decomposition_calls=0,
            precondition_calls=0,
            write_calls=0,
        ),
    ),
    "gradients are sent after the backward pass": lambda m, c: (replace(m, overlap=0.0), c),
    "our planner places the factors, and one rank sends each result": lambda m, c: (
        m,
        replace(c, places_in_turn=False, sums_shares=False),
    ),
    "plan, calls and messages of this package (`conduct: ours`)": lambda m, c: (m, OURS["eigen"]),
}
"""For each other assumption: the machine and the conduct that make it."""


def _with_rates(machine: Hardware, **rates: Any) -> Hardware:
    return replace(machine, rates=replace(machine.rates, **rates))


def assumption_table(paper: Paper, works: Works, known: Hardware) -> Iterator[str]:
    """Yield the errors of the folds with one other assumption at a time."""
    columns = ("mean error of the 12 times", "largest", "mean error of the 9 ratios", "largest")
    yield f"| other assumption | {' | '.join(columns)} |"
    yield f"| --- |{' ---: |' * len(columns)}"
    rows: dict[str, Sequence[HeldOut]] = {
        label: folds(paper, works, *assume(known, SC20_CODE))
        for label, assume in ASSUMPTIONS.items()
    }
    rows["no simulation: a straight line through the published times over FLOPs"] = straight_lines(
        paper, works
    )
    for label, found in rows.items():
        both = time_errors(found), ratio_errors(found)
        sizes = [size for errors in both for size in (fmean(errors), max(errors))]
        cells = [f"{size:.1f} %" for size in sizes]
        yield f"| {label} | {' | '.join(cells)} |"


def straight_lines(paper: Paper, works: Works) -> list[HeldOut]:
    """Predict each ResNet by lines through the times of the other two over their FLOPs."""
    rows, found = paper["table5_minutes"], []
    flops = {name: work.step_flops for name, work in works.items()}
    for held_out, minutes in rows.items():
        a, b = (name for name in rows if name != held_out)
        part = (flops[held_out] - flops[a]) / (flops[b] - flops[a])
        line = {key: rows[a][key] + part * (rows[b][key] - rows[a][key]) for key in minutes}
        found.append(HeldOut(held_out, line, minutes))
    return found


def tables() -> str:
    """Return all tables as Markdown."""
    paper, known = published(), blank()
    works = resnets(paper)
    found, fitted = folds(paper, works, known), fitted_errors(paper, works, known)
    rest = f"mean error of {fmean(fitted):.1f} % and a largest error of {max(fitted):.1f} %"
    lines = [*error_table(found), f"Constants fitted to all three models leave a {rest}.", ""]
    lines += [*constants_table(found), ""]
    return "\n".join([*lines, *assumption_table(paper, works, known)])


def main() -> int:
    """Print the tables, and write them into a page if one is named."""
    try:
        page = Path(sys.argv[1]) if len(sys.argv) > 1 else None
        around = around_marks(page, BEGIN, END, "FILE.md") if page else ("", "")
        text = tables()
        if page:
            write_text(page, f"{around[0]}{BEGIN}\n{text}\n{END}{around[1]}")
    except UsageError as error:
        print(f"simulation_folds.py: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
