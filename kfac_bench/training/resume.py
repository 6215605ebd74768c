"""The start of a run: its first event, or the newest good checkpoint.

:mod:`.run` calls :func:`start_or_resume` when the trainer is built and the log is open. A run
continues from its own checkpoint, on the data that it began with. With ``resume=PATH`` a new run
starts from the checkpoint of another run. With ``new_phase`` as well, it begins at step 0. Each
checkpoint holds the length and the hash of the record, so a cut, changed or deleted event file is
noticed here: the run continues, says so in one line, and marks the gap with an event.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kfac_bench.config import KFACConfig, TrainConfig
from kfac_bench.data.base.dataset import difference, fingerprint
from kfac_bench.errors import UsageError
from kfac_bench.record.event_log import EventLog, JsonlSink, position_from
from kfac_bench.record.events import (
    Checkpointed,
    DataChanged,
    Event,
    RecordGap,
    Resumed,
    RunStarted,
    read,
)
from kfac_bench.record.progress import progress
from kfac_bench.record.runs import differences, flatten
from kfac_bench.training import checkpoint
from kfac_bench.training.checkpoint import Checkpoint
from kfac_bench.training.run_directory import RunDirectory
from kfac_bench.training.trainer import Trainer


def start_or_resume(
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
    begins_phase = config.new_phase and own is None
    # A new phase has other data on purpose.
    compared = None if begins_phase else saved
    changed_data = ranks.together(
        lambda: (
            _check_data(config, trainer, compared, is_own=own is not None)
            if ranks.is_main
            else None
        )
    )
    # Rank 0 alone has a record.
    record = trainer.log.record
    check: RecordCheck | None = None
    changed_options: dict[str, Any] = {}
    if own is not None:
        check = ranks.together(
            lambda: None if record is None else RecordCheck(directory.events, record, own)
        )
        changed_options = ranks.together(lambda: directory.changed_options(config) if check else {})
    # Before the first event: a run that cannot begin leaves no directory.
    if saved is not None:
        _restore(trainer, saved, is_own=own is not None, begins_phase=begins_phase)
        if own is None and not begins_phase:
            _check_epochs_of_kfac(config.kfac, trainer, saved)
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


def _restore(trainer: Trainer, saved: Checkpoint, *, is_own: bool, begins_phase: bool) -> None:
    last_step = trainer.length.max_steps
    if saved.step >= last_step and not is_own and not begins_phase:
        raise UsageError(
            f"resume: {saved.path} has {saved.step} steps, and this run ends after step "
            f"{last_step}. Set a larger trainer.max_steps or trainer.max_epochs. To begin at step "
            "0 with these weights, set model.weights in place of resume; to begin there with the "
            "whole state, add new_phase=true"
        )
    try:
        trainer.restore(saved, begins_phase=begins_phase)
    except ValueError as error:
        raise UsageError(f"resume: {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(
            f"resume: {saved.path} does not hold the state of a run ({error!r})"
        ) from None


def _check_epochs_of_kfac(config: KFACConfig, trainer: Trainer, saved: Checkpoint) -> None:
    """Raise :class:`UsageError` if K-FAC's changes at epochs would come too late.

    K-FAC counts its own steps. A checkpoint of a run without K-FAC has none.
    """
    changes = config.damping_decay_epochs or config.interval_growth_epochs
    # With max_overhead the first steps do not count, in any run.
    if trainer.kfac is None or not changes or config.max_overhead is not None:
        return
    if (steps := trainer.kfac.steps) != saved.step:
        raise UsageError(
            f"resume: {saved.path} has {saved.step} steps of training and {steps} of K-FAC, so "
            "kfac.damping_decay_epochs and kfac.interval_growth_epochs would count other epochs "
            "than the run. Set both to []"
        )


def _check_data(
    config: TrainConfig, trainer: Trainer, saved: Checkpoint | None, *, is_own: bool
) -> str | None:
    """Give the trainer the fingerprint of its data, and compare it with the checkpoint's.

    Only rank 0 calls this.

    Args:
        config: The configuration of the run.
        trainer: The trainer, with its data.
        saved: The checkpoint from which the run continues; None at the start of a run or a phase.
        is_own: Whether the run itself wrote the checkpoint. Otherwise the user has chosen the
            checkpoint of another run (``resume``), whose data may differ.

    Returns:
        How the data differ, in words, or None.

    Raises:
        UsageError: The data of a run differ, and ``data.changed`` does not accept that.
    """
    with progress.task("comparing the data with those of the checkpoint"):
        trainer.fingerprint = fingerprint(trainer.data)
    if saved is None:
        return None
    before = saved.shards[0].get("data")
    if not isinstance(before, dict):
        trainer.say(f"{saved.path} does not say which data it saw: the data are not compared")
        return None
    changed = difference(before, trainer.fingerprint)
    if changed is None:
        return None
    if is_own and config.data.changed == "refuse":
        raise UsageError(
            f"the data changed since {saved.path}: {changed}. Restore the data, or continue on "
            "the new data with data.changed=accept"
        )
    trainer.say(f"the data changed since {saved.path}: {changed}")
    return changed


_PROVENANCE = ("git_commit", "versions", "hardware", "world_size", "device")
_SHOWN = 6
"""Number of differences in a line."""


class RecordCheck:
    """The comparison of the record with the checkpoint `saved`, on rank 0 only."""

    def __init__(self, path: Path, record: JsonlSink, saved: Checkpoint) -> None:
        self._path, self._saved = path, saved
        self._events = read(path)
        position = position_from(saved.shards[0].get("record"))
        self._is_unknown = position is None
        self._reason = None if position is None else record.gap(position)
        if self.lacks_start:
            self._reason = self._reason or "its first event is missing"

    @property
    def lacks_start(self) -> bool:
        """True if the record has no first event, without which no command can read it."""
        return not any(isinstance(event, RunStarted) for event in self._events)

    def complete(
        self, log: EventLog, train_s: float, about: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """Emit what the record lacks, and say what the user should know."""
        step = self._saved.step
        if self._reason is not None:
            say(
                f"{self._path}: events before step {step} are missing ({self._reason}). The run "
                "continues, and an event marks the gap"
            )
            log.emit(RecordGap(step, train_s, self._reason))
        elif self._is_unknown:
            say(
                f"{self._saved.path} does not say how long its record was: the record is not "
                "checked for missing events"
            )
        # A process that is killed right after a checkpoint is complete cannot write its event.
        if not any(isinstance(e, Checkpointed) and e.step == step for e in self._events):
            log.emit(Checkpointed(step, train_s, str(self._saved.path), 0.0))
        if line := _changes(self._events, about):
            say(line)


def _changes(events: Sequence[Event], about: Mapping[str, Any]) -> str | None:
    """Return a line about versions and hardware that differ from those of the start before."""
    earlier = [e.environment for e in events if isinstance(e, RunStarted | Resumed)]
    known = next((e for e in reversed(earlier) if e), None)
    if known is None:
        return None
    before, now = (
        flatten({key: environment[key] for key in _PROVENANCE if key in environment})
        for environment in (known, about)
    )
    keys = differences([before, now])
    parts = [f"{k} {before.get(k, 'unknown')} -> {now.get(k, 'unknown')}" for k in keys[:_SHOWN]]
    more = f"; and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"this start differs from the one before: {'; '.join(parts)}{more}" if keys else None
