"""`make faults`: inject faults into runs and report how the runs ended."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from kfac_bench.cli.entry import Parser, exit_with
from kfac_bench.errors import UsageError
from kfac_bench.output import say


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and run; return the exit code."""
    command = Parser(prog="python -m tests.reliability.faults", description=__doc__)
    command.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    command.add_argument(
        "--only", nargs="+", default=[], help="only faults whose names contain one of these words"
    )
    command.add_argument(
        "--methods", nargs="+", default=[], help="only these methods: SGD, comm_opt, ... (all)"
    )
    command.add_argument(
        "--short", action="store_true", help="try only some faults, with SGD and one strategy"
    )
    command.add_argument("--jobs", type=int, default=1, help="number of runs at a time (1)")
    command.add_argument(
        "--out", type=Path, help="write the page to this file (docs/lab/faults.md)"
    )
    command.add_argument(
        "--keep", type=Path, help="file of outcomes; those in it are not tried again"
    )
    command.add_argument("--note", default="", help="a line for the end of the page")
    command.add_argument(
        "--cost",
        type=int,
        metavar="N",
        help="measure only what checkpoints cost: run each application's smoke profile N times "
        "with checkpoints and N times without",
    )
    # A shell starts background commands with these two ignored, and ranks would ignore them too.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    return _faults(command.parse_args(arguments))


def _faults(options: argparse.Namespace) -> int:
    from datetime import date

    from kfac_bench.training import environment
    from tests.reliability.faults import cost, matrix
    from tests.reliability.faults import report as faults_report

    if options.cost is not None:
        return _cost(options.cost)
    faults = matrix.find(options.only or (matrix.SHORT if options.short else ()))
    if not faults:
        names = "; ".join(fault.name for fault in matrix.find(()))
        raise UsageError(f"--only {' '.join(options.only)}: no such fault; choose from {names}")
    methods = options.methods or (("SGD", "mem_opt") if options.short else matrix.ALL_METHODS)
    if unknown := [m for m in methods if m not in matrix.ALL_METHODS]:
        raise UsageError(f"--methods {unknown[0]}: choose from {', '.join(matrix.ALL_METHODS)}")
    outcomes = matrix.run(faults, options.ranks, methods, say, max(1, options.jobs), options.keep)
    if options.out is not None:
        about, seconds = environment.describe(), matrix.import_seconds()
        text = faults_report.page(outcomes, about, date.today(), seconds, cost.table())
        text += f"\n\n{options.note}\n" if options.note else ""
        try:
            options.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{options.out}: cannot be written ({error.strerror})") from None
        print(f"page: {options.out}")
    else:
        print(faults_report.table(outcomes).markdown())
    return 1 if any(o.wrong for o in outcomes) else 0


def _cost(pairs: int) -> int:
    from tests.reliability.faults import smoke

    if pairs < 1:
        raise UsageError(f"--cost {pairs}: must be at least 1")
    print(smoke.table(pairs, say, smoke.EXPERIMENTS).markdown())
    return 0


if __name__ == "__main__":
    exit_with("faults", main)
