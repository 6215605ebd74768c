"""The one-line form gives the same weights as the two-line form, in every way of stepping."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench import KFAC

STEPS = 4
OPTIONS = {"damping": 0.03, "update_freq": 2, "factor_update_freq": 1}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
ALL = pytest.mark.parametrize("kind", OPTIMIZERS)
CLIPS = pytest.mark.parametrize("clips", [False, True])


def new(kind="sgd"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    return model, OPTIMIZERS[kind](model.parameters())


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    return F.cross_entropy(model(x), y)


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def assert_same(model, want, **tolerance):
    for got, expected in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got, expected, **(tolerance or {"rtol": 0, "atol": 0}))


def two_lines(kind="sgd", *, clips=False):
    """Train with the call of ``preconditioner.step()``; return the model and its K-FAC."""
    model, optimizer = new(kind)
    kfac = KFAC(model, optimizer, **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if clips:
            clip(model)
        kfac.step()
        optimizer.step()
    return model, kfac


def factors_of(kfac):
    layers = kfac.state_dict()["layers"]
    return {(n, f): layers[n][f]["factor"].clone() for n in layers for f in "AG"}


@ALL
@CLIPS
def test_one_line_equals_two(kind, clips):
    model, optimizer = new(kind)
    kfac = KFAC(model, optimizer, **OPTIONS)
    assert kfac.attach() is kfac
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if clips:
            clip(model)
        optimizer.step()
    assert kfac.steps == STEPS
    assert_same(model, two_lines(kind, clips=clips)[0])


def test_nobody_needs_to_keep_the_preconditioner():
    model, optimizer = new()
    KFAC(model, optimizer, **OPTIONS).attach()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert_same(model, two_lines()[0])


@pytest.mark.parametrize("as_keyword", [True, False])
def test_with_a_closure_kfac_runs_after_it(as_keyword):
    model, optimizer = new()
    kfac = KFAC(model, optimizer, **OPTIONS).attach()
    losses = []
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure=closure) if as_keyword else optimizer.step(closure))
    assert kfac.steps == STEPS
    assert all(loss > 0 for loss in losses)
    assert_same(model, two_lines()[0])


def test_an_optimizer_that_calls_its_closure_twice_is_refused():
    class Twice(torch.optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                closure()
                closure()

    model, _ = new()
    optimizer = Twice(model.parameters(), lr=0.1)
    KFAC(model, optimizer, **OPTIONS).attach()

    def closure():
        loss_of(model, 0).backward()

    with pytest.raises(RuntimeError, match="Twice calls its closure more than once"):
        optimizer.step(closure)


@pytest.mark.parametrize("as_closure", [False, True])
def test_kfac_runs_once_in_a_step_that_calls_the_step_of_its_parent(as_closure):
    class Halved(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
            return super().step(closure)

    OPTIMIZERS["sgd"]([torch.zeros(1)])  # from now on torch runs hooks in the step of SGD, too
    model, _ = new()
    optimizer = Halved(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, **OPTIONS).attach()
    for step in range(STEPS):

        def backward(step=step):
            optimizer.zero_grad()
            loss_of(model, step).backward()

        if not as_closure:
            backward()
        optimizer.step(backward if as_closure else None)
    assert kfac.steps == STEPS


def test_kfac_runs_in_the_step_after_one_that_an_error_ended():
    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            if step == 1:
                raise ArithmeticError
            return super().step(closure)

    model, _ = new()
    optimizer = Interrupted(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, **OPTIONS).attach()
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with pytest.raises(ArithmeticError) if step == 1 else nullcontext():
            optimizer.step()
    assert kfac.steps == 3


@ALL
@CLIPS
@pytest.mark.parametrize("unscales", [False, True])
def test_with_a_scaler_nothing_else_changes(kind, clips, unscales):
    """The scale is a power of two, so weights are equal; factors are divided by its square."""
    if clips and not unscales:
        pytest.skip("clipping needs unscaled gradients")
    model, optimizer = new(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    kfac = KFAC(model, optimizer, **OPTIONS).attach(scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if clips:
            clip(model)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0 * 4  # the scale grew between the steps
    want_model, want = two_lines(kind, clips=clips)
    assert_same(model, want_model, rtol=1e-4, atol=1e-5)
    for key, factor in factors_of(want).items():
        torch.testing.assert_close(factors_of(kfac)[key], factor, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("skips", [["Norm"], ["Norm|^0", "Norm|^3"]], ids=["one", "two"])
@pytest.mark.parametrize("kind", ["fused sgd", "fused adam", "fused adamw"])
def test_a_fused_optimizer_tells_the_scale_to_each_kfac(kind, skips):
    results = []
    for is_scaled in (False, True):
        model, optimizer = new(kind)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
        kfacs = [KFAC(model, optimizer, skip=[skip], **OPTIONS).attach() for skip in skips]
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((model, {k: f for kfac in kfacs for k, f in factors_of(kfac).items()}))
    (want_model, want), (model, factors) = results
    assert_same(model, want_model, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(factors, want, rtol=1e-3, atol=1e-6)


@ALL
@pytest.mark.parametrize("unscales", [False, True])
def test_an_overflow_skips_the_update_and_training_goes_on(kind, unscales):
    model, optimizer = new(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kfac = KFAC(model, optimizer, **OPTIONS).attach(scaler)
    for step in range(STEPS):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * 1e38 if step == 1 else loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert_same(model, before)
        else:
            assert not torch.equal(model[0].weight, before[0].weight)
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(f.isfinite().all() for f in factors_of(kfac).values())


def test_step_by_hand_is_refused_while_attached():
    model, optimizer = new()
    kfac = KFAC(model, optimizer).attach()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) runs K-FAC itself"):
        kfac.step()
    with pytest.raises(RuntimeError, match="called before"):
        kfac.attach()


def test_detach_undoes_everything():
    model, optimizer = new()
    kfac = KFAC(model, optimizer, **OPTIONS).attach()
    loss_of(model, 0).backward()
    kfac.detach()
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    plain_model, plain = new()
    loss_of(plain_model, 0).backward()
    optimizer.step()
    plain.step()
    assert_same(model, plain_model)
    with pytest.raises(RuntimeError, match="build another KFAC"):
        kfac.attach()


def test_an_object_that_is_no_optimizer_is_refused():
    model, optimizer = new()

    class Engine:
        param_groups = optimizer.param_groups

    with pytest.raises(TypeError, match="not a Engine object"):
        KFAC(model, Engine()).attach()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_skipped_update_leaves_nothing_to_the_next_step(unscales, set_to_none):
    """Weights and factors are as if the batch that overflowed had never come."""
    results = []
    for batches in ([0, None, 1], [0, 1]):
        model, optimizer = new()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        kfac = KFAC(model, optimizer, **OPTIONS).attach(scaler)
        for step in batches:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model, 7) * 1e38 if step is None else loss_of(model, step)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update(1024.0)
        assert kfac.steps == 2
        results.append((model, factors_of(kfac)))
    assert_same(results[0][0], results[1][0], rtol=1e-6, atol=1e-7)
    for key, factor in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], factor, rtol=1e-6, atol=1e-7)
