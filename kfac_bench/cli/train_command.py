"""`kfac-train`: one run, or a sweep of several runs, and the lines after its end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli.entry import Parser, check_config_dir, command_line, say_next
from kfac_bench.distributed import slurm_rank
from kfac_bench.errors import UsageError
from kfac_bench.output import say
from kfac_bench.record.progress import progress
from kfac_bench.stop_signals import interrupt_afterwards

if TYPE_CHECKING:
    from kfac_bench.config import TrainConfig

TRAIN_USAGE = """\
usage: kfac-train [problem=FILE] [GROUP=NAME | OPTION=VALUE]... [--config-dir DIR] [--cfg job] [-m]

Train a model, with K-FAC or without. Every option has a default that needs no data on disk.

  kfac-train                                                   (a ResNet-8 on built-in digits)
  kfac-train model=resnet50 data=imagefolder data.root=DIR     (with the paper's recipe)
  kfac-train model=resnet20 data=cifar10 data.root=DIR kfac=layer_wise trainer.target=0.92
  kfac-train problem=my_problem.py optimizer=adam kfac=none    (your own model and data)
  kfac-train experiment=digits/autoencoder_kfac seed=1
  kfac-train experiment=kaisa_unet_lgg profile=smoke           (smoke|one_gpu|paper)
  kfac-train from=runs/RUN_ID/config.yaml seed=1      (the options of a run)
  torchrun --nproc-per-node 2 -m kfac_bench model=resnet20     (two ranks)

  recipe=none        no settings that follow from data and model (--help recipe lists them)
  --cfg job          print the configuration and stop
  dry_run=true       print what K-FAC adds in FLOPs and memory, with the parts, and stop
  --layers           with dry_run=true: list each layer, also the layers without K-FAC
  --config-dir DIR   read more configuration files, laid out as in conf/: DIR/experiment/NAME.yaml
  --multirun, -m     run each of seed=0,1,2 ... one after the other (Hydra)
  --help             print this text, all groups and all options
  --help WORD        explain a group (kfac), a choice (optimizer=adam) or an option (kfac.damping)
  --version          print the version and stop
"""


def train(arguments: list[str]) -> int:
    """Parse the arguments, run, and return the exit code."""
    # Adopt Slurm's variables before anything fails: only rank 0 prints an error.
    slurm_rank.adopt()
    code = _parse_and_run(arguments)
    # The command of one rank is not the one that the user has typed.
    if code > 128 and slurm_rank.launched_ranks() == 1:
        say_next(command_line("kfac-train", arguments), "continues")
    return code


def _parse_and_run(arguments: list[str]) -> int:
    parser = Parser(prog="kfac-train", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job",))
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    from kfac_bench.config import compose, option_help, problem_file, recipes

    check_config_dir(options.config_dir)
    if options.help:
        about = option_help.describe(options.overrides, options.config_dir)
        say(about if options.overrides else TRAIN_USAGE + about)
        return 0
    if options.multirun and options.cfg:
        raise UsageError("--cfg prints one configuration: use it without --multirun")
    if options.multirun and options.layers:
        raise UsageError("--layers lists the layers of one dry run: use it without --multirun")
    ranks = slurm_rank.launched_ranks()
    if options.multirun:
        from kfac_bench.cli import sweep

        return sweep.run(options.overrides, options.config_dir, train_one)
    problem_file.run_named(options.overrides)
    config = compose.load(options.overrides, options.config_dir, ranks)
    recipe = recipes.choose(options.overrides, options.config_dir, ranks)
    if options.layers and not config.dry_run:
        raise UsageError("--layers lists the layers of a dry run: add dry_run=true")
    if options.cfg:
        if recipe is not None:
            say(f"# {recipe.line()}")
        say(compose.shown(config), end="")
        return 0
    data_words = ("data=", "experiment=", "from=", problem_file.WORD)
    names_data = any(o.startswith(data_words) for o in options.overrides)
    if not (names_data or config.dry_run):
        _say_what_data(config)
    if recipe is not None and slurm_rank.is_main_process():
        say(recipe.line())
    code = train_one(config, by_layer=options.layers)
    if code < 128 and not config.dry_run and slurm_rank.is_main_process():
        _say_end(config, options.overrides, options.config_dir, ranks)
    return code


def _say_what_data(config: TrainConfig) -> None:
    """Say that the command line names no data, and how to name them."""
    if config.data.name == "digits" and slurm_rank.is_main_process():
        say(
            "The command names no data, so this run trains on the built-in digits (1797 small "
            "pictures). To train on your pictures, add data=imagefolder data.root=FOLDER."
        )


def train_one(config: TrainConfig, *, by_layer: bool = False) -> int:
    """Train, or print what training would cost, and return the exit code.

    Args:
        config: The configuration.
        by_layer: List the layers in a dry run.
    """
    # The other ranks do the same at the same time.
    is_main = slurm_rank.is_main_process()
    is_main_thread = threading.current_thread() is threading.main_thread()
    with progress.showing() if is_main and is_main_thread else nullcontext():
        return _train_one(config, by_layer)


def _train_one(config: TrainConfig, by_layer: bool) -> int:
    if config.dry_run:
        from kfac_bench.simulate import plan_report
        from kfac_bench.training import dry_run

        if slurm_rank.is_main_process():
            report = dry_run.trace(config, slurm_rank.launched_ranks())
            say(plan_report.describe(report, by_layer=by_layer))
        return 0
    from kfac_bench.training import run_directory

    if run_directory.stop_if_complete(config):
        _send_again(config)
        return 0
    with progress.task("loading PyTorch"), interrupt_afterwards():
        from kfac_bench.training import run

    code = run.start(config)
    if code == 0 and slurm_rank.is_main_process():
        _send_again(config)
    return code


def _send_again(config: TrainConfig) -> None:
    """Send a complete run to the W&B run that a sweep's agent waits for, if it has not got it."""
    if not config.logger.wandb or config.logger.id is None:
        return
    from kfac_bench.dashboard import upload
    from kfac_bench.training.run_directory import RunDirectory

    if line := upload.replay(RunDirectory(config).path, config.logger):
        say(line)


ALONE = "kfac=none"
OF_ONE_RUN = ("kfac=", "run_id=", "label=", "resume=", "new_phase=")
"""Words that the command of the run beside leaves out."""


def _say_end(
    config: TrainConfig, words: Sequence[str], config_dir: Path | None = None, ranks: int = 1
) -> None:
    """Print the result of a run that has ended, its folder, and the run to compare it with.

    That is the run with the same words and ``kfac=none``, or without this word. If it is in the
    runs folder, its result is printed, too. On several ranks the run's command is not known,
    because a launcher has started it.

    Args:
        config: The configuration of the run.
        words: The words of the user's command line.
        config_dir: The folder of `--config-dir`.
        ranks: The number of ranks of the run.
    """
    from kfac_bench.training.run_directory import RunDirectory

    path = RunDirectory(config).path
    result = _result(path)
    if result is None:
        say_next(command_line("kfac-bench compare", [path]), "what the failed run recorded")
        return
    say(f"result: {result}; {path}")
    beside, others = _beside(config, words, config_dir, ranks)
    for other in others:
        if (text := _result(other)) is not None:
            say(f"beside: {text}; {other}")
            say_next(command_line("kfac-bench compare", [path, other]))
            return
    if not others or ranks > 1:
        say_next(command_line("kfac-bench compare", [path]))
        return
    if config_dir is not None:
        beside += ["--config-dir", str(config_dir)]
    say_next(
        command_line("kfac-train", beside),
        "the optimizer alone" if config.kfac.enabled else "the same with K-FAC",
    )


def _beside(
    config: TrainConfig, words: Sequence[str], config_dir: Path | None, ranks: int
) -> tuple[list[str], list[Path]]:
    """Return the words of the run beside, and its directory under the names that it may have.

    K-FAC's options have no meaning without K-FAC, but they are part of the run id. There is no
    directory if the words do not fit together: some optimizers are nothing without K-FAC.
    """
    from kfac_bench.config import compose
    from kfac_bench.training.run_directory import RunDirectory

    kept = [word for word in words if not word.startswith(OF_ONE_RUN)]
    short = [word for word in kept if not word.startswith("kfac.")]
    if config.kfac.enabled:
        choices = [[*short, ALONE], [*kept, ALONE]]
    elif ALONE in words:
        choices = [kept]
    else:
        return [], []
    try:
        found = [compose.load(choice, config_dir, ranks) for choice in choices]
    except UsageError:
        return [], []
    if any(each.kfac.enabled == config.kfac.enabled for each in found):
        return [], []
    if any(each.run_id is not None for each in found):  # a file of from= names the run itself
        return [], []
    return choices[0], [RunDirectory(each).path for each in found]


def _result(path: Path) -> str | None:
    """Return optimizer, metric, steps and seconds of a run that has ended; None for another."""
    # Not record.score: it imports NumPy, and a finished run is answered without.
    from kfac_bench.record import runs
    from kfac_bench.record.events import EVENTS_FILE, Evaluated, RunEnded

    if not (path / EVENTS_FILE).is_file():
        return None
    try:
        run = runs.load(path)
        (setting,) = runs.group([run])
    except UsageError:  # a damaged record
        return None
    last = run.events[-1]
    if not isinstance(last, RunEnded) or last.status not in ("finished", "reached"):
        return None
    name = run.started.metric
    values = [e.metrics[name] for e in run.events if isinstance(e, Evaluated) and name in e.metrics]
    metric = f"{runs.plain(name)} {runs.number(values[-1]):.4g} after " if values else ""
    seconds = runs.number(last.train_s)
    return f"{setting.optimizer}: {metric}{last.step} steps, {seconds:.1f} s of training"
