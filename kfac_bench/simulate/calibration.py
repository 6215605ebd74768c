"""Fit the constants of a machine that no data sheet states to published seconds of steps.

There are three constants, and all of them are at least 0:

* :attr:`.Rates.step_s`: the seconds of a step that neither work nor calls explain.
* :attr:`.Rates.op_s`: the seconds of one call to the device.
* The scale of :attr:`.Rates.eigen_s`, whose growth with the size is known.

``scripts/calibrate.py`` gives the published seconds, ``benchmarks/simulation_folds.py`` predicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from kfac_bench.simulate.conduct import Conduct
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.step import StepTime, Workload
from kfac_bench.simulate.sweep import Intervals, SimulatedCell, Variant, sweep

_Vector = NDArray[np.float64]
_START = np.array([0.0, 0.0, 1.0])
_STEPS = np.array([1e-3, 1e-6, 1e-2])
"""Changes of the constants from which the slopes of the seconds follow."""
_MOST_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Observation:
    """The published mean seconds of a step, measured or derived from the minutes of a training."""

    work: Workload
    world_size: int
    variant: Variant
    intervals: Intervals
    step_s: float


@dataclass(frozen=True, slots=True)
class Constants:
    """The three constants that :func:`fit` finds."""

    step_s: float
    op_s: float
    eigen_scale: float
    """Factor of the decompositions' seconds."""

    def of(self, known: Hardware) -> Hardware:
        """Return ``known`` with these constants in place of its own."""
        # Tables are read on logarithmic axes, so their seconds cannot be 0.
        scale = max(self.eigen_scale, 1e-9)
        eigen_s = {n: scale * s for n, s in known.rates.eigen_s.items()}
        rates = replace(known.rates, step_s=self.step_s, op_s=self.op_s, eigen_s=eigen_s)
        return replace(known, rates=rates)


def fit(known: Hardware, observations: Sequence[Observation], conduct: Conduct) -> Constants:
    """Return the constants with the least sum of squared relative errors.

    The seconds of a step are linear in the constants, as long as the same rank is the slowest. So
    the slopes at one point give the best constants, and a few rounds find the slowest rank. A
    constant that changes no observation stays at its start.

    Args:
        known: The machine. Of its own constants, only the growth of ``eigen_s`` matters.
        observations: The published seconds.
        conduct: How the published implementation uses the machine.

    Raises:
        ValueError: The observations do not determine the constants.
    """
    published = np.array([each.step_s for each in observations])
    found = _START
    for _ in range(_MOST_ROUNDS):
        base = _seconds(known, observations, conduct, found)
        changed = [found + step for step in np.diag(_STEPS)]
        slopes = np.stack([_seconds(known, observations, conduct, c) - base for c in changed], 1)
        relative = slopes / published[:, None]
        matters = relative.any(axis=0)
        if np.linalg.matrix_rank(relative[:, matters]) < matters.sum():
            raise ValueError(
                f"{len(observations)} observations do not determine {matters.sum()} constants: "
                "add a workload, an interval or a step without K-FAC"
            )
        rest = 1 - (base - slopes @ (found / _STEPS)) / published
        before, found = found, _START.copy()
        found[matters] = nnls(relative[:, matters], rest)[0] * _STEPS[matters]
        if np.all(np.abs(found - before) <= 1e-9 * _STEPS):
            break
    return Constants(*found.tolist())


def _seconds(
    known: Hardware, observations: Sequence[Observation], conduct: Conduct, constants: _Vector
) -> _Vector:
    machine = Constants(*constants.tolist()).of(known)
    return np.array(predict(machine, observations, conduct))


def predict(
    machine: Hardware, observations: Sequence[Observation], conduct: Conduct
) -> list[float]:
    """Return the simulated seconds of each observed step."""
    cells: dict[tuple[int, int, Variant], SimulatedCell] = {}
    seconds = []
    for each in observations:
        # Observations that differ in their intervals alone need only one simulation.
        key = (id(each.work), each.world_size, each.variant)
        if key not in cells:
            ranks, variants = [each.world_size], [each.variant]
            (cells[key],) = sweep(
                each.work, machine, variants, ranks, each.intervals, conduct=conduct
            )
        intervals = each.intervals.of(each.world_size)
        seconds.append(replace(cells[key], intervals=intervals).step_s)
    return seconds


def split_epoch_s(
    machine: Hardware, times: dict[int, StepTime], steps: dict[int, int], at: int, share: float
) -> Hardware:
    """Move a part of ``step_s`` to ``epoch_s``, so that ranks scale with a published efficiency.

    Both constants add the same time to an epoch on ``at`` ranks. On more ranks an epoch has fewer
    steps, but just as much overhead.

    Args:
        machine: The machine, whose ``step_s`` holds all of the time on ``at`` ranks.
        times: The step on the fewest ranks of the published efficiency, and on the most.
        steps: The steps of an epoch on these two numbers of ranks, and on ``at``.
        at: The number of ranks to which ``step_s`` was fitted.
        share: The published efficiency, between 0 and 1.

    Raises:
        ValueError: The efficiency needs more time than ``step_s`` has.
    """
    (few, many), fitted = sorted(times), steps[at]
    lost = share * times[many].sgd_s - times[few].sgd_s
    weight = steps[many] * (1 - steps[few] / fitted)
    weight -= share * steps[few] * (1 - steps[many] / fitted)
    epoch_s = steps[few] * steps[many] * lost / weight
    step_s = machine.rates.step_s - epoch_s / fitted
    if step_s < 0 or epoch_s < 0:
        raise ValueError(f"an efficiency of {share:g} needs {epoch_s:.3g} s in each epoch")
    return replace(machine, rates=replace(machine.rates, step_s=step_s), epoch_s=epoch_s)
