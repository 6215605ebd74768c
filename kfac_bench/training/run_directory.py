"""The directory ``runs/<run_id>/``, which holds everything that one run writes.

The same command finds the same directory, because its name is a hash of the configuration. A run
that was stopped continues there. This file decides the name, holds the lock, and checks that a
directory is continued with the options of its run. It also stops a command early if the run is
complete or a path is wrong, because it needs no torch, whose import takes seconds. Checkpoints are
in :mod:`kfac_bench.training.checkpoint`.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kfac_bench import plain_yaml
from kfac_bench.config import TrainConfig, compose, options, problem_file
from kfac_bench.config.option_table import declared
from kfac_bench.config.options import RECORD, RESULT
from kfac_bench.data.folder_options import FilesConfig
from kfac_bench.data.options import ProblemDataConfig
from kfac_bench.distributed import slurm_rank
from kfac_bench.errors import UsageError, first_line
from kfac_bench.output import say
from kfac_bench.record import checkpoint_folder, own_files
from kfac_bench.record.event_log import lost_events
from kfac_bench.record.events import EVENTS_FILE, Resumed, RunEnded, RunStarted, read
from kfac_bench.record.own_files import read_own, refuse_links, write_own
from kfac_bench.whole_files import whole_file

_PATIENCE_S = 10.0
"""Seconds to wait for the lock: the process of an earlier start may be about to end."""
_RESTART_PATIENCE_S = 20.0
"""Seconds to wait if torchrun or Slurm restarts the run. Ranks of the earlier start may still
live: they notice a lost agent or node only when their next message fails."""

_CONFIG = "config.yaml"


def run_id(config: TrainConfig, job: str | None = None) -> str:
    """Return the configured name, or a name with a hash of the configuration.

    The hash covers the RESULT and PLACE options (see :class:`Role`) that are not at their original
    values. So a later version with more options, or with other defaults, gives the same
    configuration the same name.

    Args:
        config: The configuration of the run.
        job: The Slurm job that the run belongs to; None: the job of this process, if any.
    """
    if config.run_id is not None:
        if not re.fullmatch(r"[\w.=+-]{1,100}", config.run_id) or set(config.run_id) <= {"."}:
            raise UsageError(
                f"run_id={config.run_id!r}: use up to 100 letters, digits and . _ - = +"
            )
        return config.run_id
    content = {
        name: value
        for name, value, meta in options(config)
        if meta["role"] is not RECORD and value != meta["original"]
    }
    content["job"] = os.environ.get("SLURM_JOB_ID", "") if job is None else job
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    kfac = config.kfac.strategy if config.kfac.enabled else "none"
    trained = [config.data.name, config.model.name]
    if isinstance(config.data, ProblemDataConfig) and config.data.file is not None:
        trained = ["problem", problem_file.title(config.data.file, config.data.arguments)]
    return "-".join([*trained, config.optimizer.name, f"kfac_{kfac}", digest])


class RunDirectory:
    """The directory of one run, which rank 0 makes and all ranks read."""

    def __init__(self, config: TrainConfig) -> None:
        self.run_id = run_id(config)
        self.path = Path(config.runs_dir) / self.run_id
        self.events = self.path / EVENTS_FILE

    @contextmanager
    def open(self, config: TrainConfig, environment: Mapping[str, Any]) -> Iterator[None]:
        """Make the directory if it is not there, and lock it inside the block; rank 0 calls this.

        A directory is removed again if its run cannot begin, because its data are missing, say.

        Raises:
            UsageError: Another process writes to the directory, it holds a run of another
                configuration, or it cannot be made.
        """
        # Path.exists() would raise an error below a folder that this user must not search.
        is_new = not os.path.exists(self.path)
        may_be_restart = os.environ.keys() & {"TORCHELASTIC_RUN_ID", "SLURM_RESTART_COUNT"}
        patience_s = _RESTART_PATIENCE_S if may_be_restart else _PATIENCE_S
        with own_files.locked(self.path, patience_s, say):
            refuse_links(self.path)
            self._check_same_run(config)
            record = {"run_id": self.run_id, **environment}
            self._write_once(_CONFIG, compose.to_yaml(config))
            self._write_once("run.json", json.dumps(record, indent=1) + "\n")
            try:
                yield
            except UsageError:
                if is_new:
                    self._remove_unless_begun()
                raise

    def _write_once(self, name: str, text: str) -> None:
        """Write a file about the first start of the run; later starts leave the file as it is.

        Raises:
            UsageError: The file cannot be written, and the run has no checkpoint. A run with
                checkpoints continues on a full disk, because its record has the same content.
        """
        path = self.path / name
        continues = self.has_checkpoints()
        with suppress(OSError):
            # A power cut can leave an empty file, or one of zeros.
            if continues and read_own(path).strip(b"\0"):
                return
        try:
            write_own(path, text.encode())
        except OSError as error:
            if not continues:
                raise UsageError(f"{self.path}: cannot write here ({error.strerror})") from None

    def _remove_unless_begun(self) -> None:
        """Remove the directory if it has no event and no file of anybody else."""
        # W&B makes its folder before the first event, because it shows all events.
        ours = {_CONFIG, "run.json", own_files.LOCK_FILE, EVENTS_FILE, "wandb"}
        with suppress(OSError):
            files = list(self.path.iterdir())
            if {path.name for path in files} <= ours and not any(
                path.stat().st_size for path in files if path.name == EVENTS_FILE
            ):
                shutil.rmtree(self.path)

    def note_state(self, status: str, step: int) -> None:
        """Write the state of the run to the file ``state`` and to $KFAC_STATE_FILE, if it is set.

        The file has one line, ``STATUS STEP PATH``; the status is ``running`` or the status of the
        last event. A batch script reads the line to decide whether to requeue the job, because an
        exit code may come from the launcher instead. The run itself does not need the file, so
        that a full disk is no error here. Only rank 0 calls this.
        """
        for file in (self.path / "state", os.environ.get("KFAC_STATE_FILE")):
            if not file:
                continue
            with suppress(OSError), whole_file(Path(file)) as temporary:
                # The name of a folder need not be UTF-8.
                temporary.write_bytes(os.fsencode(f"{status} {step} {self.path.absolute()}\n"))

    def check_is_here(self) -> None:
        """Raise :class:`UsageError` if this rank does not see the directory that rank 0 made."""
        if not self.path.is_dir():
            raise UsageError(
                f"{self.path} is missing on this rank, though rank 0 made it. Set runs_dir to a "
                "folder that all nodes share"
            )

    def has_checkpoints(self) -> bool:
        """Return whether the run has a checkpoint, good or damaged."""
        return bool(checkpoint_folder.steps(self.path / "checkpoints"))

    def changed_options(self, config: TrainConfig) -> dict[str, Any]:
        """Return the options that differ from those of the run's first start, by dotted names."""
        old = self._first_options()
        new = {name: value for name, value, _ in options(config)}
        return {k: v for k, v in new.items() if old.get(k, v) != v}

    def _first_options(self) -> dict[str, Any]:
        """Return the options of the run's first start, or nothing if no run has begun here.

        They are in config.yaml. If this file is lost or empty, the record has them too.
        """
        path = self.path / _CONFIG
        has_events = self.events.is_file() and self.events.stat().st_size > 0
        if not has_events and not self.has_checkpoints():
            return {}
        try:
            text = read_own(path).decode()
        except FileNotFoundError:
            text = ""
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read ({error})") from None
        if not text.strip("\0 \n"):
            events = read(self.events) if has_events else []
            started = next((e for e in events if isinstance(e, RunStarted)), None)
            return {} if started is None else _flat(started.config)
        try:
            plain_yaml.refuse_aliases(text)
            # Interpolations such as ${oc.env:NAME} are not resolved.
            found = OmegaConf.to_container(OmegaConf.create(text))
            return _flat(found) if isinstance(found, dict) else {}
        except Exception as error:
            raise UsageError(
                f"{path}: cannot be read ({first_line(error)}). Remove the file: {EVENTS_FILE} has "
                "the same options, and the next start writes the file again"
            ) from None

    def _check_same_run(self, config: TrainConfig) -> None:
        """Raise :class:`UsageError` if the directory holds a run with other RESULT options.

        An option that one of the two configurations lacks is at its original value there: the
        version that wrote it did not have the option, or its choice of a group does not have it.
        """
        old = self._first_options()
        new = {name: value for name, value, _ in options(config)}
        # The name of a group's choice comes first, because it explains the group's other options.
        if not old:
            return
        for name in sorted(old.keys() | new.keys(), key=lambda n: (not n.endswith(".name"), n)):
            option = declared(name, old if name in old else new)
            if option.role is not RESULT or option.resumable:
                continue
            before, now = old.get(name, option.original), new.get(name, option.original)
            if before == now:
                continue
            if name == "data.sha256" and isinstance(config.data, ProblemDataConfig):
                raise UsageError(
                    f"{config.data.file} has changed since {self.path} began: its hash was "
                    f"{before} and is {now}. Restore the file, or set another run_id; "
                    f"resume={self.path} starts from its checkpoint"
                )
            held = f"{self.path} holds a run with {name}={before}"
            why = ", not " + str(now) if name in new else ", which this version does not have"
            raise UsageError(
                f"{held}{why}. Set another run_id; resume={self.path} starts from its checkpoint"
            )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree of options by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + str(key)] = value
    return flat


