"""A simulated sweep as a table of text and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kfac_bench.simulate.hardware import NEAREST, Hardware, PredictionErrors
from kfac_bench.simulate.step import Workload
from kfac_bench.simulate.sweep import SGD, SimulatedCell, efficiency, fastest, hidden_ranks


@dataclass(frozen=True, slots=True)
class Training:
    """The length of a training: its epochs to solution, with and without K-FAC."""

    examples: int
    """Examples of an epoch."""
    epochs: float
    """Epochs to solution of SGD."""
    kfac_epochs: float

    def solution_s(self, cell: SimulatedCell) -> float:
        """Return the seconds until the last epoch ends."""
        epochs = self.epochs if cell.variant.strategy == SGD else self.kfac_epochs
        return epochs * cell.epoch_s(self.examples)


def saved(
    cells: Sequence[SimulatedCell],
    cell: SimulatedCell,
    training: Training | None,
    errors: PredictionErrors,
) -> tuple[float, float] | None:
    """Return the share of SGD's time to solution that K-FAC saves, and the error of this share.

    None without a training, and without a cell of SGD on as many ranks.
    """
    sgd = [c for c in cells if c.world_size == cell.world_size and c.variant.strategy == SGD]
    if training is None or not sgd or cell in sgd:
        return None
    ratio = training.solution_s(cell) / training.solution_s(sgd[0])
    return 1 - ratio, errors.ratio * ratio


def accuracy(cells: Sequence[SimulatedCell], machine: Hardware) -> list[str]:
    """Return the lines that say how wrong each column may be, and what was never validated."""
    errors = machine.nearest_errors
    lines = [
        f"mean error: ±{100 * errors.time:.1f} % of each time, examples/s and efficiency, "
        f"±{100 * errors.ratio:.1f} % of K-FAC's time over SGD's"
    ]
    labels = ", ".join(dict.fromkeys(c.variant.label for c in cells if not c.is_validated))
    if machine.errors is None:
        lines += [
            f"not validated: {machine.name} has no errors of its own. These are the errors of",
            f"  {NEAREST}'s published times of the paper's code, simulated as the code above",
        ]
    elif labels:
        lines.append(f"not validated: {labels}. The errors are those of the validated strategies")
    return lines


def conclusions(
    cells: Sequence[SimulatedCell], machine: Hardware, training: Training | None
) -> list[str]:
    """Return the lines below the table: what its numbers show, and what they do not show."""
    errors = machine.nearest_errors
    lines: list[str] = []
    kfac = [c for c in cells if c.variant.strategy != SGD]
    if len({c.variant for c in kfac}) > 1:
        lines.append("fastest K-FAC, within the error:")
        for ranks in sorted({c.world_size for c in kfac}):
            near = fastest([c for c in kfac if c.world_size == ranks], errors.ratio)
            lines.append(f"{ranks:>6} {', '.join(c.variant.label for c in near)}")
    savings = [saving for c in kfac if (saving := saved(cells, c, training, errors))]
    large = sum(wrong >= abs(share) / 2 for share, wrong in savings)
    if large:
        lines.append(
            f"saved: in {large} of {len(savings)} rows the error is about as large as the saving"
        )
    if hidden := hidden_ranks(cells):
        sizes = ", ".join(map(str, hidden))
        lines += [
            f"sgd on {sizes} ranks: backward hides the whole all-reduce "
            f"(overlap: {machine.overlap:g}).",
            "  Real networks have contention and slow ranks, so these times are lower bounds",
        ]
    return ["", *lines] if lines else []


def table(
    cells: Sequence[SimulatedCell], training: Training | None, errors: PredictionErrors
) -> list[str]:
    """Return the lines of the table, with a block for each world size."""
    head = f"{'ranks':>6} {'strategy':24}{'ms/step':>10}{'examples/s':>12}{'efficiency':>11}"
    lines = [head + (f"{'epoch, s':>10}{'to solution':>13}{'saved':>16}" if training else "")]
    previous = 0
    for cell in cells:
        # Only the first line of a block names its number of ranks.
        ranks = str(cell.world_size) if cell.world_size != previous else ""
        previous = cell.world_size
        share = 100 * efficiency(cells, cell, _examples(training))
        line = f"{ranks:>6} {cell.variant.label:24}{1e3 * cell.step_s:>10.4g}"
        line += f"{cell.epoch_rate(_examples(training)):>12.5g}{share:>9.1f} %"
        if training:
            line += f"{cell.epoch_s(training.examples):>10.4g}"
            line += f"{_duration(training.solution_s(cell)):>13}"
            if saving := saved(cells, cell, training, errors):
                line += f"{100 * saving[0]:>8.1f} ±{100 * saving[1]:>4.1f} %"
        lines.append(line)
    return lines


def _examples(training: Training | None) -> int | None:
    return None if training is None else training.examples


def _duration(seconds: float) -> str:
    """Write the time in days, hours, minutes or seconds, whichever reads best."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds:.4g} s"


def as_dict(
    work: Workload, machine: Hardware, cells: Sequence[SimulatedCell], training: Training | None
) -> dict[str, Any]:
    """Return the content of the JSON file.

    All seconds are those of the slowest rank. The seconds of a stage are those of one run of the
    stage, not the mean over all steps. ``X_error`` is the mean error of the number ``X``.
    The parts of a step have none, because no paper prints their times.
    """
    return {
        "simulated": True,
        "model": work.name,
        "hardware": machine.name,
        "step_flops_per_rank": work.step_flops,
        "parameters": work.parameters,
        "cells": [_cell(cells, cell, training, machine.nearest_errors) for cell in cells],
    }


def _cell(
    cells: Sequence[SimulatedCell],
    cell: SimulatedCell,
    training: Training | None,
    errors: PredictionErrors,
) -> dict[str, Any]:
    factors, decompose = cell.intervals
    kfac = cell.variant.strategy != SGD
    found: dict[str, Any] = {
        "strategy": cell.variant.strategy,
        "grad_worker_fraction": cell.variant.fraction,
        "world_size": cell.world_size,
        "examples": cell.examples,
        "validated": cell.is_validated,
        "forward_backward_s": cell.time.forward_backward_s,
        "gradients_s": cell.time.gradients_s,
        "every": {"factors": factors, "decompose": decompose, "precondition": 1} if kfac else {},
        "stages_s": {stage.value: s for stage, s in cell.time.stages_s.items()} if kfac else {},
        "kinds_s": cell.time.kinds_s,
    }
    predicted = {
        "step_s": cell.step_s,
        "examples_per_s": cell.epoch_rate(_examples(training)),
        "scaling_efficiency": efficiency(cells, cell, _examples(training)),
    }
    if training is not None:
        predicted["epoch_s"] = cell.epoch_s(training.examples)
        predicted["solution_s"] = training.solution_s(cell)
    for name, value in predicted.items():
        found |= {name: value, f"{name}_error": errors.time * value}
    if cell.world_size == min(c.world_size for c in cells if c.variant == cell.variant):
        found["scaling_efficiency_error"] = 0.0  # It is 1 by definition.
    if saving := saved(cells, cell, training, errors):
        found["saved"], found["saved_error"] = saving
    return found


def to_json(found: dict[str, Any]) -> str:
    """Return the JSON text of :func:`as_dict`'s result."""
    return json.dumps(found, indent=1) + "\n"
