"""``runs/<run_id>/``: everything one run leaves behind, found again by the same command."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from kfac_bench.config import TrainConfig, compose
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE

_NOT_THE_RUN = ("run_id", "runs_dir", "dry_run", "logger", "label")
"""Options that say where a run is shown, not what it is: no part of the hash."""

_MAY_CHANGE = (
    *_NOT_THE_RUN,
    *("resume", "trainer.max_epochs", "trainer.max_steps", "trainer.target", "trainer.eval_freq"),
    "trainer.max_train_s",
    *("trainer.log_freq", "trainer.checkpoint_freq", "trainer.keep_last", "trainer.device"),
    *("trainer.predictions", "trainer.threads", "trainer.pin", "trainer.time_stages"),
    *("data.root", "data.workers"),
    *("trainer.keep_best", "trainer.watchdog_s", "trainer.check_ranks"),
    *("backend", "kfac.strategy", "kfac.grad_worker_fraction", "kfac.colocate_factors"),
    *("kfac.balance", "kfac.overlap"),
)
"""Options with which a run of a given ``run_id`` may be continued: where it runs, who does what,
how long and what is recorded; not what an update is."""

_PATIENCE_S = 20.0
"""How long to wait for the lock of a run that torchrun or Slurm restarts: ranks that lost their
agent, or their node, notice it when their next message fails."""


def run_id(config: TrainConfig, job: str | None = None) -> str:
    """The configured name, or one that the configuration and ``job`` (SLURM_JOB_ID) determine."""
    if config.run_id is not None:
        if not re.fullmatch(r"[\w.=+-]{1,100}", config.run_id) or set(config.run_id) <= {"."}:
            raise UsageError(
                f"run_id={config.run_id!r}: use up to 100 letters, digits and . _ - = +"
            )
        return config.run_id
    content = {k: v for k, v in asdict(config).items() if k not in _NOT_THE_RUN}
    content["job"] = os.environ.get("SLURM_JOB_ID", "") if job is None else job
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    kfac = config.kfac.strategy if config.kfac.enabled else "none"
    parts = (config.data.name, config.model.name, config.optimizer.name, f"kfac_{kfac}", digest)
    return "-".join(parts)


class RunDirectory:
    """Paths of one run; made by rank 0, read by all."""

    def __init__(self, config: TrainConfig) -> None:
        self.run_id = run_id(config)
        self.path = Path(config.runs_dir) / self.run_id
        self.events = self.path / EVENTS_FILE

    @contextmanager
    def open(self, config: TrainConfig, environment: Mapping[str, Any]) -> Iterator[None]:
        """Make or take up the directory and hold it; rank 0 alone.

        Raises :class:`UsageError` if another process writes to it, if it holds a run of another
        configuration, or if it cannot be made. One that is made for a run which then cannot begin
        (no such data) is taken away again.
        """
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise UsageError(f"{self.path}: cannot write here ({error.strerror})") from None
        with lock:
            again = os.environ.keys() & {"TORCHELASTIC_RUN_ID", "SLURM_RESTART_COUNT"}
            if not _locked(lock, _PATIENCE_S if again else 0.0):
                raise UsageError(
                    f"{self.path}: another process is running it; wait, or set run_id=NAME"
                )
            self._check_same_run(config)
            record = {"run_id": self.run_id, **environment}
            try:
                (self.path / "config.yaml").write_text(compose.to_yaml(config))
                (self.path / "run.json").write_text(json.dumps(record, indent=1) + "\n")
            except OSError as error:
                raise UsageError(f"{self.path}: cannot write here ({error.strerror})") from None
            try:
                yield
            except UsageError:
                if is_new:
                    self._take_away_unless_begun()
                raise

    def _take_away_unless_begun(self) -> None:
        ours = {"config.yaml", "run.json", ".lock", EVENTS_FILE}
        with suppress(OSError):
            there = list(self.path.iterdir())
            if {path.name for path in there} <= ours and not any(
                path.stat().st_size for path in there if path.name == EVENTS_FILE
            ):
                for path in there:
                    path.unlink()
                self.path.rmdir()

    def note_state(self, status: str, step: int) -> None:
        """Say in one line how the run is doing, for whoever started it; rank 0 alone.

        The file ``state``, and a copy where KFAC_STATE_FILE says: ``STATUS STEP PATH``, where
        STATUS is ``running`` or that of the last event. A batch script requeues by it, for exit
        codes are those of launchers too. Nothing of the run depends on it: a full disk is no error.
        """
        for file in (self.path / "state", os.environ.get("KFAC_STATE_FILE")):
            if not file:
                continue
            partial = Path(f"{file}.partial")
            with suppress(OSError):
                partial.write_text(f"{status} {step} {self.path.absolute()}\n")
                partial.replace(file)

    def check_is_here(self) -> None:
        """Raise :class:`UsageError` if this rank does not see what rank 0 has made."""
        if not self.path.is_dir():
            raise UsageError(
                f"{self.path} is not there, though rank 0 made it: runs_dir must be a folder that "
                "all nodes share"
            )

    def _check_same_run(self, config: TrainConfig) -> None:
        path = self.path / "config.yaml"
        if not path.exists() or not self.events.exists():
            return
        try:
            old = flat(OmegaConf.to_container(OmegaConf.load(path)))
        except Exception as error:
            raise UsageError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
        new = flat(asdict(config))
        for key in sorted(old.keys() | new.keys()):
            if key.startswith(_MAY_CHANGE) or old.get(key) == new.get(key):
                continue
            raise UsageError(
                f"{self.path} holds a run with {key}={old.get(key)}, not {new.get(key)}: set "
                f"another run_id (resume={self.path} starts from its checkpoint)"
            )


def _locked(file: IO[str], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree of options by their dotted names."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + str(key)] = value
    return out
