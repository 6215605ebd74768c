"""``KFAC(max_overhead=...)`` in training: the first steps, the choice, states and ranks.

Times come from a clock of the test, and rates are made up, so that choices are certain.
"""

import copy
import gc
import itertools
from dataclasses import asdict
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from kfac_bench.core import KFAC, eigen_adam, preconditioner, stepper
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS
from kfac_bench.core.distributed.collective import SingleProcess, TorchCollective
from kfac_bench.core.eigen_adam_optimizer import KEY, EigenAdam
from kfac_bench.core.planning.budget import SIZES, BudgetError, Choice, Rates
from kfac_bench.core.stepper import WITH_STATISTICS, WITHOUT, measure
from tests.support.distributed import run_ranks

WATCHED = WITH_STATISTICS + WITHOUT
RATES = Rates(0.0, 1e12, (1e9,) * len(SIZES), (0.0,) * len(SIZES))
"""Only products take time: those of the inverses below take 2 x 48 x 32 x 80 = 0.25 ms."""
WIDE = 0.00024576


@pytest.fixture
def clock(monkeypatch):
    """Let each step take 1 ms, and products take the time of RATES."""
    ticks = itertools.count()
    ticking = SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks))
    monkeypatch.setattr(stepper, "time", ticking)
    monkeypatch.setattr(preconditioner, "measure", lambda *_: RATES)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(47, 32), nn.Tanh(), nn.Linear(32, 4))


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 47, generator=g), torch.randint(4, (16,), generator=g)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def budgeted(max_overhead, model=None, **options):
    model = net() if model is None else model
    optimizer = sgd(model)
    options = {"update_freq": 4, "factor_update_freq": 2} | options
    return model, optimizer, KFAC(model, optimizer, max_overhead=max_overhead, **options).attach()


def test_the_choice_is_made_beside_other_hooks_of_the_optimizer(clock):
    model, optimizer, kfac = budgeted(1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    train(model, optimizer, WATCHED + 1)
    assert (kfac.steps, len(seen)) == (1, WATCHED + 1)


def test_the_optimizer_makes_the_first_steps_alone(clock):
    alone = net()
    want = train(alone, sgd(alone), WATCHED)
    model, optimizer, kfac = budgeted(1.0)
    assert train(model, optimizer, WATCHED - 1) == want[:-1]
    assert (kfac.choice, kfac.steps, kfac.will_decompose_all) == (None, 0, False)
    assert train(model, optimizer, 1, WATCHED - 1) == want[-1:]
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)
    assert kfac.choice is not None
    train(model, optimizer, 1, WATCHED)
    assert kfac.steps == 1
    assert not all(map(torch.equal, model.parameters(), alone.parameters()))


def test_after_the_first_steps_it_is_the_kfac_of_the_chosen_options(clock):
    model, optimizer, kfac = budgeted(0.7 * WIDE / 1e-3, max_dim=64)
    train(model, optimizer, WATCHED)
    choice = asdict(kfac.choice)
    assert choice["max_dim"] < 48
    assert choice.pop("overhead") <= 0.7 * WIDE / 1e-3
    other = copy.deepcopy(model)
    second = sgd(other)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pinned = KFAC(other, second, **choice).attach()
    assert pinned.plan == kfac.plan
    assert train(model, optimizer, 9, WATCHED) == train(other, second, 9, WATCHED)
    assert str(kfac.choice) in str(kfac.report())


TIGHT = 1.4 * WIDE / 1e-3
"""A budget for two rotations by eigenvectors, of which max_dim must leave out some."""


def eigen(max_overhead=TIGHT, model=None, **kfac):
    model = net() if model is None else model
    kfac = {"update_freq": 4, "factor_update_freq": 2, "max_overhead": max_overhead} | kfac
    return model, eigen_adam(model, 0.01, weight_decay=0.1, kfac=kfac)


def test_eigen_adam_makes_the_first_steps_as_adamw(clock):
    alone = net()
    adamw = torch.optim.AdamW(alone.parameters(), 0.01, (0.8, 0.95), weight_decay=0.1)
    model, optimizer = eigen()
    assert train(model, optimizer, WATCHED) == train(alone, adamw, WATCHED)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)
    assert optimizer.preconditioner.choice is not None


