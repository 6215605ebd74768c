"""``kfac-bench``: tables, figures and pages of runs.

Each subcommand has a function ``add_NAME``, which declares the arguments and names the function
that runs the subcommand.
"""

from __future__ import annotations

from functools import partial

from kfac_bench.cli.entry import Parser
from kfac_bench.cli.runs_command import (
    add_compare,
    add_dashboard,
    add_export,
    add_profile,
    add_runs,
    add_wandb,
)
from kfac_bench.cli.scaling_command import add_scaling
from kfac_bench.cli.setup_command import add_completion, add_slurm
from kfac_bench.cli.suite_command import add_list, add_report, add_run
from kfac_bench.cli.try_command import add_try
from kfac_bench.cli.tune_command import add_tune


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
        add_try,
        add_compare,
        add_profile,
        add_list,
        add_run,
        add_report,
        add_tune,
        add_scaling,
        add_export,
        add_runs,
        add_slurm,
        partial(add_completion, bench_parser=build_parser),
        add_dashboard,
        add_wandb,
    ):
        add(commands)
    return parser
