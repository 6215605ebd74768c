"""Compare the choice of KFAC(max_overhead=...) with measured times: benchmarks/overhead.py --help.

A row measures each kind of step (precondition only, also update factors, also decompose) of K-FAC
and of SGD alone, in turns, and weighs the kinds by the chosen intervals. With ``--method
eigen_adam`` it compares EigenAdam with AdamW.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import intervals, tables
from benchmarks.measure import Case, Variant, time_kinds
from benchmarks.models import Size
from kfac_bench.core.planning.budget import BudgetError, Choice
from kfac_bench.core.planning.layer_spec import FACTORS
from kfac_bench.core.planning.plan import EIGEN_ADAM, Plan
from kfac_bench.core.stepper import WITH_STATISTICS, WITHOUT
from kfac_bench.training import environment

CASES = (
    ("resnet32", 128),
    ("digits_resnet50", 128),
    ("encoder", 32),
    ("bert_base", 4),
    ("resnet50", 8),
    ("resnet50", 32),
    ("bert_base", 32),
)
"""Models with examples per step; an example of BERT has 128 tokens."""
HEADER = (
    "model, examples", "budget", "`max_dim`", "`block_size`", "intervals", "whole", "predicted",
    "measured", "of budget",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Print a row after the other; return the exit code."""
    known = list(dict(CASES))
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", default=",".join(known), help="names of models")
    parser.add_argument("--budgets", default="0.25,0.5", help="values of max_overhead")
    parser.add_argument("--method", choices=("inverse", EIGEN_ADAM), default="inverse")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="run the code once with tiny models")
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown model {unknown[0]!r}: choose from {', '.join(known)}")
    torch.set_num_threads(options.threads)
    environment.keep_freed_memory()
    rows = []
    for name, batch in CASES:
        if name in names:
            size = Size(batch=0 if options.quick else batch, quick=options.quick)
            for budget in map(float, options.budgets.split(",")):
                rows.append(row(Case(name, size), options.method, budget, options.rounds))
                print(rows[-1], file=sys.stderr, flush=True)
    print(tables.table(HEADER, rows))
    return 0


def row(case: Case, method: str, budget: float, rounds: int) -> list[str]:
    """Let K-FAC choose within the budget, then measure what it chose."""
    given = (40, 40) if method == EIGEN_ADAM else (10, 100)
    variant = Variant(case, method, *given, max_overhead=budget)
    label = [f"{case.name}, {variant.workload.shape}", f"{budget:g}"]
    assert variant.kfac is not None
    try:
        variant.block(WITH_STATISTICS + WITHOUT)
    except BudgetError as error:
        return [*label, *[""] * 4, str(error).partition(":")[0], "", ""]
    choice, whole = variant.kfac.choice, share_whole(variant.kfac.plan)
    assert choice is not None
    del variant
    options = {"max_dim": choice.max_dim, "block_size": choice.block_size}
    measured = replace(case, kfac=options, adam=method == EIGEN_ADAM)
    timing = time_kinds(measured, [method], rounds)
    found = intervals.combine(timing, method, choice.factor_update_freq, choice.update_freq)
    low, mean, high = (found[key] - 1 for key in ("low", "ratio", "high"))
    return [*label, *_chosen(choice), f"{whole:.2f}", f"{choice.overhead:.2f}",
            f"{mean:.2f} ({low:.2f} to {high:.2f})", f"{mean / budget:.2f}"]  # fmt: skip


def _chosen(choice: Choice) -> Iterator[str]:
    yield str(choice.max_dim)
    yield "none" if choice.block_size is None else str(choice.block_size)
    yield f"{choice.factor_update_freq}, {choice.update_freq}"


def share_whole(plan: Plan) -> float:
    """Return the share of the factors that are no diagonals, weighted by weights."""
    layers = [placement.layer for placement in plan.placements]
    whole = sum(x.grad_numel * (not x.is_diagonal(side)) for x in layers for side in FACTORS)
    return whole / (2 * sum(x.grad_numel for x in layers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
