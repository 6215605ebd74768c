"""Decompositions before step ``update_freq``: when they happen, and what they change.

tests/core/test_schedule.py checks the schedule by itself.
"""

import copy

import pytest
import torch
from torch import nn

from kfac_bench.core import KFAC
from kfac_bench.core.planning.plan import ShareDecompositions
from tests.core.test_strategies import SMALL, train_on_ranks
from tests.support import oracle
from tests.support.layer_checks import assert_close
from tests.support.training import OPTIONS, batch, sgd, tiny_model, train_step

DAMPING, FREQ = 0.03, {"update_freq": 8, "factor_update_freq": 2}
PARTS = [0, 2, 4, 8]  # the steps in which everything is decomposed, by hand
STEPS = 10


def zero_head_model():
    """Its first layer has no gradient in step 0, as in timm's vision transformers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return model


def matrix_grad(layer):
    return torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)


def preconditioned(**options):
    """Yield step, plain gradients, preconditioned gradients and factors of the linear layers."""
    model = zero_head_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keywords = {
        "damping": DAMPING,
        "method": "eigen",
        "trust_ratio": None,
        "grafting": False,
        "spread": False,
    }
    kfac = KFAC(model, optimizer, **keywords | FREQ | options)
    layers = {"0": model[0], "2": model[2]}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 5, generator=generator).double()
        y = torch.randint(3, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        plain = {name: matrix_grad(layer) for name, layer in layers.items()}
        kfac.step()
        state = copy.deepcopy(kfac.state_dict()["layers"])
        factors = {n: [state[n][f]["factor"][0] for f in "AG"] for n in layers}
        yield step, plain, {name: matrix_grad(layer) for name, layer in layers.items()}, factors
        optimizer.step()


def test_gradients_are_those_of_the_factors_of_the_last_early_update():
    used = None
    for step, plain, got, factors in preconditioned():
        if step in PARTS:
            used = factors
        for name, gradient in plain.items():
            want = oracle.precondition(gradient, *used[name], DAMPING)
            assert_close(got[name], want, 1e-6)


def test_a_head_of_zeros_hides_the_other_layers_until_the_next_decomposition():
    def scaled(**options):
        """The steps in which the first layer's gradient is only multiplied by a number."""
        return [
            step
            for step, plain, got, _ in preconditioned(**options)
            if torch.allclose(got["0"] * DAMPING, plain["0"], rtol=1e-6, atol=0)
        ]

    assert scaled() == [0, 1]
    assert scaled(early_updates=False) == [*range(8)]


def kfac_of(model, **options):
    return KFAC(model, sgd(model), **OPTIONS | FREQ | {"early_updates": True} | options)


@pytest.mark.parametrize("options", [{"spread": False}, {"spread": True}], ids=str)
def test_a_run_continues_bit_by_bit_from_any_step(options):
    model = tiny_model()
    kfac, saved, want = kfac_of(model, **options), [], []
    assert (len(kfac.plan.slices) > 1) == options["spread"]
    for step in range(STEPS):
        saved.append(copy.deepcopy((kfac.state_dict(), model.state_dict())))
        want.append(train_step(model, kfac, kfac._optimizer, *batch(step)))
    for start, (state, weights) in enumerate(saved):
        model = tiny_model()
        model.load_state_dict(weights)
        kfac = kfac_of(model, **options)
        kfac.load_state_dict(state)
        for step in range(start, STEPS):
            got = train_step(model, kfac, kfac._optimizer, *batch(step))
            assert all(map(torch.equal, got, want[step])), f"step {step} after step {start}"


def test_kfac_tells_that_the_next_step_decomposes_all():
    model = tiny_model()
    kfac, told = kfac_of(model, spread=False), []
    for step in range(STEPS):
        told += [step] * kfac.will_decompose_all
        train_step(model, kfac, kfac._optimizer, *batch(step))
        assert ("Decompose" in kfac.stage_s) == (step in told)
    assert told == PARTS


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("spread", "used"),
    [
        (False, [[0, 1, 2, 4]]),
        (True, [[0, 1, 2, 4], [0, 1, 2], [0, 1, 3], [0, 1, 3]]),
    ],
)
def test_two_ranks_equal_one_process(spread, used):
    """And they send decompositions in the steps of the schedule, which are counted by hand."""
    options = {"early_updates": True, "update_freq": 4, "spread": spread}
    first, _ = train_on_ranks(2, tiny_model, batch, SMALL, "comm_opt", options)
    assert len(first.plan.slices) == len(used)
    for ops, steps in zip(first.plan.slices, used, strict=True):
        sent = [op.name for op in ops if isinstance(op, ShareDecompositions)]
        assert sent
        assert all(first.steps[name] == steps for name in sent)
