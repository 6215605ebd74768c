"""The console commands: parse, call, turn errors into one line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 bad input, 128 + n stopped by signal n. Nothing heavy
is imported before the input is known to be good.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from kfac_bench.errors import LostRanksError, OneRankError, UsageError

TRAIN_USAGE = """\
usage: kfac-train [GROUP=NAME | OPTION=VALUE]... [--config-dir DIR] [--cfg job] [--multirun]

Train a model, with K-FAC or without. Every option has a default that needs no data on disk.

  kfac-train model=resnet50 kfac.update_freq=500
  kfac-train model=resnet20 data=cifar10 data.root=DIR kfac=layer_wise trainer.target=0.92
  kfac-train experiment=digits_autoencoder_kfac seed=1
  kfac-train experiment=kaisa_unet_lgg profile=smoke           (smoke|one_gpu|paper)
  torchrun --nproc-per-node 2 -m kfac_bench model=resnet20     (several ranks)

  --cfg job          print the configuration and stop     dry_run=true   print what it costs
  --config-dir DIR   more configuration files, as in conf/: DIR/experiment/NAME.yaml
  --multirun, -m     run each of seed=0,1,2 ... (Hydra)   --version, --help
"""

RANK_0_SPEAKS_S = 10

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


def train(argv: Sequence[str] | None = None) -> NoReturn:
    """``kfac-train``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _exit_with("kfac-train", lambda: _train(arguments))


def bench(argv: Sequence[str] | None = None) -> NoReturn:
    """``kfac-bench``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _exit_with("kfac-bench", lambda: _bench(arguments))


def plan(argv: Sequence[str] | None = None) -> NoReturn:
    """``kfac-plan``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _exit_with("kfac-plan", lambda: _plan(arguments))


def data(argv: Sequence[str] | None = None) -> NoReturn:
    """``kfac-data``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _exit_with("kfac-data", lambda: _data(arguments))


def _exit_with(name: str, main: Callable[[], int]) -> NoReturn:
    try:
        code = main()
    except OneRankError as error:
        _say_as_rank(name, str(error))
        code = 2
    except UsageError as error:
        _say_once(f"{name}: {error}")
        code = 2
    except LostRanksError as error:
        _say_as_rank(name, f"lost another rank: {error}")
        code = 1
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:  # argparse has printed its help
        code = int(stop.code or 0)
    except BrokenPipeError:
        code = 0
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if int(_launched("WORLD_SIZE", "HOROVOD_SIZE", "1")) > 1:
        # Now and then a gloo thread aborts the process in C++'s destructors, its work done.
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


def _say_once(text: str) -> None:
    """On rank 0, or alone: all ranks parse the same command line.

    The others give it time: launchers kill all ranks as soon as the first is gone.
    """
    if _launched("RANK", "HOROVOD_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)
    else:
        time.sleep(RANK_0_SPEAKS_S)


def _launched(torchrun: str, horovodrun: str, alone: str) -> str:
    """What the launcher, whichever it was, says in its variable."""
    return os.environ.get(horovodrun) or os.environ.get(torchrun) or alone


class _Parser(argparse.ArgumentParser):
    """argparse, in one line and without its usage dump."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _say_as_rank(name: str, text: str) -> None:
    rank = _launched("RANK", "HOROVOD_RANK", "")
    print(f"{name}: rank {rank}: {text}" if rank else f"{name}: {text}", file=sys.stderr)


