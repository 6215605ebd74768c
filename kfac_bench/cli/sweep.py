"""`kfac-train --multirun`: a sweep, whose runs Hydra starts here one after the other."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfac_bench.cli.entry import say_once
from kfac_bench.errors import UsageError


def run(overrides: list[str], config_dir: Path | None, train: Callable[[Any], int]) -> int:
    """Run each job of the sweep and return the largest exit code.

    Args:
        overrides: What the user wrote on the command line. A list of values makes several jobs.
        config_dir: The folder of `--config-dir`.
        train: Trains with one configuration and returns the exit code.
    """
    import hydra
    from omegaconf import DictConfig

    from kfac_bench.config import compose

    overrides = compose.expanded(overrides, config_dir)
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(compose.CONF_DIR), config_name="train")
    def job(composed: DictConfig) -> None:
        # A signal that stops one job stops the whole sweep.
        if codes and codes[-1] >= 128:
            return
        try:
            codes.append(train(compose.from_composed(composed)))
        except UsageError as error:
            say_once(f"kfac-train: {error}")
            codes.append(2)

    extra = [] if config_dir is None else ["--config-dir", str(config_dir)]
    # Without this variable Hydra prints an error of its own and ends the process.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Hydra insists on a folder for its own files. The runs have run directories of their own.
    with tempfile.TemporaryDirectory() as scratch:
        sys.argv = ["kfac-train", "--multirun", *extra, *overrides, f"hydra.sweep.dir={scratch}"]
        try:
            job()
        except compose.HYDRA_ERRORS as error:
            raise compose.usage_error(error, overrides, config_dir) from None
    return max(codes, default=0)
