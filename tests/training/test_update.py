"""The clip of gradients equals a loop in plain torch, in all precisions and on ranks."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from kfac_bench.config import TrainerConfig
from kfac_bench.errors import UsageError
from kfac_bench.training.update import check_last_batch
from tests.support.distributed import run_ranks
from tests.support.runs import SMALL, config_of, losses_of, train, train_here, trainer_of
from tests.training.test_trainer import STABLE, saved_of

STEPS = 3
CLIPS = {
    "before": ("trainer.clip_grad_norm=0.05",),
    "after": ("trainer.clip_grad_norm=0.5", "trainer.clip_grad_when=after"),
}
EACH_STEP = ("kfac.update_freq=1", "kfac.factor_update_freq=1", f"trainer.max_steps={STEPS}")


def plain_loop(folder, options, *, max_norm, when, half):
    """Train in plain torch: two parts per batch, the scale removed before the clip."""
    trainer = trainer_of(folder, *options)
    model, optimizer, kfac = trainer.model, trainer.optimizer, trainer.kfac
    scaler = GradScaler("cpu", enabled=half, init_scale=2.0**10)
    norms = []
    for step, batch in zip(range(STEPS), trainer._batches(), strict=False):
        optimizer.zero_grad()
        images, labels = batch
        for part in (slice(0, 128), slice(128, 256)):
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss, _ = trainer.task.forward(model, (images[part], labels[part]))
            if part.start == 0:
                with kfac.accumulate():
                    scaler.scale(loss / 2).backward()
            else:
                scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        if when == "before":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        kfac.step(scaler.get_scale() if half else 1.0)
        if when == "after":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        scaler.step(optimizer)
        scaler.update()
        trainer.step = step + 1
    assert min(norms) > max_norm, "the clip had no effect"
    return model.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("when", CLIPS)
def test_a_clip_equals_that_of_a_plain_loop(tmp_path, monkeypatch, when, precision):
    monkeypatch.setattr(
        "kfac_bench.training.update.GradScaler",
        lambda device, enabled: GradScaler(device, enabled=enabled, init_scale=2.0**10),
    )
    plain = (*STABLE, *EACH_STEP, "schedule=constant")
    options = (*plain, *CLIPS[when], f"trainer.precision={precision}", "trainer.accumulate=2")
    _, path = train(tmp_path, *options)
    max_norm = config_of(tmp_path, *options).trainer.clip_grad_norm
    wanted = plain_loop(tmp_path, plain, max_norm=max_norm, when=when, half=precision == "fp16")
    for name, weight in saved_of(path)[0].items():
        assert torch.equal(weight, wanted[name]), name


@pytest.mark.ranks
@pytest.mark.supports("ddp", "kfac-train")
def test_a_clip_on_two_ranks_equals_that_of_one_rank(tmp_path):
    options = (*STABLE, *EACH_STEP, *CLIPS["before"], "trainer.accumulate=2")
    _, alone = train(tmp_path, *options, "run_id=alone")
    done = run_ranks(2, train_here, tmp_path, (*options, "run_id=ranks"), SMALL)
    assert done[0][2] == done[1][2], "the ranks' weights differ"
    assert losses_of(tmp_path / "ranks") == pytest.approx(losses_of(alone), rel=1e-4)
    for name, weight in saved_of(alone)[0].items():
        torch.testing.assert_close(
            saved_of(tmp_path / "ranks")[0][name], weight, rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(
    ("train_size", "accumulate", "is_refused"),
    [(673, 1, False), (673 * 2 + 1, 1, True), (675, 2, True), (677, 2, False)],
)
def test_a_rank_without_an_example_would_stop_synchronized_batch_norm(
    train_size, accumulate, is_refused
):
    config = TrainerConfig(
        batch_size=673, drop_last=False, accumulate=accumulate, sync_batch_norm=True
    )
    with nullcontext() if not is_refused else pytest.raises(UsageError, match="drop_last=true"):
        check_last_batch(train_size, config, world_size=2)
    check_last_batch(train_size, replace(config, drop_last=True), world_size=2)
    check_last_batch(train_size, replace(config, sync_batch_norm=False), world_size=2)