def stop_if_complete(config: TrainConfig) -> bool:
    """Return whether the run is complete, and say so then. ``kfac-train`` asks before torch.

    This is a shortcut for what the run itself would find out, but a complete run is not compared
    with its data again. With several ranks the answer is False: ranks that are not connected yet
    could answer differently.

    Raises:
        UsageError: A path of the configuration does not exist.
    """
    if slurm_rank.launched_ranks() != 1:
        return False
    if _is_finished(config):
        return True
    _check_paths(config)
    return False


def say_complete(directory: RunDirectory, ended: RunEnded) -> None:
    """Say that the run of the directory is complete."""
    say(
        f"{directory.path} is complete ({ended.status} at step {ended.step}); for another run "
        "set seed=N or run_id=NAME, or delete the directory"
    )
    if lost := lost_events(directory.path):
        say(f"{directory.events}: {lost}. Take the file from a backup if you need these events")


def _is_finished(config: TrainConfig) -> bool:
    """Return whether the record ends with success, and all options are those of the record.

    If an option has changed, such as trainer.max_epochs, the trainer decides.
    """
    directory = RunDirectory(config)
    if not directory.events.is_file():
        return False
    refuse_links(directory.path)
    changed = directory.changed_options(config)
    if any(declared(name, {name: None}).role is not RECORD for name in changed):
        return False
    events = read(directory.events)
    if any(isinstance(event, Resumed) and event.options for event in events):
        return False
    ended = events[-1] if events else None
    if not isinstance(ended, RunEnded) or ended.status not in ("finished", "reached"):
        return False
    say_complete(directory, ended)
    directory.note_state(ended.status, ended.step)
    return True


def _check_paths(config: TrainConfig) -> None:
    data = config.data
    named = {"model.weights": config.model.weights}
    if not RunDirectory(config).has_checkpoints():  # else the run continues from its own
        named["resume"] = config.resume
    if isinstance(data, FilesConfig) and data.root != "demo":
        named["data.root"] = data.root
    for option, path in named.items():
        if path is not None and not Path(path).exists():
            raise UsageError(f"{option}={path}: no such file or folder")
