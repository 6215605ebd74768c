"""The step against the dense float64 oracle, in one process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench import KFAC
from kfac_bench.core.damping import LevenbergMarquardt
from tests.support import oracle

DAMPING = 0.03


def tiny_model(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=bias),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 5, bias=bias),
        nn.ReLU(inplace=True),
        nn.Linear(5, 3),
    )


def batch(n=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 6, 6, generator=generator)
    return x, torch.randint(3, (n,), generator=generator)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def kfac_of(model, **options):
    defaults = {"method": "eigen", "damping": DAMPING, "trust_ratio": None, "grafting": False}
    defaults |= {"update_freq": 1, "factor_update_freq": 1}
    return KFAC(model, sgd(model), **(defaults | options))


def backward(model, x, y):
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def matrix_grad(module):
    grad = module.weight.grad.flatten(1)
    return grad if module.bias is None else torch.cat([grad, module.bias.grad[:, None]], 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("convention", ["kfc", "sc20", "kaisa"])
def test_factors_equal_the_definitions(convention, bias):
    model = tiny_model(bias)
    recorder = oracle.Calls(layers_of(model))
    kfac = kfac_of(model, factor_convention=convention)
    backward(model, *batch())
    kfac.step()
    for name, module in model.named_modules():
        if module in recorder.calls:
            (call,) = recorder.calls[module]
            state = kfac.state_dict()["layers"][name]
            wants = oracle.factors(module, *call, convention)
            for factor, want in zip("AG", wants, strict=True):
                got = state[factor]["factor"][0].double()
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max())


@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("convention", ["kfc", "sc20", "kaisa"])
def test_a_step_equals_the_dense_solve(method, convention):
    model = tiny_model()
    recorder = oracle.Calls(layers_of(model))
    kfac = kfac_of(model, method=method, factor_convention=convention)
    backward(model, *batch())
    raw = {m: matrix_grad(m).clone() for m in layers_of(model)}
    kfac.step()
    for module, (call,) in recorder.calls.items():
        a, g = oracle.factors(module, *call, convention)
        want = oracle.precondition(raw[module], a, g, DAMPING, method)
        torch.testing.assert_close(matrix_grad(module).double(), want, rtol=2e-3, atol=1e-4)
        assert not torch.allclose(matrix_grad(module), raw[module], rtol=0.1)


def test_averages_are_debiased_and_weigh_the_old_by_factor_decay():
    model, decay = tiny_model(), 0.8
    recorder = oracle.Calls(layers_of(model))
    kfac = kfac_of(model, factor_decay=decay)
    for seed in range(3):
        backward(model, *batch(seed=seed))
        kfac.step()
    last = model[-1]
    fresh = [oracle.factors(last, *call)[0] for call in recorder.calls[last]]
    weights = [decay**2, decay, 1.0]
    want = sum(w * f for w, f in zip(weights, fresh, strict=True)) / sum(weights)
    got = kfac.state_dict()["layers"]["7"]["A"]["factor"][0].double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_averages_that_start_at_the_identity_are_those_of_the_released_code():
    """The identity F_0, then ``alpha * current + (1 - alpha) * new`` without debiasing."""
    model, decay = tiny_model(), 0.8
    recorder = oracle.Calls(layers_of(model))
    kfac = kfac_of(model, factor_decay=decay, factor_init="identity")
    for seed in range(3):
        backward(model, *batch(seed=seed))
        raw = matrix_grad(model[-1]).clone()
        kfac.step()
    entries = kfac.state_dict()["layers"]["7"]
    want = [torch.eye(x["factor"].shape[-1], dtype=torch.float64) for x in entries.values()]
    for call in recorder.calls[model[-1]]:
        fresh = oracle.factors(model[-1], *call)
        want = [decay * w + (1 - decay) * f for w, f in zip(want, fresh, strict=True)]
    for factor, dense in zip("AG", want, strict=True):
        got = entries[factor]["factor"][0].double()
        torch.testing.assert_close(got, dense, rtol=1e-5, atol=1e-6)
    solved = oracle.precondition(raw, *want, DAMPING)
    torch.testing.assert_close(matrix_grad(model[-1]).double(), solved, rtol=2e-3, atol=1e-4)


def test_kl_clip_is_equation_16():
    lr, kl_clip = 0.1, 1e-4
    model = tiny_model()
    free = copy.deepcopy(model)
    clipped, unclipped = kfac_of(model, kl_clip=kl_clip), kfac_of(free)
    backward(model, *batch())
    backward(free, *batch())
    raw = [matrix_grad(m).clone().double() for m in layers_of(model)]
    clipped.step()
    unclipped.step()
    new = [matrix_grad(m).double() for m in layers_of(free)]
    total = sum((p * g).sum().abs() for p, g in zip(new, raw, strict=True)) * lr**2
    nu = min(1.0, (kl_clip / total.item()) ** 0.5)
    assert 0 < nu < 0.9
    assert clipped.statistics()["nu"] == pytest.approx(nu, rel=1e-4)
    assert unclipped.statistics()["nu"] is None
    for module, want in zip(layers_of(model), new, strict=True):
        torch.testing.assert_close(matrix_grad(module).double(), nu * want, rtol=1e-3, atol=1e-6)


def test_the_learning_rate_is_read_from_the_layers_own_group_at_each_step():
    model = tiny_model()
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": [p for m in model[1:] for p in m.parameters()], "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    kfac = KFAC(model, optimizer, damping=DAMPING, kl_clip=1e-4, trust_ratio=None)
    backward(model, *batch())
    raw = matrix_grad(model[0]).clone()
    kfac.step()
    first = kfac.statistics()["nu"]
    product = (matrix_grad(model[0]) / first * raw).sum().item()
    assert first == pytest.approx((1e-4 / (0.25 * product)) ** 0.5, rel=1e-4)
    optimizer.param_groups[0]["lr"] = 0.05
    backward(model, *batch())
    kfac.step()
    assert kfac.statistics()["nu"] > first


def test_cosine_is_between_gradient_and_preconditioned_gradient():
    model = tiny_model()
    kfac = kfac_of(model, kl_clip=1e-4)
    backward(model, *batch())
    raw = matrix_grad(model[7]).clone().flatten()
    kfac.step()
    assert kfac.statistics()["cosine"] == {}
    kfac.track_cosine = True
    backward(model, *batch())
    raw = matrix_grad(model[7]).clone().flatten()
    kfac.step()
    want = F.cosine_similarity(raw, matrix_grad(model[7]).flatten(), 0).item()
    assert set(kfac.statistics()["cosine"]) == {"0", "2", "5", "7"}
    assert kfac.statistics()["cosine"]["7"] == pytest.approx(want, abs=1e-5)


def test_g_does_not_depend_on_batch_size_or_repetition():
    x, y = batch(4)
    results = []
    for times in (1, 3):
        model = tiny_model()
        kfac = kfac_of(model)
        backward(model, x.repeat(times, 1, 1, 1), y.repeat(times))
        kfac.step()
        results.append(kfac.state_dict()["layers"]["2"]["G"]["factor"])
    torch.testing.assert_close(*results)


def test_g_does_not_depend_on_the_weight_of_the_loss():
    """A rank with more examples than the mean multiplies its loss by a weight above 1."""
    results = []
    for weight in (1.0, 3.0):
        model, (x, y) = tiny_model(), batch()
        kfac = kfac_of(model)
        kfac.loss_weight = weight
        (weight * F.cross_entropy(model(x), y)).backward()
        kfac.step()
        results.append(kfac.state_dict()["layers"]["2"]["G"]["factor"])
    torch.testing.assert_close(*results)


def test_accumulated_micro_batches_equal_the_large_batch():
    x, y = batch(9)
    large, small = tiny_model(), tiny_model()
    kfac_large, kfac_small = kfac_of(large), kfac_of(small)
    backward(large, x, y)
    for part in (slice(0, 4), slice(4, 8), slice(8, 9)):  # a partial last one
        loss = F.cross_entropy(small(x[part]), y[part], reduction="sum") / len(y)
        loss.backward()
    kfac_large.step()
    kfac_small.step()
    for got, want in zip(layers_of(small), layers_of(large), strict=True):
        torch.testing.assert_close(matrix_grad(got), matrix_grad(want), rtol=1e-3, atol=1e-5)


def test_schedules_are_functions_of_the_step():
    model = tiny_model()
    kfac = kfac_of(
        model,
        damping=lambda step: 0.1 / (step + 1),
        update_freq=lambda step: 1 if step < 2 else 100,
        factor_update_freq=1,
        kl_clip=lambda step: 1e-3,
    )
    decompositions = []
    for seed in range(4):
        backward(model, *batch(seed=seed))
        kfac.step()
        decompositions.append(kfac.state_dict()["layers"]["0"]["A"]["eigen"][1].clone())
    assert not torch.equal(decompositions[0], decompositions[1])
    assert torch.equal(decompositions[1], decompositions[2])
    assert torch.equal(decompositions[2], decompositions[3])


def test_statistics_are_collected_only_when_due():
    model = tiny_model()
    kfac = kfac_of(model, factor_update_freq=2, update_freq=2)
    seen = []
    for seed in range(3):
        backward(model, *batch(seed=seed))
        kfac.step()
        seen.append(kfac.state_dict()["layers"]["0"]["G"]["factor"].clone())
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_kfac_tells_that_a_loaded_state_lacks_decompositions():
    model = tiny_model()
    kfac = kfac_of(model, update_freq=9, factor_update_freq=9, spread=False)
    backward(model, *batch())
    kfac.step()
    state = kfac.state_dict()
    kfac.load_state_dict(state)
    assert not kfac.will_decompose_all
    del state["layers"]["0"]["A"]["eigen"]
    kfac.load_state_dict(state)
    assert kfac.will_decompose_all
    backward(model, *batch())
    kfac.step()
    assert not kfac.will_decompose_all, "the decompositions are complete again"


def test_a_rank_whose_loss_has_no_weight_adds_no_statistics():
    """A rank without examples may send zeros backward, so that all ranks do the same."""
    model = tiny_model()
    kfac = kfac_of(model, method="ekfac")
    for weight in (1.0, 0.0):
        kfac.loss_weight = weight
        model.zero_grad()
        (weight * F.cross_entropy(model(batch()[0]), batch()[1])).backward()
        kfac.step()
    assert {float(weight) for weight in kfac._executor.store.weights.values()} == {1.0}


def test_kfac_tells_what_the_next_step_will_do():
    model = tiny_model()
    damping = LevenbergMarquardt(interval=2)
    every = {"update_freq": lambda step: 2 if step < 2 else 3, "spread": False}
    kfac, answers = kfac_of(model, damping=damping, early_updates=False, **every), []
    for _ in range(5):
        answers.append((kfac.update_freq, kfac.will_decompose_all, kfac.will_adapt_damping))
        backward(model, *batch())
        kfac.step()
        kfac.adapt_damping(torch.ones(()), lambda: torch.ones(()))
        assert ("Decompose" in kfac.stage_s) == answers[-1][1]
        assert kfac.stage_s.keys() <= set(kfac.stage_names)
    assert answers == [
        (2, True, False),
        (2, False, True),
        (3, False, False),
        (3, True, True),
        (3, False, False),
    ]
    model = tiny_model()
    in_slices = kfac_of(model, update_freq=4, spread=True)
    assert in_slices.will_decompose_all, "the first step needs all slices"
    assert not in_slices.will_adapt_damping
    backward(model, *batch())
    in_slices.step()
    assert not in_slices.will_decompose_all
    assert not kfac_of(tiny_model(), method="identity").will_decompose_all


def test_detach_takes_the_hooks_off():
    model = tiny_model()
    kfac = kfac_of(model)
    assert any(m._forward_hooks for m in model.modules())
    kfac.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="detach"):
        kfac.step()


def test_a_deep_copy_does_not_feed_the_original():
    model = tiny_model()
    kfac = kfac_of(model)
    backward(copy.deepcopy(model), *batch(seed=5))
    backward(model, *batch())
    alone = tiny_model()
    kfac_alone = kfac_of(alone)
    backward(alone, *batch())
    kfac.step()
    kfac_alone.step()
    assert torch.equal(matrix_grad(model[0]), matrix_grad(alone[0]))


def test_an_unused_layer_and_a_frozen_one_do_not_matter():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    kfac = kfac_of(model)
    for step in range(3):
        model.zero_grad()
        model["used"](torch.randn(4, 3)).square().mean().backward()
        kfac.step()
        if step == 1:
            model["used"].weight.requires_grad_(False)
    assert model["unused"].weight.grad is None
    assert all(
        torch.isfinite(p.grad).all() for p in model["used"].parameters() if p.grad is not None
    )


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_parameter_that_is_frozen_later_does_not_move(frozen):
    """Its zeros stay in ``.grad``. K-FAC would mix them with the gradient of the other one."""
    model = tiny_model()
    optimizer = sgd(model)
    KFAC(model, optimizer).attach()
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        if step == 1:
            parameter = model[5].get_parameter(frozen).requires_grad_(False)
            before = parameter.detach().clone()
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        optimizer.step()
    assert torch.equal(parameter, before)
    others = [p for p in model.parameters() if p is not parameter]
    assert all(p.grad.any() for p in others)


def test_a_non_finite_statistic_never_enters_the_average():
    model = nn.Sequential(nn.Linear(3, 2))
    kfac = kfac_of(model)
    model(torch.ones(4, 3)).sum().backward()
    kfac.step()
    before = kfac.state_dict()["layers"]["0"]["A"]["factor"].clone()
    model(torch.full((4, 3), float("inf"))).sum().backward()
    kfac.step()
    assert torch.equal(kfac.state_dict()["layers"]["0"]["A"]["factor"], before)


def test_eval_and_no_grad_forwards_count_nothing():
    model = tiny_model()
    kfac = kfac_of(model)
    with torch.no_grad():
        model(batch(seed=7)[0])
    model.eval()
    backward(model, *batch(seed=8))
    model.train()
    model(batch(seed=9)[0])  # a forward without a backward
    backward(model, *batch())
    alone = tiny_model()
    kfac_alone = kfac_of(alone)
    backward(alone, *batch())
    kfac.step()
    kfac_alone.step()
    assert torch.equal(matrix_grad(model[0]), matrix_grad(alone[0]))


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_training_continues_bit_exactly_from_a_state(method):
    options = {"method": method, "update_freq": 3, "factor_update_freq": 1, "kl_clip": 1e-3}
    model = tiny_model()
    kfac = kfac_of(model, **options)
    for seed in range(2):
        backward(model, *batch(seed=seed))
        kfac.step()
    saved = copy.deepcopy(kfac.state_dict())
    other = copy.deepcopy(model)
    resumed = kfac_of(other, **options)
    resumed.load_state_dict(saved)
    for seed in range(2, 6):
        for m, k in ((model, kfac), (other, resumed)):
            backward(m, *batch(seed=seed))
            k.step()
        for a, b in zip(layers_of(model), layers_of(other), strict=True):
            assert torch.equal(matrix_grad(a), matrix_grad(b))


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    model = tiny_model()
    kfac = kfac_of(model)
    backward(model, *batch())
    kfac.step()
    saved = copy.deepcopy(kfac.state_dict())
    saved["layers"]["7"]["A"]["factor"] = torch.eye(2)
    with pytest.raises(ValueError, match=r"state of 7: expected a \[1, 6, 6\] A, found \[2, 2\]"):
        kfac.load_state_dict(saved)
    saved["layers"]["nine"] = {"A": {}}
    with pytest.raises(ValueError, match="layers this model lacks"):
        kfac.load_state_dict(saved)
    assert kfac.steps == 1


def test_a_failed_decomposition_keeps_the_last_good_one(monkeypatch, caplog):
    model = tiny_model()
    kfac = kfac_of(model)
    backward(model, *batch())
    kfac.step()
    before = kfac.state_dict()["layers"]["0"]["A"]["eigen"][1].clone()

    def fail(x):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    backward(model, *batch(seed=2))
    kfac.step()
    assert kfac.failed_decompositions == 8
    assert torch.equal(kfac.state_dict()["layers"]["0"]["A"]["eigen"][1], before)
    backward(model, *batch(seed=3))
    kfac.step()
    assert kfac.failed_decompositions == 16
    first, tenth = (record.getMessage() for record in caplog.records)
    assert first.endswith("the last good one stays")
    assert tenth == "10 decompositions have failed; their last good ones stay"


def test_report_says_what_is_covered_and_why_not():
    model = nn.Sequential(
        nn.Bilinear(4, 4, 4),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(8, 2),
        nn.Linear(2, 2),
    )
    model[4].weight.requires_grad_(False)
    report = kfac_of(model).report()
    reasons = {s.name: s.reason for s in report.skipped}
    assert reasons == {
        "0": "no layer class for Bilinear (add one with layer_types)",
        "1": "skip pattern 'Norm'",
        "4": "weight is frozen",
    }
    assert report.covered_params == 18
    assert "covers 1 layers, 18 of" in str(report)
    skipping = kfac_of(tiny_model(), skip=["^2$", "Linear"]).report()
    assert [layer.name for layer in skipping.layers] == ["0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0}, "damping=0"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"update_freq": 0}, "update_freq=0"),
        ({"factor_update_freq": 1.5}, "factor_update_freq=1.5"),
        ({"factor_decay": 1}, "factor_decay=1"),
        ({"factor_convention": "foo"}, "choose one of kfc, sc20, kaisa"),
        ({"state_dtype": "fp16"}, "choose one of torch.float32, torch.bfloat16, torch.float16"),
        ({"factor_init": "foo"}, "choose one of debiased, identity"),
        ({"strategy": "foo"}, "choose one of comm_opt"),
        ({"method": "foo"}, "choose one of eigen, inverse"),
        ({"skip": ["."]}, "no layer to precondition"),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        kfac_of(tiny_model(), **options)


def test_an_optimizer_of_other_parameters_is_refused():
    with pytest.raises(ValueError, match=r"does not hold the weight of .* and other layers"):
        KFAC(tiny_model(), sgd(tiny_model()))


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_each_parameter_of_a_layer_must_be_in_the_optimizer(kind):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    held = [p for name, p in model.named_parameters() if name != f"2.{kind}"]
    optimizer = torch.optim.SGD(held, lr=0.1)
    with pytest.raises(ValueError, match=f"the optimizer does not hold the {kind} of 2, but"):
        KFAC(model, optimizer)
    getattr(model[2], kind).requires_grad_(False)
    KFAC(model, optimizer).detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_train_and_keep_theirs(dtype):
    model = tiny_model().to(dtype)
    kfac = kfac_of(model)
    x, y = batch()
    backward(model, x.to(dtype), y)
    kfac.step()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())
    factor = kfac.state_dict()["layers"]["0"]["A"]["factor"]
    assert factor.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_layers_of_two_dtypes_keep_theirs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double())
    kfac = KFAC(model, sgd(model), update_freq=1, factor_update_freq=1)
    for _ in range(2):
        model.zero_grad()
        model[1](model[0](torch.randn(8, 4)).double()).square().mean().backward()
        kfac.step()
    assert [p.grad.dtype for p in model.parameters()] == 2 * [torch.float32] + 2 * [torch.float64]
    factors = [layer["A"]["factor"].dtype for layer in kfac.state_dict()["layers"].values()]
    assert factors == [torch.float32, torch.float64]
