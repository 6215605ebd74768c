"""Schedules against torch's own, optimizers against their papers' formulas."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, PolynomialLR

from kfac_bench import build, compose
from kfac_bench.events import Trained
from kfac_bench.learning_rate import factor, warmup_steps
from tests.runs import before_step, of_kind, terminate, train

EPOCH, STEPS = 10, 60


def factors(*overrides, batch_size=256):
    schedule = compose.load(overrides).schedule
    return [factor(schedule, step, EPOCH, STEPS, batch_size) for step in range(STEPS)]


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


def test_a_decay_from_the_start_jumps_at_the_end_of_the_warm_up():
    """As in BERT's published recipe: (1 - share of the run) ** 0.5 after the rise."""
    overrides = ("schedule.decay_from=start", "schedule.power=0.5", "schedule.warmup_share=0.25")
    ours = factors("schedule=polynomial", *overrides)
    assert ours[:15] == pytest.approx([(i + 1) / 15 for i in range(15)])
    assert ours[15:] == pytest.approx([(1 - i / STEPS) ** 0.5 for i in range(15, STEPS)])


def test_a_warm_up_may_start_above_zero_and_rates_scale_with_the_batch():
    overrides = ("schedule.warmup_epochs=1", "schedule.warmup_start=0.5")
    ours = factors(*overrides, "schedule.base_batch_size=64")
    assert ours[:10] == pytest.approx([4 * (0.55 + 0.05 * i) for i in range(10)])
    assert ours[10:] == [4.0] * 50
    assert warmup_steps(compose.load(["schedule.warmup_share=0.2843"]).schedule, 1, 7038) == 2001


def test_training_follows_the_schedule_and_a_resumed_run_goes_on_with_it(tmp_path):
    options = ("schedule=cosine", "schedule.warmup_share=0.3", "optimizer.lr=0.05", "run_id=r")
    short = ("trainer.log_freq=1", "trainer.max_steps=10")
    with before_step(4, terminate):
        assert train(tmp_path, *options, *short)[0] == "interrupted"
    assert train(tmp_path, *options, *short)[0] == "finished"
    rates = [e.lr for e in of_kind(tmp_path / "r", Trained)]
    schedule = compose.load([*options[:2]]).schedule
    wanted = [0.05 * factor(schedule, step, 5, 10, 256) for step in range(10)]
    assert rates == pytest.approx(wanted)


def parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)).double()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def updated(*overrides, steps=3):
    """Weights, one gradient, after some updates."""
    model = parameters()
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer = build.build_optimizer(compose.load(overrides).optimizer, model)
    for _ in range(steps):
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def test_lars():
    """You et al. (2017), algorithm 1, the rate within the momentum; vectors by plain SGD."""
    settings = {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.01, "trust_coefficient": 0.02}
    found = updated("optimizer=lars", *(f"optimizer.{k}={v}" for k, v in settings.items()))
    model = parameters()
    for name, p in model.named_parameters():
        w, v = p.detach().clone(), torch.zeros_like(p)
        for _ in range(3):
            update = p.grad
            if p.ndim > 1:
                rate = 0.02 * w.norm() / (p.grad.norm() + 0.01 * w.norm())
                update = rate * (p.grad + 0.01 * w)
            v = 0.8 * v + update
            w = w - 0.5 * v
        torch.testing.assert_close(found[name], w)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_lamb(clip):
    """You et al. (2020), algorithm 2, without bias correction; norms and biases without decay."""
    found = updated("optimizer=lamb", "optimizer.lr=0.1", f"optimizer.max_grad_norm={clip}")
    model = parameters()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    shrink = min(1.0, clip / norm.item()) if clip else 1.0
    for name, p in model.named_parameters():
        w, g, m, v = p.detach().clone(), shrink * p.grad, 0.0, 0.0
        decay = 0.01 if name in ("0.weight", "2.weight") else 0.0
        for _ in range(3):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square()
            update = m / (v.sqrt() + 1e-6) + decay * w
            ratio = w.norm() / update.norm() if w.norm() > 0 else 1.0
            w = w - 0.1 * ratio * update
        torch.testing.assert_close(found[name], w, rtol=1e-4, atol=1e-5)


def test_weights_without_decay_by_name_and_by_class():
    config = compose.load(["optimizer=adamw", 'optimizer.no_decay=["bias$",Norm]']).optimizer
    model = parameters()
    model[2].weight = nn.Parameter(model[2].weight.detach())
    model[1].bias.requires_grad = False
    groups = build.build_optimizer(config, model).param_groups
    names = {p: n for n, p in model.named_parameters()}
    assert [[names[p] for p in g["params"]] for g in groups] == [
        ["0.weight", "2.weight"],
        ["0.bias", "1.weight"],
    ]
    assert [g["weight_decay"] for g in groups] == [0.01, 0.0]
