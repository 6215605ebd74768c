"""Fit the simulation to Table 5 and to one efficiency, predict the rest of the paper's numbers.

    python scripts/validate_simulation.py [FILE.md]

The script prints a Markdown table of predicted numbers, published numbers (from
conf/simulation/tpds2022.yaml) and errors. Numbers that the fit uses are no predictions:
benchmarks/simulation_folds.py predicts each ResNet of Table 5 from the other two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean

from calibrate import (
    FOLDER,
    LARGEST,
    MACHINE,
    RANKS,
    Paper,
    Works,
    fit_machine,
    minutes_of,
    observations,
    published,
    resnets,
    steps_of,
)

from kfac_bench.cli.entry import Parser, exit_with
from kfac_bench.config import compose
from kfac_bench.core.planning.plan import Stage
from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware, workload
from kfac_bench.simulate.calibration import predict
from kfac_bench.simulate.conduct import PAPERS_CODE, SC20_CODE
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.step import StepTime, step_time
from kfac_bench.simulate.sweep import (
    SGD,
    Intervals,
    SimulatedCell,
    Variant,
    efficiency,
    plan_of,
    sweep,
)

READ_AS_128 = "efficiency (size not printed, read as 128)"
"""The paper prints the efficiencies of ResNets and of Mask R-CNN without the number of GPUs."""
OPT, LW, FIRST = Variant("comm_opt"), Variant("layer_wise"), Variant(SGD)
SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class PaperNumber:
    """A number that the paper prints, and our prediction. `unit` is min, s, % or times."""

    what: str
    predicted: float
    published: float
    unit: str
    used: bool = False
    """True if the calibration uses the number, so that it is no prediction."""
    below: bool = False
    """True if the paper gives an upper limit only."""

    @property
    def error(self) -> float:
        """The error in percent of a time or ratio, or in percentage points."""
        gap = self.predicted - self.published
        return gap if self.unit == "%" else 100 * gap / self.published


def table5(paper: Paper, works: Works, machine: Hardware) -> Iterator[PaperNumber]:
    """Compute Table 5, minutes to the last epoch on 64 GPUs: the fit uses all of them."""
    for name, row in paper["table5_minutes"].items():
        found = observations(paper, name, works[name])
        steps_s = predict(machine, list(found.values()), SC20_CODE)
        overhead = machine.epoch_s / steps_of(paper, RANKS)
        for (key, minutes), step_s in zip(row.items(), steps_s, strict=True):
            computed = minutes_of(paper, key, step_s + overhead)
            label = f"Table 5, {name}, {'SGD' if key == SGD else f'K-FAC every {key}'}"
            yield PaperNumber(label, computed, minutes, "min", used=True)


def _minutes(cell: SimulatedCell, paper: Paper) -> float:
    epochs = paper["epochs"]["sgd" if cell.variant == FIRST else "kfac"]
    return float(epochs * cell.epoch_s(paper["images"]) / 60)


def fig8(paper: Paper, works: Works, machine: Hardware) -> Iterator[PaperNumber]:
    """Predict Fig. 8 and a number of Fig. 7.

    The least and the most saving are those of three ResNets on 16 to 256 GPUs, as in section 6.4.1.
    All other numbers are those of ResNet-50.
    """
    every = paper["fig8_update_freq"]
    intervals = Intervals(every["decompose"] / 10, every["decompose"], every["at"])
    cells_of = {
        name: sweep(work, machine, [FIRST, OPT, LW], SIZES, intervals)
        for name, work in works.items()
    }
    cell_at = {
        name: {(c.variant, c.world_size): c for c in cells} for name, cells in cells_of.items()
    }
    cells, of = cells_of["resnet50"], cell_at["resnet50"]
    share = paper["fig8_efficiency"]
    for each, key in ((FIRST, "sgd"), (LW, "layer_wise"), (OPT, "comm_opt")):
        predicted = 100 * efficiency(cells, of[each, share["at"]], paper["images"])
        label = f"Fig. 8, {READ_AS_128}, {key}"
        yield PaperNumber(label, predicted, share[key], "%", key == "sgd")
    for each in (LW, OPT):
        less = {
            (model, n): _less(*(_minutes(found[v, n], paper) for v in (each, FIRST)))
            for model, found in cell_at.items()
            for n in SIZES
        }
        name = each.strategy
        low, high = paper["fig8_improvement"][name]
        # Otherwise the same published number would count twice.
        if paper["fig8_improvement_at_256"][name] != low:
            yield PaperNumber(f"Fig. 8, {name}, least less time", min(less.values()), low, "%")
        yield PaperNumber(f"Fig. 8, {name}, most less time", max(less.values()), high, "%")
        at_256 = paper["fig8_improvement_at_256"][name]
        label = f"Fig. 8, {name}, less time at 256 (model not printed, read as ResNet-50)"
        yield PaperNumber(label, less["resnet50", 256], at_256, "%")
    for each in (FIRST, LW, OPT):
        predicted = 100 * efficiency(cells, of[each, 256], paper["images"])
        limit = float(paper["fig8_efficiency_at_256"]["below"])
        yield PaperNumber(
            f"Fig. 8, efficiency at 256, {each.label}", predicted, limit, "%", below=True
        )
    kinds = {v: of[v, 64].time.kinds_s for v in (OPT, LW)}
    ratio = kinds[OPT]["ShareDecompositions"] / kinds[LW]["ShareGradients"]
    yield PaperNumber("Fig. 7, share ratio", ratio, paper["fig7_share_ratio"], "times")


def maskrcnn(paper: Paper, machine: Hardware) -> Iterator[PaperNumber]:
    """Predict Mask R-CNN with K-FAC on the heads. The numbers of steps are the paper's."""
    facts, name = paper["maskrcnn"], "Mask R-CNN"
    work = workload.of_file(FOLDER / "maskrcnn_heads.yaml", facts["per_rank_batch"])
    intervals = Intervals(**facts["intervals"])
    cells = sweep(work, machine, [FIRST, OPT], list(facts["steps"]), intervals, conduct=PAPERS_CODE)
    of = {(c.variant, c.world_size): c for c in cells}
    for n, (kfac, sgd) in facts["steps"].items():
        minutes = kfac * of[OPT, n].step_s / 60, sgd * of[FIRST, n].step_s / 60
        less = facts["less_time"][n]
        if n in facts["kfac_minutes"]:
            minutes_of_paper = facts["kfac_minutes"][n]
            yield PaperNumber(f"6.3.2, {name}, {n}, K-FAC", minutes[0], minutes_of_paper, "min")
            base = minutes_of_paper / (1 - less / 100)
            yield PaperNumber(f"6.3.2, {name}, {n}, SGD (from K-FAC's)", minutes[1], base, "min")
        yield PaperNumber(f"Fig. 9a, {name}, {n}, less time", _less(*minutes), less, "%")
    share = facts["efficiency"]
    seconds = {n: facts["steps"][n][0] * of[OPT, n].step_s for n in facts["steps"]}
    few, many = share["from"], share["at"]
    predicted = 100 * seconds[few] * few / seconds[many] / many
    yield PaperNumber(f"6.4.2, {name}, {READ_AS_128}", predicted, share["kfac"], "%")


