"""`kfac-train`: one run, or a sweep of several runs."""

from pathlib import Path

from kfac_bench.cli import sweep
from kfac_bench.cli.entry import Parser, check_config_dir
from kfac_bench.distributed import slurm_rank
from kfac_bench.errors import UsageError

TRAIN_USAGE = """\
usage: kfac-train [GROUP=NAME | OPTION=VALUE]... [--config-dir DIR] [--cfg job] [--multirun]

Train a model, with K-FAC or without. Every option has a default that needs no data on disk.

  kfac-train model=resnet50 kfac.update_freq=500
  kfac-train model=resnet20 data=cifar10 data.root=DIR kfac=layer_wise trainer.target=0.92
  kfac-train experiment=digits/autoencoder_kfac seed=1
  kfac-train experiment=kaisa_unet_lgg profile=smoke           (smoke|one_gpu|paper)
  torchrun --nproc-per-node 2 -m kfac_bench model=resnet20     (two ranks)

  --cfg job          print the configuration and stop
  dry_run=true       print memory, messages and FLOPs of the run and stop
  --config-dir DIR   read more configuration files, laid out as in conf/: DIR/experiment/NAME.yaml
  --multirun, -m     run each of seed=0,1,2 ... one after the other (Hydra)
  --version, --help
"""


def train(arguments: list[str]) -> int:
    """Parse the arguments, run, and return the exit code."""
    # Adopt Slurm's variables before anything fails: only rank 0 prints an error.
    slurm_rank.adopt()
    parser = Parser(prog="kfac-train", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job",))
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    if options.version:
        from kfac_bench import __version__

        print(__version__)
        return 0
    from kfac_bench.config import compose

    check_config_dir(options.config_dir)
    if options.help:
        print(TRAIN_USAGE + compose.describe_options(options.config_dir))
        return 0
    if options.multirun and options.cfg:
        raise UsageError("--cfg prints one configuration: use it without --multirun")
    if options.multirun:
        return sweep.run(options.overrides, options.config_dir, train_one)
    config = compose.load(options.overrides, options.config_dir)
    if options.cfg:
        print(compose.shown(config), end="")
        return 0
    return train_one(config)


def train_one(config: object) -> int:
    """Train, or print what training would cost, and return the exit code."""
    from kfac_bench.config import TrainConfig

    assert isinstance(config, TrainConfig)
    if config.dry_run:
        from kfac_bench.simulate import plan_report
        from kfac_bench.training import dry_run

        print(plan_report.describe(dry_run.trace(config), by_layer=True))
        return 0
    from kfac_bench.training import run

    return run.start(config)
