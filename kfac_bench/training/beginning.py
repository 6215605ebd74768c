"""The beginning of a run: its first event, or the newest good checkpoint.

:mod:`.run` calls :func:`begin` when the trainer is built and the log is open. A run continues from
its own checkpoint. With ``resume=PATH`` a new run starts from the checkpoint of another run.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kfac_bench.config import TrainConfig
from kfac_bench.errors import UsageError
from kfac_bench.record.events import DataChanged, Resumed, RunStarted
from kfac_bench.training import checkpoint, same_data
from kfac_bench.training.checkpoint import Checkpoint
from kfac_bench.training.record_check import RecordCheck
from kfac_bench.training.run_directory import RunDirectory
from kfac_bench.training.trainer import Trainer


def begin(
    config: TrainConfig, trainer: Trainer, directory: RunDirectory, about: Mapping[str, Any]
) -> None:
    """Write the first event, or restore the newest good checkpoint. All ranks call this.

    Args:
        config: The configuration of the run.
        trainer: The trainer, with its open log.
        directory: The directory of the run.
        about: Versions and hardware of this start.

    Raises:
        UsageError: Ranks see other checkpoints, the data have changed, or the checkpoint does not
            fit the run.
    """
    ranks = trainer.ranks
    saved = _find_together(config, trainer, directory)
    # With resume=PATH the first checkpoint is another run's, and this run only starts.
    own = saved if saved is not None and saved.path.is_relative_to(directory.path) else None
    changed_data = ranks.together(
        lambda: (
            same_data.check(config, trainer, saved, is_own=own is not None)
            if ranks.is_main
            else None
        )
    )
    check: RecordCheck | None = None
    changed_options: dict[str, Any] = {}
    if own is not None:
        check = ranks.together(lambda: _check_record(trainer, directory, own))
        changed_options = ranks.together(lambda: directory.changed_options(config) if check else {})
    # Before the first event: a run that cannot begin leaves no directory.
    if saved is not None:
        _restore(trainer, saved, is_own=own is not None)
    if own is None or (check is not None and check.lacks_start):
        trainer.log.emit(_first_event(config, trainer, directory, about))
    if saved is not None:
        now_s = trainer.clock.train_s()
        trainer.log.emit(Resumed(trainer.step, now_s, str(saved.path), about, changed_options))
    trainer.report_faults()
    if changed_data is not None:
        now_s = trainer.clock.train_s()
        trainer.log.emit(DataChanged(trainer.step, now_s, changed_data, trainer.fingerprint))
    if check is not None:
        check.complete(trainer.log, trainer.clock.train_s(), about, trainer.say)


def _find_together(
    config: TrainConfig, trainer: Trainer, directory: RunDirectory
) -> Checkpoint | None:
    """Return the checkpoint from which all ranks continue, and name the damaged ones."""
    ranks = trainer.ranks
    saved, bad = ranks.together(lambda: _find(config, directory))
    if others := ranks.unlike_main(f"{saved and (saved.step, len(saved.shards))}"):
        raise UsageError(
            f"ranks {others} do not see the checkpoint that rank 0 sees. Set runs_dir to a folder "
            "that all nodes share"
        )
    for line in bad:
        trainer.say(f"{line}; an older one is used, if there is one")
    return saved


def _find(config: TrainConfig, directory: RunDirectory) -> tuple[Checkpoint | None, list[str]]:
    """Return the run's own newest good checkpoint, else that of ``resume``.

    The second value has a line for each damaged checkpoint that was passed over.
    """
    saved, bad = checkpoint.find(directory.path)
    if saved is None and config.resume is not None:
        saved, more_bad = checkpoint.find(Path(config.resume))
        bad += more_bad
        if saved is None:
            reason = f" ({more_bad[0]})" if more_bad else ""
            raise UsageError(f"resume={config.resume}: there is no good checkpoint{reason}")
    return saved, bad


def _check_record(
    trainer: Trainer, directory: RunDirectory, saved: Checkpoint
) -> RecordCheck | None:
    """Return what the record lacks; None on ranks that have no record."""
    record = trainer.log.record
    return None if record is None else RecordCheck(directory.events, record, saved)


def _first_event(
    config: TrainConfig, trainer: Trainer, directory: RunDirectory, about: Mapping[str, Any]
) -> RunStarted:
    kfac = trainer.kfac
    return RunStarted(
        step=0,
        train_s=0.0,
        run_id=directory.run_id,
        metric=trainer.task.metric,
        higher_is_better=trainer.task.higher_is_better,
        config=asdict(config),
        environment=about,
        payload_bytes={}
        if kfac is None or config.kfac.max_overhead is not None
        else kfac.report().payload_bytes(),
        data=trainer.fingerprint,
    )


def _restore(trainer: Trainer, saved: Checkpoint, *, is_own: bool) -> None:
    last_step = trainer.course.max_steps
    if saved.step >= last_step and not is_own:
        raise UsageError(
            f"resume: {saved.path} has {saved.step} steps, and this run ends after step "
            f"{last_step}. Set a larger trainer.max_steps or trainer.max_epochs. To begin at step "
            "0 with these weights, set model.weights in place of resume"
        )
    try:
        trainer.restore(saved)
    except ValueError as error:
        raise UsageError(f"resume: {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(
            f"resume: {saved.path} does not hold the state of a run ({error!r})"
        ) from None