def bert(paper: Paper, machine: Hardware) -> Iterator[PaperNumber]:
    """Predict both phases of BERT: a global batch is split into complete local parts."""
    facts = paper["bert"]
    share, intervals = facts["efficiency"], facts["intervals"]

    def times(length: int, n: int) -> StepTime:
        local = facts["local_batch"][length]
        parts = ceil(facts["global_batch"][length] / n / local)
        work = workload.of_file(FOLDER / f"bert_large_{length}.yaml", parts * local)
        plan = plan_of(work, Variant("hybrid_opt", 0.5), n, "eigen")
        return step_time(work, n, machine, plan, PAPERS_CODE)

    def kfac_s(time: StepTime) -> float:
        return time.average_s(intervals["factors"], intervals["decompose"])

    at_16 = {length: times(length, 16) for length in facts["steps"]}
    seconds = facts["steps"][128][1] * at_16[128].sgd_s
    # The same saving is 16.4 percent of phase 2 and 6.2 percent of both: the rest is phase 1.
    less = facts["less_phase2_time"]
    phase1 = facts["both_phases_seconds"] * (1 - less["both"] / less["phase2"])
    yield PaperNumber("6.3.4, BERT phase 1, 16, LAMB (from both)", seconds, phase1, "s")
    stages = at_16[128].stages_s
    update = sum(stages[s] for s in Stage)
    yield PaperNumber("6.3.4, BERT, an updating step's more", update, facts["update_seconds"], "s")
    for length in facts["steps"]:
        few, many = (times(length, share[k]) for k in ("from", "at"))
        scaled = 100 * kfac_s(few) * share["from"] / kfac_s(many) / share["at"]
        yield PaperNumber(
            f"Fig. 9b,c, BERT T={length}, efficiency at 128", scaled, share[length], "%"
        )
    gains = []
    for n in (8, 16, 32, 64, 128):
        phases = {length: times(length, n) for length in facts["steps"]}
        kfac = sum(facts["steps"][t][0] * kfac_s(time) for t, time in phases.items())
        lamb = sum(facts["steps"][t][1] * time.sgd_s for t, time in phases.items())
        gains.append(_less(kfac, lamb))
    low, high = facts["less_time"]
    yield PaperNumber("6.4.3, BERT, least less time", min(gains), low, "%")
    yield PaperNumber("6.4.3, BERT, most less time", max(gains), high, "%")


