"""``kfac-plan``: what K-FAC costs each rank, and how long a step takes on many ranks."""

import argparse
import gc
from pathlib import Path

from kfac_bench.cli.entry import Parser, check_config_dir, command_line, say_next
from kfac_bench.config.command_options import given_options, refuse_old_words, whole_number
from kfac_bench.output import say


def plan(arguments: list[str]) -> int:
    """Parse and run ``kfac-plan``; return the exit code."""
    if arguments[:1] == ["simulate"]:
        return _simulate(arguments[1:])
    parser = plan_parser()
    options = parser.parse_args(arguments)
    if _has_helped(options, parser):
        return 0
    refuse_old_words(options.overrides, parser)
    world_size = whole_number("--world-size", options.world_size)
    # Garbage collection takes a fifth of the imports' time, and the imports leave no garbage.
    gc.disable()
    try:
        return _print_plan(options, world_size)
    finally:
        gc.enable()


def plan_parser() -> Parser:
    """Return the parser of ``kfac-plan``."""
    parser = _parser(
        "kfac-plan",
        "Print what K-FAC costs each of N ranks: memory, FLOPs, messages and bytes. The command "
        "needs no GPU, no data and no other ranks, only shapes. The other options are those of "
        "kfac-train (kfac-train --help).",
        "kfac-plan model=resnet50 data=imagefolder --world-size 64 kfac=hybrid_opt. "
        "kfac-plan simulate --help: how many seconds a step takes on many ranks of a machine.",
    )
    add = parser.add_argument
    add("--world-size", default="1", metavar="N", help="number of ranks (default: 1)")
    add(
        "--out",
        default="",
        metavar="FILE.json",
        help="where the numbers of every rank go (default: plans/RUN_ID-N.json); - prints them, "
        "null writes no file",
    )
    add(
        "--layers",
        action="store_true",
        help="list each layer with its factors, also the layers without K-FAC",
    )
    return parser


def simulate_parser() -> Parser:
    """Return the parser of ``kfac-plan simulate``."""
    parser = _parser(
        "kfac-plan simulate",
        "Simulate how long a step, an epoch and a whole training take on many ranks, with SGD and "
        "with each K-FAC strategy. The simulation runs the plan's operations and messages on a "
        "model of the hardware. docs/explanation/scaling.md says how accurate the model is. Each "
        "rank has the same number of examples on any world size. The other options are those of "
        "kfac-train.",
        "kfac-plan simulate model=resnet50 --hardware longhorn_v100 --world-size 16,32,64",
    )
    for name, default, about in (
        ("hardware", "", "NAME of conf/hardware/NAME.yaml, or the path of your own YAML file"),
        ("world-size", "16,32,64,128,256", "numbers of ranks"),
        (
            "strategies",
            "",
            "strategies with commas, such as sgd,hybrid_opt@1/4 (its fraction); default: all that "
            "the method allows, or those of the paper's code for hardware that runs it",
        ),
        ("per-rank-batch", "32", "examples of one rank in a step"),
        (
            "update-freq-at",
            "",
            "number of ranks that kfac.update_freq and kfac.factor_update_freq belong to; on other "
            "numbers of ranks, K-FAC's stages run as often per epoch",
        ),
        (
            "epoch-s",
            "",
            "seconds of an epoch beside its steps, in place of those of the hardware file; with "
            "--examples",
        ),
        ("examples", "", "examples of an epoch (for data=imagefolder: those of ImageNet)"),
        ("epochs", "", "epochs to solution without K-FAC, with --examples (default: 90)"),
        ("kfac-epochs", "", "epochs to solution with K-FAC, with --examples (default: 55)"),
        ("out", "", "write every number to this JSON file; - prints them"),
        ("svg", "", "draw the figure into this file"),
    ):
        said = f"{about} (default: {default})" if default else about
        parser.add_argument(f"--{name}", default=default, metavar="VALUE", help=said)
    return parser


def _parser(prog: str, description: str, example: str) -> Parser:
    parser = Parser(
        prog=prog,
        add_help=False,
        allow_abbrev=False,
        description=description,
        epilog=f"Example: {example}",
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OPTION=VALUE", help="options of kfac-train")
    add(
        "--help",
        "-h",
        action="store_true",
        help="print this text, or explain a group, a choice or an option: --help kfac.damping",
    )
    add("--config-dir", type=Path, help="read more configuration files, laid out as in conf/")
    return parser


def _has_helped(options: argparse.Namespace, parser: Parser) -> bool:
    """Print the help that ``--help`` asks for; return whether it does."""
    check_config_dir(options.config_dir)
    if not options.help:
        return False
    about = ""
    names = {word.partition("=")[0] for word in options.overrides}
    # The usage explains the options that only the command has.
    if names and not names & ({action.dest for action in parser._actions} - {"hardware"}):
        from kfac_bench.config import option_help

        about = option_help.describe(options.overrides, options.config_dir)
    say(about or parser.format_help().rstrip())
    return True


def _print_plan(options: argparse.Namespace, world_size: int) -> int:
    overrides, out = options.overrides, options.out
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
    parser = simulate_parser()
    options = parser.parse_args(arguments)
    if _has_helped(options, parser):
        return 0
    refuse_old_words(options.overrides, parser)
    from kfac_bench.config import problem_file
    from kfac_bench.simulate import simulate_options

    problem_file.run_named(options.overrides)
    say("\n".join(simulate_options.simulate(options)))
    if options.out == "-":
        return 0  # a pipe reads the numbers
    words = ["simulate", *options.overrides, *given_options(options, parser)]
    if options.svg and options.out:
        say_next("kfac-bench scaling", "measures the ranks of this machine")
    elif options.svg:
        say_next(command_line("kfac-plan", [*words, "--out", "steps.json"]), "every number")
    else:
        say_next(command_line("kfac-plan", [*words, "--svg", "steps.svg"]), "the figure")
    return 0
