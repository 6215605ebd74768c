"""method=identity: K-FAC's machinery with A = G = I, the KL clip and nothing else."""

import copy

import pytest
import torch

from kfac_bench.core import KFAC
from kfac_bench.core.planning.estimate import memory_bytes
from tests.core.test_preconditioner import backward, batch, sgd, tiny_model

LR, KAPPA = 0.1, 1e-4


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt", "owner_reduce", "local_factors"])
def test_identity_gives_the_gradient_times_the_kl_clip(strategy):
    model = tiny_model()
    options = {"kl_clip": KAPPA, "trust_ratio": None, "strategy": strategy}
    kfac = KFAC(model, sgd(model, LR), method="identity", **options)
    for seed in range(3):
        backward(model, *batch(seed=seed))
        before = gradients(model)
        squares = sum(g.double().square().sum() for g in before)
        nu = min(1.0, (KAPPA / (LR**2 * squares)).sqrt().item())
        assert nu < 1, "not clipped: nothing is shown"
        kfac.step()
        assert kfac.statistics()["nu"] == pytest.approx(nu, rel=1e-5)
        for got, grad in zip(gradients(model), before, strict=True):
            torch.testing.assert_close(got, nu * grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kl_clip", [None, 1e9])
@pytest.mark.parametrize("bias", [True, False])
def test_identity_without_clip_keeps_the_gradient_bit_by_bit(kl_clip, bias):
    """Without a bias, the preconditioned gradient is the memory of the gradient."""
    model = tiny_model(bias=bias)
    kfac = KFAC(model, sgd(model), method="identity", trust_ratio=None, kl_clip=kl_clip)
    backward(model, *batch())
    before = gradients(model)
    kfac.step()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), before, strict=True))


def test_skipped_layers_are_not_clipped():
    model = tiny_model()
    kfac = KFAC(model, sgd(model, LR), method="identity", kl_clip=1e-9, skip=["^7$"])
    backward(model, *batch())
    before = copy.deepcopy(model[7].weight.grad)
    kfac.step()
    assert torch.equal(model[7].weight.grad, before)
    assert model[5].weight.grad.abs().max() < before.abs().max() / 100


def test_identity_computes_and_keeps_no_statistics():
    model = tiny_model()
    kfac = KFAC(model, sgd(model), method="identity", update_freq=1, factor_update_freq=1)
    for _ in range(2):
        backward(model, *batch())
        kfac.step()
    assert kfac.plan.factors == kfac.plan.slices == ()
    assert memory_bytes(kfac.plan, 0) == {"factors": 0, "decompositions": 0}
    state = kfac.state_dict()
    assert state["layers"] == {"0": {}, "2": {}, "5": {}, "7": {}}
    kfac.detach()
    other = KFAC(model, sgd(model), method="identity")
    other.load_state_dict(state)
    assert other.steps == 2
    assert "identity" in str(other.report())


def test_a_run_with_identity_equals_sgd_without_clip(tmp_path, capsys):
    pytest.importorskip("hydra")
    from kfac_bench.record.events import Trained
    from tests.support.runs import of_kind, train

    options = ("optimizer=sgd", "trainer.max_steps=6", "trainer.log_freq=1", "optimizer.lr=0.01")
    control = (*options, "kfac.method=identity", "kfac.fisher=mc", "kfac.trust_ratio=1e9")
    _, path = train(tmp_path, *control)
    said = capsys.readouterr().out
    _, plain = train(tmp_path, *options, "kfac=none")
    losses = [[e.loss for e in of_kind(p, Trained)] for p in (path, plain)]
    assert losses[0] == losses[1]
    assert [e.nu for e in of_kind(path, Trained)] == [1.0] * 6
    assert "identity factors: of K-FAC only the limits of the step, over 4 layers" in said
