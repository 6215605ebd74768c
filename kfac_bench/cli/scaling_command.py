"""``kfac-bench scaling``; :mod:`kfac_bench.benchmark.scaling.scaling_options` parses its words."""

from __future__ import annotations

import argparse

from kfac_bench.cli.entry import Parser, command_line, say_next
from kfac_bench.output import say


def add_scaling(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench scaling``."""
    command = commands.add_parser(
        "scaling", help="measure efficiency and stages on several numbers of ranks", add_help=False
    )
    command.add_argument("--help", "-h", action="store_true")
    command.add_argument("words", nargs="*")
    command.set_defaults(run_command=_scaling)


def _scaling(options: argparse.Namespace) -> int:
    from kfac_bench.benchmark.scaling import scaling_options
    from kfac_bench.config import problem_file

    if options.help:
        say(scaling_options.USAGE, end="")
        return 0
    problem_file.run_named(options.words)
    code = scaling_options.scaling(options.words, say)
    if code:
        say_next(command_line("kfac-bench scaling", options.words), "measures what is missing")
    elif not any(word.startswith(("hardware=", "launcher=slurm")) for word in options.words):
        words = [*options.words, "hardware=two_cores"]
        say_next(command_line("kfac-bench scaling", words), "adds simulated efficiencies")
    return code