def _train(arguments: list[str]) -> int:
    parser = _Parser(prog="kfac-train", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job",))
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    if options.version:
        from kfac_bench import __version__

        print(__version__)
        return 0
    from kfac_bench import compose

    if options.config_dir is not None and not options.config_dir.is_dir():
        raise UsageError(f"--config-dir {options.config_dir}: no such folder")
    if options.help:
        print(TRAIN_USAGE + compose.describe_options(options.config_dir))
        return 0
    if options.multirun and options.cfg:
        raise UsageError("--cfg prints one configuration: use it without --multirun")
    if options.multirun:
        return _multirun(options.overrides, options.config_dir)
    config = compose.load(options.overrides, options.config_dir)
    if options.cfg:
        print(compose.to_yaml(config), end="")
        return 0
    return _run(config)


def _run(config: object) -> int:
    from kfac_bench.config import TrainConfig

    assert isinstance(config, TrainConfig)
    if config.dry_run:
        from kfac_bench import dry_run, plan_report

        print(plan_report.describe(dry_run.trace(config), by_layer=True))
        return 0
    from kfac_bench import backends, run

    with backends.join(config.backend, config.trainer.device) as backend:
        status, signal = run.train(config, backend)
    return {"failed": 1, "interrupted": 128 + signal}.get(status, 0)


def _multirun(overrides: list[str], config_dir: Path | None) -> int:
    """Hydra's own sweep: its launchers and sweepers work."""
    import tempfile

    import hydra
    from omegaconf import DictConfig

    from kfac_bench import compose

    overrides = compose.with_profile(overrides, config_dir)
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(compose.CONF_DIR), config_name="train")
    def job(composed: DictConfig) -> int:
        if any(code >= 128 for code in codes):  # stopped by a signal: so is the sweep
            return codes[-1]
        try:
            codes.append(_run(compose.from_composed(composed)))
        except UsageError as error:
            _say_once(f"kfac-train: {error}")
            codes.append(2)
        return codes[-1]

    extra = [] if config_dir is None else ["--config-dir", str(config_dir)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come out as exceptions
    with tempfile.TemporaryDirectory() as scratch:  # for Hydra's own files
        sys.argv = ["kfac-train", "--multirun", *extra, *overrides, f"hydra.sweep.dir={scratch}"]
        try:
            job()
        except compose.HYDRA_ERRORS as error:
            raise compose.usage_error(error, overrides, config_dir) from None
    return max(codes, default=0)


def _simulate(arguments: list[str]) -> int:
    from kfac_bench.simulate import command

    parser = _Parser(prog="kfac-plan simulate", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    if options.help:
        print(command.USAGE, end="")
        return 0
    if options.config_dir is not None and not options.config_dir.is_dir():
        raise UsageError(f"--config-dir {options.config_dir}: no such folder")
    print("\n".join(command.simulate(options.words, options.config_dir)))
    return 0


def _plan(arguments: list[str]) -> int:
    if arguments[:1] == ["simulate"]:
        return _simulate(arguments[1:])
    parser = _Parser(prog="kfac-plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    if options.help:
        print(PLAN_USAGE, end="")
        return 0
    if options.config_dir is not None and not options.config_dir.is_dir():
        raise UsageError(f"--config-dir {options.config_dir}: no such folder")
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
    from kfac_bench import compose

    config = compose.load(overrides, options.config_dir)
    from kfac_bench import dry_run, plan_report

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


def _bench(arguments: list[str]) -> int:
    parser = _Parser(
        prog="kfac-bench",
        description="Compare runs, run a benchmark, tune its settings. Event files alone are read.",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    compare = commands.add_parser("compare", help="table and curves of runs")
    compare.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    compare.add_argument("--html", type=Path, help="write one self-contained page")
    compare.add_argument("--svg", type=Path, help="write the figure alone")
    compare.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    commands.add_parser("list", help="benchmarks there are")
    run = commands.add_parser("run", help="run a benchmark's cells, then compare them")
    tune = commands.add_parser("tune", help="find settings, with one equal budget per optimizer")
    for command in (run, tune):
        command.add_argument("benchmark", help="a name from kfac-bench list")
        command.add_argument("--runs-dir", help="where run directories go (runs/NAME)")
    run.add_argument("--seeds", type=int, nargs="+", help="instead of the benchmark's own")
    run.add_argument("--html", type=Path, help="the page (RUNS_DIR/report.html)")
    tune.add_argument("--out", type=Path, required=True, help="folder for experiment files")
    tune.add_argument("--only", default="", help="the one experiment to find settings for")
    options = parser.parse_args(arguments)
    if options.command == "compare":
        return _compare(options.runs, options.html, options.svg, options.markdown)
    from kfac_bench import bench, compose

    if options.command == "list":
        for name in compose.options_of("benchmark"):
            print(f"{name}: {bench.load(name).title}")
        return 0
    benchmark = bench.load(options.benchmark)
    if options.command == "tune":
        from kfac_bench import tune as tuner

        runs_dir = options.runs_dir or f"runs/{options.benchmark}_tuning"
        tuner.tune(benchmark, runs_dir, options.out, _say, options.only)
        return 0
    runs_dir = options.runs_dir or f"runs/{options.benchmark}"
    cells = bench.cells(benchmark, runs_dir, options.seeds)
    failed = bench.run_cells(cells, _say)
    paths = {cell.label: cell.path() for cell in cells}
    began = [path for path in paths.values() if (path / "events.jsonl").exists()]
    for label in (label for label, path in paths.items() if path not in began):
        _say(f"not in the table, for it failed before its first event: {label}")
    _compare(began, options.html or Path(runs_dir) / "report.html", None, False)
    return 1 if failed else 0


def _say(text: str) -> None:
    print(text, flush=True)


def _compare(runs: list[Path], html: Path | None, svg: Path | None, markdown: bool) -> int:
    from rich.console import Console

    from kfac_bench import report

    found = report.compare(runs, html)
    if markdown:
        print(report.markdown_table(found.rows))
    else:
        Console().print(report.terminal_table(found.rows))
    for note in found.notes:
        print(note)
    if svg is not None:
        try:
            svg.write_text(report.figure_svg(found.settings), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{svg}: cannot be written ({error.strerror})") from None
        print(f"figure: {svg}")
    if html is not None:
        print(f"report: {html.resolve()}")
    return 0


def _data(arguments: list[str]) -> int:
    from kfac_bench.data import demo

    parser = _Parser(prog="kfac-data", description="Make demo data, verify data on disk.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    make = commands.add_parser("make-demo", help="write a small demo in a data set's real layout")
    make.add_argument("layout", choices=demo.LAYOUTS)
    verify = commands.add_parser("verify", help="read every file; exit code 1 if one is damaged")
    prepare = commands.add_parser("prepare", help="make of a published data set what is trained on")
    prepare.add_argument("layout", choices=("shards", "wikipedia", "wikitext", "text"))
    prepare.add_argument("--source", type=Path, required=True, help="ImageNet's folders, or text")
    for command in (make, verify, prepare):
        command.add_argument("folder", type=Path)
    prepare.add_argument("--vocab-file", type=Path, help="vocab.txt to use, instead of a new one")
    prepare.add_argument("--vocab-size", type=int, default=30522, help="of a new one (30522)")
    prepare.add_argument("--sequence-length", type=int, nargs="+", default=[128], help="128, 512")
    prepare.add_argument("--eval-share", type=float, default=0.01, help="documents held out (0.01)")
    options = parser.parse_args(arguments)
    if options.command == "prepare":
        return _prepare(options)
    if options.command == "make-demo":
        demo.make(options.layout, options.folder)
        print(f"{options.folder}: made")
        return 0
    from kfac_bench.data.verify import verify as check

    found, faults = check(options.folder)
    for path, fault in faults:
        print(f"{path}: {fault}")
    print(f"{found}; {len(faults) or 'no'} faults")
    return 1 if faults else 0


def _prepare(options: argparse.Namespace) -> int:
    if options.layout == "shards":
        from kfac_bench.data import shards

        for line in shards.write(options.folder, options.source):
            _say(line)
        return 0
    from functools import partial

    from kfac_bench.data import documents
    from kfac_bench.data import prepare as preparation

    preparation.prepare(
        partial(documents.read, options.layout, options.source),
        options.folder,
        vocabulary_file=options.vocab_file,
        vocabulary_size=options.vocab_size,
        sequence_lengths=options.sequence_length,
        eval_share=options.eval_share,
        about=f"{options.layout}: {options.source}",
        say=_say,
    )
    print(f"{options.folder}: made")
    return 0
