"""``kfac-train``: one run, or a sweep of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kfac_bench import srun
from kfac_bench.cli.entry import Parser, check_config_dir, say_once
from kfac_bench.errors import UsageError

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


def train(arguments: list[str]) -> int:
    """Parse and run; the exit code."""
    srun.adopt()  # now: rank 0 alone tells of errors
    parser = Parser(prog="kfac-train", add_help=False, allow_abbrev=False)
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

    check_config_dir(options.config_dir)
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
            say_once(f"kfac-train: {error}")
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