def _less(time: float, base: float) -> float:
    return 100 * (1 - time / base)


def table(rows: list[PaperNumber]) -> str:
    """Return the Markdown table with the means below it."""
    lines = ["| number | predicted | published | error |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        unit = "points" if row.unit == "%" else "%"
        error = "used" if row.used else f"{row.error:+.1f} {unit}"
        if row.below:
            error = "holds" if row.predicted < row.published else "missed"
        digits = 0 if row.unit == "s" and row.published > 1000 else 1
        shown = [f"{n:.{digits}f} {row.unit}" for n in (row.predicted, row.published)]
        shown[1] = f"< {shown[1]}" if row.below else shown[1]
        lines.append(f"| {row.what} | {' | '.join(shown)} | {error} |")
    return "\n".join([*lines, "", *means(rows)])


def means(rows: list[PaperNumber]) -> Iterator[str]:
    """Yield the mean absolute errors of the predictions, by sort."""
    predicted = [row for row in rows if not (row.used or row.below)]
    for title, chosen in (
        ("times, without ResNets", [r for r in predicted if r.unit in ("min", "s")]),
        ("efficiencies, ResNet", [r for r in predicted if f"8, {READ_AS_128}" in r.what]),
        ("efficiencies, all", [r for r in predicted if "efficiency" in r.what]),
        (
            "percent less time, ResNet",
            [r for r in predicted if "less time" in r.what and "8" in r.what[:7]],
        ),
        ("percent less time, all", [r for r in predicted if "less time" in r.what]),
    ):
        error = fmean(abs(row.error) for row in chosen)
        unit = "%" if title.startswith("times") else "points"
        yield f"* mean absolute error of {title}: {error:.1f} {unit} of {len(chosen)} numbers"


def outdated(fitted: Hardware) -> list[str]:
    """Return the values of conf/hardware/longhorn_v100.yaml that differ from the fit."""
    kept = hardware.load(MACHINE)
    pairs = {
        "step_s": (kept.rates.step_s, fitted.rates.step_s),
        "op_s": (kept.rates.op_s, fitted.rates.op_s),
        "epoch_s": (kept.epoch_s, fitted.epoch_s),
        "eigen_s": tuple(h.rates.decompose(LARGEST, "eigen") for h in (kept, fitted)),
    }
    return [
        f"{k}: file {a:.6g}, fit {b:.6g}" for k, (a, b) in pairs.items() if abs(a / b - 1) > 0.01
    ]


def main() -> int:
    """Print the table, and write it to a file if one is named."""
    command = Parser(prog="validate_simulation.py", description=__doc__.partition("\n")[0])
    command.add_argument("file", type=Path, nargs="?", help="write the table to this file, too")
    file: Path | None = command.parse_args().file
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"{file.parent}: no such folder; create it first")
    paper = published()
    works = resnets(paper)
    fitted = fit_machine(paper, works)
    a100 = hardware.load(compose.CONF_DIR / "hardware" / "theta_a100.yaml")
    rows = [
        *table5(paper, works, fitted),
        *fig8(paper, works, fitted),
        *maskrcnn(paper, fitted),
        *bert(paper, a100),
    ]
    text = table(rows)
    print(text)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")
    old = outdated(fitted)
    for line in old:
        print(f"conf/hardware/longhorn_v100.yaml is outdated: {line}", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    exit_with("validate_simulation.py", main)
