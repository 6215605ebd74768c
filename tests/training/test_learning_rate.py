"""Schedules against torch's own."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, PolynomialLR

from kfac_bench.record.events import Trained
from tests.support.configs import quick_load
from tests.support.runs import before_step, of_kind, terminate, train

EPOCH, STEPS = 10, 60


def factors(*overrides, batch_size=256):
    schedule = quick_load(overrides).schedule
    return [schedule.factor(step, EPOCH, STEPS, batch_size) for step in range(STEPS)]


def torchs(make, steps):
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler: LRScheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 15])
@pytest.mark.parametrize(
    ("overrides", "make"),
    [
        (["schedule=constant"], lambda o: MultiStepLR(o, [])),
        (["schedule=cosine"], lambda o: CosineAnnealingLR(o, STEPS)),
        (["schedule=cosine", "schedule.end=0.1"], lambda o: CosineAnnealingLR(o, STEPS, 0.1)),
        (["schedule=polynomial"], lambda o: PolynomialLR(o, STEPS)),
        (["schedule=polynomial", "schedule.power=0.5"], lambda o: PolynomialLR(o, STEPS, 0.5)),
    ],
)
def test_after_a_warm_up_schedules_are_torchs(overrides, make, warmup, monkeypatch):
    monkeypatch.setitem(globals(), "STEPS", 60 - warmup)
    theirs = torchs(make, STEPS)
    monkeypatch.setitem(globals(), "STEPS", 60)
    ours = factors(*overrides, f"schedule.warmup_epochs={warmup / EPOCH}")
    rise = [(i + 1) / warmup for i in range(warmup)]
    assert ours == pytest.approx([*rise, *theirs], abs=1e-6)


def test_milestones_count_epochs_from_the_start():
    theirs = torchs(lambda o: MultiStepLR(o, [20, 35], 0.2), STEPS)
    ours = factors("schedule=step", "schedule.milestones=[2,3.5]", "schedule.gamma=0.2")
    assert ours == pytest.approx(theirs)
    warm = ("schedule.warmup_share=0.25", "schedule.warmup_start=0.1")
    ours = factors("schedule=step", "schedule.milestones=[2,3.5]", "schedule.gamma=0.2", *warm)
    assert ours[:15] == pytest.approx([0.1 + 0.06 * (i + 1) for i in range(15)])
    assert ours[15:] == pytest.approx(theirs[15:])


def test_a_decay_from_the_start_jumps_at_the_end_of_the_warm_up():
    """As in BERT's published recipe: (1 - share of the run) ** 0.5 after the rise."""
    overrides = ("schedule.decay_from=start", "schedule.power=0.5", "schedule.warmup_share=0.25")
    ours = factors("schedule=polynomial", *overrides)
    assert ours[:15] == pytest.approx([(i + 1) / 15 for i in range(15)])
    assert ours[15:] == pytest.approx([(1 - i / STEPS) ** 0.5 for i in range(15, STEPS)])


def test_a_decay_may_be_over_before_the_run_is():
    """Then the rate stays where it is; the fall has the shape of a run of that length."""
    overrides = ("schedule=cosine", "schedule.end=0.1", "schedule.warmup_epochs=0.5")
    ours = factors(*overrides, "schedule.decay_until=0.5")
    rates = torchs(lambda o: CosineAnnealingLR(o, STEPS // 2 - 5, 0.1), STEPS // 2 - 4)
    assert ours[5 : STEPS // 2 + 1] == pytest.approx(rates, abs=1e-6)
    assert ours[STEPS // 2 :] == pytest.approx([0.1] * (STEPS // 2))


def test_a_warm_up_may_start_above_zero_and_rates_scale_with_the_batch():
    overrides = ("schedule.warmup_epochs=1", "schedule.warmup_start=0.5")
    ours = factors(*overrides, "schedule.base_batch_size=64")
    assert ours[:10] == pytest.approx([4 * (0.55 + 0.05 * i) for i in range(10)])
    assert ours[10:] == [4.0] * 50
    assert quick_load(["schedule.warmup_share=0.2843"]).schedule.warmup_steps(1, 7038) == 2001


def test_training_follows_the_schedule_and_a_resumed_run_goes_on_with_it(tmp_path):
    options = ("schedule=cosine", "schedule.warmup_share=0.3", "optimizer.lr=0.05", "run_id=r")
    short = ("trainer.log_freq=1", "trainer.max_steps=10")
    with before_step(4, terminate):
        assert train(tmp_path, *options, *short)[0] == "interrupted"
    assert train(tmp_path, *options, *short)[0] == "finished"
    rates = [e.lr for e in of_kind(tmp_path / "r", Trained)]
    schedule = quick_load([*options[:2]]).schedule
    wanted = [0.05 * schedule.factor(step, 5, 10, 256) for step in range(10)]
    assert rates == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["schedule=cosine", "schedule.warmup_epochs=50"], "never reaches optimizer.lr"),
        (
            ["schedule=cosine", "schedule.warmup_epochs=2", "schedule.decay_until=0.5"],
            "falls to schedule.end at once",
        ),
        (["schedule=step"], "so the rate never falls"),
        (["schedule=step", "schedule.milestones=[1]"], None),
        (["schedule=cosine", "schedule.warmup_epochs=1"], None),
    ],
)
def test_a_note_says_which_part_of_a_schedule_a_run_never_reaches(overrides, fragment):
    notes = quick_load(overrides).schedule.notes(EPOCH, 3 * EPOCH)
    assert len(notes) == (fragment is not None)
    assert all(fragment in note for note in notes)
