"""The check that a run continues on the data that it began with."""

from kfac_bench.config import TrainConfig
from kfac_bench.data.base.dataset import difference, fingerprint
from kfac_bench.errors import UsageError
from kfac_bench.record.progress import progress
from kfac_bench.training.checkpoint import Checkpoint
from kfac_bench.training.trainer import Trainer


def check(
    config: TrainConfig, trainer: Trainer, saved: Checkpoint | None, *, is_own: bool
) -> str | None:
    """Give the trainer the fingerprint of its data, and compare it with the checkpoint's.

    Only rank 0 calls this.

    Args:
        config: The configuration of the run.
        trainer: The trainer, with its data.
        saved: The checkpoint from which the run continues; None at the start of a run.
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
