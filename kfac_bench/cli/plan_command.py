"""``kfac-plan``: what K-FAC costs each rank, and what it takes on machines that are not at hand."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from kfac_bench.cli.entry import Parser, check_config_dir
from kfac_bench.errors import UsageError

PLAN_USAGE = """\
usage: kfac-plan [world_size=N] [out=FILE.json] [GROUP=NAME | OPTION=VALUE]... [--layers]

Say what K-FAC costs each of N ranks: memory, FLOPs, messages and bytes. Needs no GPU, no data, no
ranks: only shapes. Options are those of kfac-train (kfac-train --help).

  kfac-plan model=resnet50 world_size=64 kfac=hybrid_opt
  kfac-plan model=resnet50 data=imagefolder trainer.batch_size=2048 world_size=64 out=-

  world_size=1       ranks
  out=FILE.json      every rank's figures (plans/RUN_ID-N.json); - prints them instead; null: none
  --layers           list each layer with its factors, and what is left to the optimizer
  --config-dir DIR   more configuration files, as in conf/       --help

kfac-plan simulate --help: what it takes, in seconds, on many ranks of a machine.
"""


def plan(arguments: list[str]) -> int:
    """Parse and run; the exit code."""
    if arguments[:1] == ["simulate"]:
        return _simulate(arguments[1:])
    parser = Parser(prog="kfac-plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    if options.help:
        print(PLAN_USAGE, end="")
        return 0
    check_config_dir(options.config_dir)
    own = {"world_size": "1", "out": ""}
    overrides = []
    for override in options.overrides:
        name, _, value = override.partition("=")
        if name in own:
            own[name] = value
        else:
            overrides.append(override)
    if not own["world_size"].isdecimal() or int(own["world_size"]) < 1:
        raise UsageError(f"world_size={own['world_size']}: expected a whole number of at least 1")
    gc.disable()  # which takes a fifth of the imports' time, for nothing
    try:
        return _say_plan(overrides, options, int(own["world_size"]), own["out"])
    finally:
        gc.enable()


def _say_plan(overrides: list[str], options: argparse.Namespace, world_size: int, out: str) -> int:
    from kfac_bench.config import compose

    config = compose.load(overrides, options.config_dir)
    from kfac_bench.simulate import plan_report
    from kfac_bench.training import dry_run

    run = dry_run.trace(config, world_size)
    if out == "-":
        print(plan_report.to_json(run), end="")
        return 0
    path = None if out == "null" else Path(out or plan_report.default_path(run))
    if path is not None:
        plan_report.write(run, path)
    print(plan_report.describe(run, by_layer=options.layers))
    if path is not None:
        print(f"every rank: {path}")
    return 0


def _simulate(arguments: list[str]) -> int:
    from kfac_bench.simulate import simulate_options

    parser = Parser(prog="kfac-plan simulate", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args(arguments)
    if options.help:
        print(simulate_options.USAGE, end="")
        return 0
    check_config_dir(options.config_dir)
    print("\n".join(simulate_options.simulate(options.words, options.config_dir)))
    return 0
