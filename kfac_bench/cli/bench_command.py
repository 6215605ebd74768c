"""``kfac-bench``: tables, figures and pages of runs.

Each subcommand has a function ``add_NAME``, which declares the arguments and names the function
that runs the subcommand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.compare_command import add_compare
from kfac_bench.cli.dashboard_command import add_dashboard, add_wandb
from kfac_bench.cli.entry import Parser, say
from kfac_bench.cli.export_command import add_export
from kfac_bench.cli.profile_command import add_profile
from kfac_bench.cli.scaling_command import add_scaling
from kfac_bench.cli.suite_command import add_list, add_report, add_run


def bench(arguments: list[str]) -> int:
    """Parse and run ``kfac-bench``; return the exit code."""
    options = build_parser().parse_args(arguments)
    code: int = options.run_command(options)
    return code


def build_parser() -> Parser:
    """Return the parser of all subcommands."""
    parser = Parser(
        prog="kfac-bench",
        description="Compare runs, run benchmarks, tune settings. Results come from event files.",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for add in (
        add_compare,
        add_profile,
        add_list,
        add_run,
        add_report,
        add_tune,
        add_scaling,
        add_export,
        add_dashboard,
        add_wandb,
    ):
        add(commands)
    return parser


def add_tune(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench tune``."""
    command = commands.add_parser("tune", help="tune each optimizer with the same budget")
    command.add_argument("benchmark", help="a name from kfac-bench list")
    command.add_argument("--runs-dir", help="where run directories go (default: runs/NAME_tuning)")
    command.add_argument("--out", type=Path, required=True, help="folder for experiment files")
    command.add_argument(
        "--only", default="", help="tune only experiments whose names begin with this text"
    )
    command.set_defaults(run_command=_tune)


def _tune(options: argparse.Namespace) -> int:
    from kfac_bench.benchmark import schema, tune

    benchmark = schema.load(options.benchmark)
    runs_dir = options.runs_dir or f"runs/{options.benchmark}_tuning"
    tune.tune(benchmark, runs_dir, options.out, say, options.only)
    return 0