def test_eigen_adam_then_has_the_chosen_options_and_no_moments_of_adamw(clock):
    model, optimizer = eigen()
    train(model, optimizer, WATCHED)
    choice = asdict(optimizer.preconditioner.choice)
    assert choice["max_dim"] < 48
    assert choice["block_size"] is None
    assert choice.pop("overhead") <= TIGHT
    _, pinned = eigen(None, other := copy.deepcopy(model), **choice)
    assert train(model, optimizer, 9, WATCHED) == train(other, pinned, 9, WATCHED)
    assert all(entry.keys() == {KEY} for entry in optimizer.state.values())


@pytest.mark.parametrize("finished", [3, WATCHED, WATCHED + 3])
@pytest.mark.parametrize("is_built", [True, False])
def test_a_state_of_eigen_adam_keeps_the_choice(clock, finished, is_built):
    """``is_built``: whether the KFAC exists before the state is loaded."""
    model, optimizer = eigen()
    train(model, optimizer, finished)
    saved = copy.deepcopy(optimizer.state_dict())
    again = copy.deepcopy(model)
    want = train(model, optimizer, 6, finished)
    if is_built:
        _, second = eigen(model=again)
        second.load_state_dict(saved)
        kfac = second.preconditioner
    else:
        second = EigenAdam(again.parameters(), 0.01, weight_decay=0.1)
        second.load_state_dict(saved)
        keywords = KFAC_DEFAULTS | {"update_freq": 4, "factor_update_freq": 2}
        kfac = KFAC(again, second, max_overhead=TIGHT, **keywords).attach()
    if finished < WATCHED:  # the first steps begin again
        assert (kfac.steps, kfac.choice) == (0, None)
        train(again, second, WATCHED)
        assert kfac.choice is not None
        return
    assert kfac.choice == optimizer.preconditioner.choice
    assert train(again, second, 6, finished) == want


@pytest.mark.parametrize("finished", [0, 3, WATCHED, WATCHED + 2])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_keeps_the_choice_of_eigen_adam(clock, tmp_path, finished):
    model, optimizer = eigen(100.0)
    train(model, optimizer, finished)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=tmp_path)
    again = copy.deepcopy(model)
    want = train(model, optimizer, 4, finished)
    _, resumed = eigen(100.0, again)
    state = get_optimizer_state_dict(again, resumed, options=options)
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, resumed, state, options=options)
    assert resumed.preconditioner.steps == max(0, finished - WATCHED)
    if finished >= WATCHED:
        assert resumed.preconditioner.choice == optimizer.preconditioner.choice
        assert train(again, resumed, 4, finished) == want


def test_rows_are_those_of_the_whole_step(clock, monkeypatch):
    found = []
    choose = preconditioner.choose_within_budget
    monkeypatch.setattr(
        preconditioner, "choose_within_budget", lambda *a: found.append(a[3]) or choose(*a)
    )
    model, optimizer, _ = budgeted(1.0)
    for _ in range(WATCHED):
        optimizer.zero_grad()
        for part in 10, 6:  # micro-batches
            (model(torch.randn(part, 47)).square().mean() * part / 16).backward()
        optimizer.step()
    assert found[0].rows == {"0": 16.0, "2": 16.0}
    assert found[0].step_s == pytest.approx(1e-3)


def test_a_state_keeps_the_choice_and_continues_bit_by_bit(clock):
    model, optimizer, kfac = budgeted(0.7 * WIDE / 1e-3)
    train(model, optimizer, WATCHED + 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), kfac.state_dict()))
    want = train(model, optimizer, 6, WATCHED + 3)
    again, second, loaded = budgeted(0.7 * WIDE / 1e-3)
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    loaded.load_state_dict(saved[2])
    assert loaded.choice == kfac.choice
    assert train(again, second, 6, WATCHED + 3) == want


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_keeps_the_choice(clock, tmp_path):
    model, optimizer, kfac = budgeted(0.5)
    train(model, optimizer, WATCHED + 2)
    dcp.save({"kfac": kfac}, checkpoint_id=tmp_path)
    _, _, resumed = budgeted(0.5)
    dcp.load({"kfac": resumed}, checkpoint_id=tmp_path)
    assert resumed.choice == kfac.choice is not None
    assert resumed.steps == kfac.steps


