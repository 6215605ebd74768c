"""Answers that need no torch, whose import takes seconds: a finished run, and a wrong path.

``kfac-train`` asks before it imports torch. Both answers are shortcuts for what the run itself
would find out, but a finished run is not compared with its data again. With several ranks nothing
is answered here, because ranks that are not connected yet could answer differently.
"""

from pathlib import Path

from kfac_bench.config import TrainConfig
from kfac_bench.config.option_table import declared
from kfac_bench.config.options import RECORD
from kfac_bench.data.image_options import FilesConfig
from kfac_bench.distributed.slurm_rank import from_launcher
from kfac_bench.errors import UsageError
from kfac_bench.output import say
from kfac_bench.record.events import Resumed, RunEnded, read
from kfac_bench.record.lost_events import lost_events
from kfac_bench.record.own_files import refuse_links
from kfac_bench.training.run_directory import RunDirectory


def answer(config: TrainConfig) -> bool:
    """Return whether the run is finished, and say so then.

    Raises:
        UsageError: A path of the configuration does not exist.
    """
    if from_launcher("WORLD_SIZE", "1") != "1":
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
