"""``kfac-plan``: what K-FAC costs each rank, and how long a step takes on many ranks."""

import argparse
import gc
from pathlib import Path

from kfac_bench.cli.entry import Parser, check_config_dir, command_line, say_next
from kfac_bench.cli.setup_command import OWN_WORDS
from kfac_bench.config.command_options import split_words, whole_number
from kfac_bench.output import say

PLAN_USAGE = """\
usage: kfac-plan [world_size=N] [out=FILE.json] [problem=FILE] [GROUP=NAME | OPTION=VALUE]...
                 [--layers]

Print what K-FAC costs each of N ranks: memory, FLOPs, messages and bytes. The command needs no GPU,
no data and no other ranks, only shapes. All other options are those of kfac-train (kfac-train
--help).

  kfac-plan model=resnet50 data=imagefolder world_size=64 kfac=hybrid_opt
  kfac-plan model=resnet50 data=imagefolder trainer.batch_size=2048 world_size=64 out=-

  world_size=1       number of ranks
  out=FILE.json      where the numbers of every rank go (plans/RUN_ID-N.json); out=- prints them,
                     out=null writes no file
  --layers           list each layer with its factors, also the layers without K-FAC
  --config-dir DIR   read more configuration files, laid out as in conf/
  --help [WORD]      print this text, or explain a group, a choice or an option, as kfac-train does
  --version          print the version and stop

kfac-plan simulate --help: how many seconds a step takes on many ranks of a machine.
"""


def plan(arguments: list[str]) -> int:
    """Parse and run ``kfac-plan``; return the exit code."""
    if arguments[:1] == ["simulate"]:
        return _simulate(arguments[1:])
    parser = _parser("kfac-plan")
    parser.add_argument("--layers", action="store_true")
    options = parser.parse_args(arguments)
    check_config_dir(options.config_dir)
    if options.help:
        from kfac_bench.config import option_help

        about = option_help.describe(options.words, options.config_dir) if options.words else ""
        say(about or PLAN_USAGE.rstrip())
        return 0
    own, overrides = split_words(options.words, {"world_size": "1", "out": ""})
    world_size = whole_number("world_size", own["world_size"])
    # Garbage collection takes a fifth of the imports' time, and the imports leave no garbage.
    gc.disable()
    try:
        return _print_plan(overrides, options, world_size, own["out"])
    finally:
        gc.enable()


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("words", nargs="*")
    return parser


def _print_plan(
    overrides: list[str], options: argparse.Namespace, world_size: int, out: str
) -> int:
    # A mistake in the options is reported before the imports below, which load torch.
    from kfac_bench.config import compose, problem_file, recipes

    problem_file.run_named(overrides)
    config = compose.load(overrides, options.config_dir, world_size)
    recipe = recipes.choose(overrides, options.config_dir, world_size)
    from kfac_bench.simulate import plan_report
    from kfac_bench.training import dry_run

    run = dry_run.trace(config, world_size)
    if out == "-":
        say(plan_report.to_json(run), end="")
        return 0
    path = None if out == "null" else Path(out or plan_report.default_path(run))
    if path is not None:
        plan_report.write(run, path)
    if recipe is not None:
        say(recipe.line())
    say(plan_report.describe(run, by_layer=options.layers))
    if path is not None:
        say(f"every rank: {path}")
    if world_size == 1:
        more = [] if options.config_dir is None else ["--config-dir", options.config_dir]
        say_next(command_line("kfac-train", [*overrides, *more]), "trains with these options")
    return 0


def _simulate(arguments: list[str]) -> int:
    options = _parser("kfac-plan simulate").parse_args(arguments)
    check_config_dir(options.config_dir)
    if options.help and _are_explained(options.words):
        from kfac_bench.config import option_help

        say(option_help.describe(options.words, options.config_dir))
        return 0
    from kfac_bench.config import problem_file
    from kfac_bench.simulate import simulate_options

    if options.help:
        say(simulate_options.USAGE, end="")
        return 0
    problem_file.run_named(options.words)
    say("\n".join(simulate_options.simulate(options.words, options.config_dir)))
    _say_next_simulation(options)
    return 0


def _say_next_simulation(options: argparse.Namespace) -> None:
    """Print the command that draws the figure, or the one that writes the numbers."""
    given = {word.partition("=")[0] for word in options.words}
    if "out=-" in options.words:
        return  # a pipe reads the numbers
    if given >= {"svg", "out"}:
        say_next("kfac-bench scaling", "measures the ranks of this machine")
        return
    file, why = ("svg=steps.svg", "the figure")
    if "svg" in given:
        file, why = ("out=steps.json", "every number")
    more = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    say_next(command_line("kfac-plan simulate", [*options.words, file, *more]), why)


def _are_explained(words: list[str]) -> bool:
    """Return whether the help has a text for each word. The usage explains the other own words."""
    names = {word.partition("=")[0] for word in words}
    own = {word.rstrip("=") for word in OWN_WORDS["kfac-plan simulate"]}
    return bool(names) and not names & (own - {"hardware"})