def test_a_state_of_the_first_steps_lets_them_begin_again(clock):
    model, optimizer, kfac = budgeted(1.0)
    train(model, optimizer, 3)
    saved = kfac.state_dict()
    assert saved["choice"]["update_freq"] == 0, "no choice yet"
    again, second, loaded = budgeted(1.0)
    loaded.load_state_dict(saved)
    train(again, second, WATCHED - 1)
    assert loaded.choice is None
    train(again, second, 1)
    assert loaded.choice is not None


def test_a_state_before_the_choice_loads_after_it(clock):
    """A finder of learning rates puts the first state back."""
    model, optimizer, kfac = budgeted(0.7 * WIDE / 1e-3)
    first = copy.deepcopy(kfac.state_dict())
    train(model, optimizer, WATCHED + 2)
    choice = kfac.choice
    assert choice.max_dim < 48
    kfac.load_state_dict(first)
    assert (kfac.steps, kfac.choice) == (0, choice)
    train(model, optimizer, 2)


def test_a_rebuild_finds_the_groups_of_weights_that_the_optimizer_no_longer_has(clock):
    """As with DeepSpeed, which trains one flat parameter in place of each group."""
    model, optimizer, kfac = budgeted(1.0)
    train(model, optimizer, WATCHED - 1)
    weights = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(3))]
    train(model, optimizer, 1)
    assert kfac.choice is not None
    optimizer.state.clear()
    optimizer.load_state_dict(optimizer.state_dict())  # makes other groups
    optimizer.param_groups[0]["lr"] = 0.25
    assert set(kfac._write_back.learning_rates().values()) == {0.25}
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "params": weights, "lr": 0.5}
    assert set(kfac._write_back.learning_rates().values()) == {0.5}


def test_a_layer_that_is_unfrozen_in_the_first_steps_is_not_covered(clock):
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model[2])
    kfac = KFAC(model, optimizer, max_overhead=1.0).attach()
    train(model, optimizer, 3)
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match="layer '0' was added or unfrozen after KFAC was built"):
        train(model, optimizer, WATCHED, 3)
    assert (kfac.layer_names, kfac.steps) == (["2"], 3)


@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_rates_are_measured_in_float32_whatever_the_script_computes_in(monkeypatch, method):
    monkeypatch.setattr(stepper, "SIZES", (8, 16))
    monkeypatch.setattr(stepper, "COPY_NUMEL", 64)
    model = nn.Sequential(nn.Linear(4, 4))
    kfac = KFAC(model, sgd(model), max_overhead=1e9, method=method).attach()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(WATCHED):
            kfac._optimizer.zero_grad()
            model(torch.ones(2, 4, dtype=torch.float32)).sum().backward()
            with torch.autocast("cpu", torch.bfloat16):
                kfac._optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert kfac.choice is not None


def test_a_state_without_budget_keeps_the_options(clock):
    model = net()
    optimizer = sgd(model)
    kfac = KFAC(model, optimizer, update_freq=4, factor_update_freq=2).attach()
    train(model, optimizer, 3)
    _, _, loaded = budgeted(1e-9)
    loaded.load_state_dict(kfac.state_dict())
    assert (loaded.choice, loaded.steps) == (None, 3)
    assert loaded._capture.identity.due == {"0", "2"}  # as without max_overhead
    assert loaded.plan == kfac.plan


def test_a_refused_state_changes_nothing(clock):
    model, optimizer, kfac = budgeted(1.0)
    train(model, optimizer, WATCHED + 3)
    saved, choice = copy.deepcopy(kfac.state_dict()), kfac.choice
    other = copy.deepcopy(saved)
    other["choice"]["update_freq"] *= 2
    other["layers"]["0"]["A"]["factor"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="expected a"):
        kfac.load_state_dict(other)
    assert (kfac.steps, kfac.choice) == (3, choice)
    factor = kfac.state_dict()["layers"]["0"]["A"]["factor"]
    assert torch.equal(factor, saved["layers"]["0"]["A"]["factor"])


def test_a_rebuild_frees_the_old_factors(clock):
    model, optimizer, kfac = budgeted(1.0)
    train(model, optimizer, WATCHED + 1)
    saved, store = copy.deepcopy(kfac.state_dict()), ref(kfac._executor.store)
    saved["choice"]["update_freq"] *= 2
    kfac.load_state_dict(saved)
    gc.collect()
    assert store() is None


