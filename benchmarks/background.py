"""Measure `KFAC(background=True)` on two cores: wall time of every step, training on one thread.

    python benchmarks/background.py [--rounds 3]

SGD, K-FAC as it is by default, and K-FAC with its work beside training take turns in one process.
A turn is some whole intervals. No other program should use the two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import speed, tables
from benchmarks.measure import Case, Variant
from benchmarks.models import NAMES, Size
from kfac_bench.errors import UsageError
from kfac_bench.training import environment

TURN_STEPS = 20
"""Fewest steps of a turn."""
VARIANTS = {"SGD": None, "K-FAC": False, "K-FAC, background": True}
"""By name: the option `background`; None without K-FAC."""


@dataclass
class Steps:
    """The seconds of one variant's steps."""

    first_s: float
    each_s: list[float] = field(default_factory=list)
    """The steps after the first one."""
    means_s: list[float] = field(default_factory=list)
    """By turn: the mean step, with the time that the thread needs to finish after the turn."""

    @property
    def median_s(self) -> float:
        """The median step."""
        return statistics.median(self.each_s)

    @property
    def slowest_s(self) -> float:
        """The slowest step; the first step counts, too."""
        return max(self.first_s, *self.each_s)


def measure(case: Case, method: str, setting: tuple[int, int], rounds: int) -> dict[str, Steps]:
    """Time every step of each variant, in turns whose order rotates with the round.

    Args:
        case: The model.
        method: The method of KFAC.
        setting: Steps between factor updates, and between decompositions.
        rounds: Number of turns of each variant.
    """
    variants = {
        name: Variant(case, None if beside is None else method, *setting, **options(beside))
        for name, beside in VARIANTS.items()
    }
    found = {}
    for name, variant in variants.items():
        found[name] = Steps(variant.block(1))
        finish(variant)
    steps = -(-TURN_STEPS // setting[1]) * setting[1]  # whole intervals
    names = list(variants)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            found[name].each_s += [variants[name].block(1) for _ in range(steps)]
            finish(variants[name])
            found[name].means_s.append((time.perf_counter() - start) / steps)
    return found


def options(beside: bool | None) -> dict[str, Any]:
    """Return the keywords of KFAC."""
    return {} if beside is None else {"background": beside}


def finish(variant: Variant) -> None:
    """Wait for the thread: it must not work during another variant's turn."""
    if variant.kfac is not None:
        variant.kfac.state_dict()


def rows(name: str, method: str, setting: tuple[int, int], found: dict[str, Steps]) -> list[Any]:
    """Return one row of the table for each variant."""
    means = {variant: statistics.median(steps.means_s) for variant, steps in found.items()}
    return [
        [
            name, method, "{}, {}".format(*setting), variant, tables.ms(means[variant]),
            f"{means[variant] / means['SGD']:.2f}", f"{means[variant] / means['K-FAC']:.2f}",
            tables.ms(steps.median_s), f"{steps.slowest_s / steps.median_s:.2f}",
            f"{steps.first_s / steps.median_s:.2f}",
        ]
        for variant, steps in found.items()
    ]  # fmt: skip


HEADER = (
    "model", "method", "factors, decompositions every", "variant", "mean ms", "mean / SGD",
    "mean / K-FAC", "median ms", "slowest / median", "first / median",
)  # fmt: skip


def core_share() -> float:
    """Return the share of a core that a busy thread of this process gets now."""
    x = torch.ones(512, 512)
    wall, cpu = time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall < 1:
        x @ x
    return (time.thread_time() - cpu) / (time.perf_counter() - wall)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options."""
    parser = speed.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=speed.words, default=list(speed.REAL))
    parser.add_argument("--methods", type=speed.words, default=["eigen"])
    parser.add_argument("--rounds", type=speed.whole, default=3, help="turns of each variant (3)")
    parser.add_argument("--quick", action="store_true", help="run the code with tiny models")
    parsed = parser.parse_args(arguments)
    unknown = [m for m in parsed.models if m not in NAMES]
    if unknown:
        raise UsageError(f"unknown model {unknown[0]!r}: choose from {', '.join(NAMES)}")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Measure, print the table, and return the exit code: 2 for bad input."""
    try:
        parsed = parse(arguments)
        torch.set_num_threads(1)
        environment.keep_freed_memory()
        shares = [core_share()]
        table = []
        for name in parsed.models:
            case = Case(name, Size(quick=parsed.quick))
            for method in parsed.methods:
                for setting in speed.SETTINGS:
                    print(f"{name}, {method}, {setting}", file=sys.stderr)
                    rounds = 1 if parsed.quick else parsed.rounds
                    found = measure(case, method, setting, rounds)
                    table += rows(name, method, setting, found)
                    shares.append(core_share())
        print(tables.table(HEADER, table))
        if min(shares) < tables.CROWDED:
            print(f"\n**Other programs used the cores: one had {100 * min(shares):.0f} % left.**")
    except UsageError as error:
        print(f"background.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
