"""``kfac-train --multirun``: Hydra's own sweep; its launchers and sweepers work."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from kfac_bench.cli.entry import say, say_once
from kfac_bench.errors import UsageError


def run(overrides: list[str], config_dir: Path | None, train: Callable[[Any], int]) -> int:
    """Run each job of the sweep; the largest exit code."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    from kfac_bench.config import compose

    elsewhere = _is_elsewhere(overrides)
    overrides = compose.with_profile(overrides, config_dir)
    stopped: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(compose.CONF_DIR), config_name="train")
    def job(composed: DictConfig) -> None:
        if stopped:  # by a signal: so is the sweep
            return
        try:
            code = train(compose.from_composed(composed))
        except UsageError as error:
            say_once(f"kfac-train: {error}")
            code = 2
        if code == 128 + signal.SIGUSR1 and elsewhere:
            signal.raise_signal(signal.SIGUSR1)  # submitit's handler requeues the job, as it is
        if code >= 128:
            stopped.append(code)
        number = HydraConfig.get().job.num
        (folder / f"exit-{number}").write_text(str(code))

    extra = [] if config_dir is None else ["--config-dir", str(config_dir)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come out as exceptions
    with _folder(elsewhere) as folder:
        sys.argv = ["kfac-train", "--multirun", *extra, *overrides, f"hydra.sweep.dir={folder}"]
        try:
            job()
        except compose.HYDRA_ERRORS as error:
            raise compose.usage_error(error, overrides, config_dir) from None
        except Exception as error:
            if not elsewhere:
                raise
            say(f"kfac-train: a job died: {(str(error).strip().splitlines() or [''])[-1]}")
            return 1
        return max((int(f.read_text()) for f in folder.glob("exit-*")), default=0)


def _is_elsewhere(overrides: Sequence[str]) -> bool:
    """Whether jobs run in other processes, perhaps on other nodes."""
    launcher = [o for o in overrides if o.startswith("hydra/launcher=")][-1:]
    if not launcher or launcher == ["hydra/launcher=basic"]:
        return False
    if "submitit" in launcher[0]:
        if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
            raise UsageError(f"{launcher[0]}: pip install 'kfac-bench[slurm]'")
        # Slurm's notice as the one that a run saves at; submitit's own choice is another signal.
        os.environ.setdefault("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    return True


@contextmanager
def _folder(elsewhere: bool) -> Iterator[Path]:
    """For Hydra's own files; jobs elsewhere need one that all nodes see, and leave logs there."""
    if not elsewhere:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
        return
    folder = Path("sweeps", datetime.now().strftime("%Y-%m-%d_%H-%M-%S")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    say(f"what the jobs print: {folder}/.submitit")
    yield folder