@pytest.mark.parametrize(
    "choice", [[1], {"max_dim": 3}, {**asdict(Choice(8, None, 1, 1, 0.1)), "max_dim": "8"}]
)
def test_a_damaged_choice_is_refused(choice):
    _, _, kfac = budgeted(1.0)
    state = kfac.state_dict() | {"choice": choice}
    with pytest.raises(ValueError, match="K-FAC state: "):
        kfac.load_state_dict(state)


def test_a_budget_that_cannot_be_met_says_so(clock, monkeypatch):
    slow = Rates(1.0, 1e12, RATES.product_flops, RATES.decompose_s)
    monkeypatch.setattr(preconditioner, "measure", lambda *_: slow)
    model, optimizer, _ = budgeted(0.25)
    train(model, optimizer, WATCHED - 1)
    with pytest.raises(BudgetError, match=r"max_overhead=0\.25 cannot be met"):
        train(model, optimizer, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_overhead": 0}, "must be above 0"),
        ({"max_overhead": float("inf")}, "must be above 0 and finite"),
        ({"max_overhead": 0.5, "background": True}, "takes no time of a step"),
        ({"max_overhead": 0.5, "method": "identity"}, "has no factors"),
        ({"max_overhead": 0.5, "model_parallel": SingleProcess()}, "different intervals"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        KFAC(model, sgd(model), **options)


@pytest.mark.parametrize("method", ["inverse", "eigen_adam"])
def test_measured_rates_are_possible(method):
    adam = EigenAdam(net().parameters()).rule if method == "eigen_adam" else None
    rates = measure(SingleProcess(), torch.device("cpu"), method, adam)
    if adam is not None:
        assert all(1e6 < rate < 1e14 for rate in rates.updates.product_flops)
        assert all(seconds > 1e-7 for seconds in rates.updates.square_s + rates.updates.wide_s)
    assert 1e-8 < rates.call_s < 1e-3
    assert 1e7 < rates.bytes_per_s < 1e13
    assert all(1e6 < rate < 1e14 for rate in rates.product_flops)
    assert all(1e-7 < seconds < 10 for seconds in rates.decompose_s)
    assert rates.decompose_s[-1] > rates.decompose_s[0]


def two_ranks(method):
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = net()
    options = {"update_freq": 4, "factor_update_freq": 2, "spread": False, "max_overhead": 10.0}
    if method == "eigen_adam":
        optimizer = EigenAdam(model.parameters(), 0.01)
        kfac = KFAC(model, optimizer, **KFAC_DEFAULTS | options)
    else:
        optimizer = sgd(model)
        kfac = KFAC(model, optimizer, method=method, **options)
    for step in range(WATCHED + 3):
        g = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8 + 4 * rank, 47, generator=g)).square().mean().backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)
            p.grad /= 2
        kfac.step()
        optimizer.step()
    rates = measure(TorchCollective(), torch.device("cpu"), method, kfac._executor.solver.adam)
    return kfac.choice, kfac.plan.digest(), rates, [p.detach() for p in model.parameters()]


class Optional(nn.Module):
    """Rank 1 leaves out the second layer in one step, so it sends less while backward runs."""

    def __init__(self):
        super().__init__()
        self.always, self.seldom = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, step):
        x = self.always(x)
        return x if (torch.distributed.get_rank(), step) == (1, 1) else self.seldom(x)


def two_ranks_with_overlap():
    torch.manual_seed(0)
    model = Optional()
    optimizer = sgd(model)
    kfac = KFAC(model, optimizer, max_overhead=50.0, overlap=True, factor_update_freq=1)
    for step in range(WATCHED + 3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(64, 32), step).square().mean().backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.distributed.all_reduce(p.grad)
        kfac.step()
        optimizer.step()
    kfac.load_state_dict(kfac.state_dict())
    return [p.detach() for p in model.parameters()]


def test_the_first_steps_with_overlap_send_equal_messages():
    first, second = run_ranks(2, two_ranks_with_overlap)
    for p, q in zip(first, second, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("method", ["inverse", "eigen_adam"])
def test_all_ranks_take_the_choice_of_rank_0(method):
    first, second = run_ranks(2, two_ranks, method)
    assert first[:3] == second[:3]
    assert first[2].message_s > 0
    for p, q in zip(first[3], second[3], strict=True):
        assert torch.equal(p, q)
