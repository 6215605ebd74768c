"""``kfac-bench scaling``: :mod:`kfac_bench.benchmark.scaling.scaling_options` does the work."""

from __future__ import annotations

import argparse
from pathlib import Path

from kfac_bench.cli.entry import Parser, command_line, say_next
from kfac_bench.config.command_options import given_options, refuse_old_words
from kfac_bench.output import say


def add_scaling(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench scaling``."""
    command = commands.add_parser(
        "scaling",
        help="measure efficiency and stages on several numbers of ranks",
        description="Train the same on several numbers of ranks, with each strategy and with the "
        "optimizer alone. Print how the time of a step scales and where the time goes. Runs that "
        "were measured before are not run again.",
        epilog="Results: DIR/scaling.md, DIR/scaling.svg and the page DIR/scaling.html. Example: "
        "kfac-bench scaling model=resnet20 data=cifar10 --world-size 1,2",
    )
    add = command.add_argument
    add("overrides", nargs="*", metavar="OPTION=VALUE", help="options of kfac-train for all runs")
    add("--world-size", default="1,2", metavar="N,N", help="numbers of ranks (default: 1,2)")
    add(
        "--mode",
        choices=("weak", "strong"),
        default="weak",
        help="whether trainer.batch_size counts the examples of one rank (weak, the default) or of "
        "all ranks (strong)",
    )
    add(
        "--strategy",
        default="comm_opt,layer_wise",
        metavar="NAME,NAME",
        help="strategies, such as hybrid_opt@1/2 (its fraction); sgd is always measured too "
        "(default: comm_opt,layer_wise)",
    )
    add("--rounds", default="3", help="how often each run is repeated (default: 3)")
    add(
        "--steps",
        default="",
        help="steps of a window (default: kfac.update_freq); of four windows the first warms up",
    )
    add("--runs-dir", type=Path, default=Path("runs/scaling"), help="default: runs/scaling")
    add(
        "--launcher",
        choices=("local", "slurm", "none"),
        default="local",
        help="run on this machine (local, the default), submit jobs, which also write the results "
        "(slurm), or show the runs that have finished (none)",
    )
    add("--sbatch", default="", help="options of sbatch, for --launcher slurm")
    add("--hardware", default="", help="also show simulated efficiencies on this machine")
    command.set_defaults(run_command=lambda options: _scaling(options, command))


def _scaling(options: argparse.Namespace, command: Parser) -> int:
    refuse_old_words(options.overrides, command)
    from kfac_bench.benchmark.scaling import scaling_options
    from kfac_bench.config import problem_file

    problem_file.run_named(options.overrides)
    words = [*options.overrides, *given_options(options, command)]
    code = scaling_options.scaling(options, words, say)
    if code:
        say_next(command_line("kfac-bench scaling", words), "measures what is missing")
    elif not options.hardware and options.launcher != "slurm":
        words += ["--hardware", "two_cores"]
        say_next(command_line("kfac-bench scaling", words), "adds simulated efficiencies")
    return code
