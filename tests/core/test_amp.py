"""Mixed precision, loss scaling, overflows, gradient accumulation."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench.core import KFAC, eigen_adam
from tests.support.layer_checks import skip_if_torch_cannot

TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.01}
"""Of a factor's largest element: a few roundings of 2^-8 and 2^-11."""
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
METHODS = pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
BOTH = pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])


class Net(nn.Module):
    """Every kind of layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.batch_norm = nn.GroupNorm(2, 4)
        self.tokens = nn.Linear(4, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.batch_norm(self.grouped(self.conv(x).relu()))
        h = self.tokens(h.flatten(2).mT)
        h = self.norm(h + self.attention(h, h, h)[0])
        return self.head(h.mean(1))


def batch(n=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 5, 5, generator=generator)
    return x, torch.randint(3, (n,), generator=generator)


def setup(**options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    defaults = {"damping": 0.03, "method": "eigen", "trust_ratio": None, "grafting": False}
    defaults |= {"update_freq": 1, "factor_update_freq": 1}
    return model, optimizer, KFAC(model, optimizer, **(defaults | {"skip": []} | options))


def factors_of(kfac):
    layers = kfac.state_dict()["layers"]
    return {(n, f): layers[n][f]["factor"].clone() for n in layers for f in "AG"}


def close(got, want, tolerance):
    error = (got.double() - want.double()).abs().max()
    return float(error) <= tolerance * max(float(want.abs().max()), 1e-20)


def amp_step(model, optimizer, kfac, scaler, dtype, seed=1, factor=1.0):
    optimizer.zero_grad()
    x, y = batch(seed=seed)
    with torch.autocast("cpu", dtype=dtype):
        loss = factor * F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    kfac.step(loss_scale=scaler.get_scale)
    scaler.step(optimizer)
    scaler.update()


@DTYPES
@METHODS
def test_factors_are_float32_and_close_to_those_of_float32(dtype, method):
    model, _, kfac = setup(method=method)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    kfac.step()
    want, grads = factors_of(kfac), [p.grad for p in model.parameters()]
    model, optimizer, kfac = setup(method=method)
    amp_step(model, optimizer, kfac, torch.amp.GradScaler("cpu", init_scale=1024.0), dtype)
    for key, factor in factors_of(kfac).items():
        assert factor.dtype == torch.float32, key
        assert close(factor, want[key], TOLERANCE[dtype]), key
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert p.grad.dtype == torch.float32
        scale = max(float(grad.abs().max()), 1e-4)  # the key's bias has none but rounding
        assert float((p.grad - grad).abs().max()) <= 10 * TOLERANCE[dtype] * scale


@pytest.mark.parametrize("method", ["inverse", "ekfac", "eigen_adam"])
def test_backward_and_the_optimizers_step_may_run_under_autocast(method):
    class Twice(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](self[0](x).tanh()).tanh())

    results = []
    for is_inside in (False, True):
        torch.manual_seed(0)
        model = Twice(nn.Linear(8, 8), nn.Linear(8, 3))
        if method == "eigen_adam":
            optimizer = eigen_adam(model, kfac={"update_freq": 1, "factor_update_freq": 1})
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            KFAC(model, optimizer, method=method, update_freq=1, factor_update_freq=1).attach()
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(6, 8)).float().square().mean()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
                loss.backward()
                optimizer.step()
        results.append([*model.parameters()])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("make", [nn.Linear, nn.LSTM])
def test_an_input_that_changes_in_place_after_the_layer(make):
    """The layer has computed with its own copy in half precision, so a script may do that."""
    found = []
    for change in (torch.Tensor.add, torch.Tensor.add_):
        torch.manual_seed(0)
        model, x = nn.ModuleList([make(4, 4)]), torch.randn(5, 6, 4)
        skip_if_torch_cannot(model[0], x, torch.bfloat16)
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.autocast("cpu", torch.bfloat16):
            output = model[0](x)
            output = output if make is nn.Linear else output[0]
            (output * change(x, 3.0)).mean().backward()
        kfac.step()
        found.append(factors_of(kfac))
    for key, want in found[0].items():
        assert torch.equal(found[1][key], want), key


@DTYPES
@pytest.mark.parametrize("scale", [2.0**8, 2.0**14])
def test_factors_do_not_depend_on_the_loss_scale(scale, dtype):
    results = []
    for init_scale in (2.0**10, scale):
        model, optimizer, kfac = setup()
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        amp_step(model, optimizer, kfac, scaler, dtype)
        results.append(factors_of(kfac))
    for key, want in results[0].items():
        assert close(results[1][key], want, 0.02 if dtype == torch.float16 else 1e-6), key


def test_tiny_gradients_in_half_precision():
    """A loss of 1e-5: gradients, and even more their squares, are below float16's range."""
    model, _, kfac = setup()
    (1e-5 * F.cross_entropy(model(batch()[0]), batch()[1])).backward()
    kfac.step()
    want = factors_of(kfac)
    model, optimizer, kfac = setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    amp_step(model, optimizer, kfac, scaler, torch.float16, factor=1e-5)
    for (name, factor), got in factors_of(kfac).items():
        if factor == "G" and name != "attention.in_proj.k":
            assert 0 < float(got.abs().max()) < 1e-9
            assert close(got, want[name, factor], 0.03), name


@pytest.mark.parametrize(
    ("method", "scale"),
    [("eigen", float("inf")), ("eigen", 2.0**40), ("inverse", 2.0**40), ("ekfac", float("inf"))],
)
def test_an_overflow_is_dropped_and_counted(method, scale):
    """The scaler skips the step, K-FAC its statistics, and training goes on."""
    model, optimizer, kfac = setup(method=method)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(2):
        amp_step(model, optimizer, kfac, scaler, torch.float16, seed)
    assert kfac.dropped_statistics == 0
    before = copy.deepcopy(kfac.state_dict()["layers"])
    parameters = copy.deepcopy(model.state_dict())
    scaler._scale.fill_(scale)
    amp_step(model, optimizer, kfac, scaler, torch.float16, 7)
    assert kfac.dropped_statistics >= len(before)
    assert all(torch.equal(v, parameters[k]) for k, v in model.state_dict().items())
    for name, entry in kfac.state_dict()["layers"].items():
        assert entry["A"]["factor"].isfinite().all()  # of a sound forward: it counts
        for key in ("factor", "weight"):
            assert torch.equal(entry["G"][key], before[name]["G"][key]), name
        assert method != "ekfac" or entry["second_moment"].isfinite().all()
    dropped = kfac.dropped_statistics
    scaler._scale.fill_(1024.0)
    for seed in range(2, 5):
        amp_step(model, optimizer, kfac, scaler, torch.float16, seed)
    assert kfac.dropped_statistics == dropped
    after = kfac.state_dict()["layers"]
    for name, entry in after.items():
        assert float(entry["G"]["weight"]) > float(before[name]["G"]["weight"])
    assert all(p.isfinite().all() and p.grad.isfinite().all() for p in model.parameters())
    assert not torch.equal(model.head.weight, parameters["head.weight"])


def test_an_overflow_in_the_forward_drops_both_factors():
    model, optimizer, kfac = setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    amp_step(model, optimizer, kfac, scaler, torch.float16)
    before = factors_of(kfac)
    optimizer.zero_grad()
    x, y = batch(seed=2)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x * 1e30), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    kfac.step(loss_scale=scaler.get_scale)
    scaler.step(optimizer)
    scaler.update()
    layers = kfac.report().layers
    assert kfac.dropped_statistics >= 2 * len(layers) - 1 - sum(
        "norm" in layer.name for layer in layers
    )
    for key, got in factors_of(kfac).items():
        assert got.isfinite().all()
        if "norm" not in key[0]:
            assert torch.equal(got, before[key]), key
    amp_step(model, optimizer, kfac, scaler, torch.float16, 3)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_first_step_may_overflow():
    """As with GradScaler's default scale it often does: factors are the identity until then."""
    model, optimizer, kfac = setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    amp_step(model, optimizer, kfac, scaler, torch.float16)
    assert kfac.dropped_statistics > 0
    scaler._scale.fill_(1024.0)
    amp_step(model, optimizer, kfac, scaler, torch.float16)
    want_model, want_optimizer, want_kfac = setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    amp_step(want_model, want_optimizer, want_kfac, scaler, torch.float16)
    for key, want in factors_of(want_kfac).items():
        assert close(factors_of(kfac)[key], want, 1e-6), key


WINDOWS = {
    "partial last": [5, 5, 2],
    "unequal": [1, 8, 3],
    "single samples": [1] * 12,
}


@functools.cache
def accumulate(*sizes, dtype=None, **options):
    """Two steps in micro-batches; the loss is a mean over all samples."""
    model, optimizer, kfac = setup(**options)
    model.double() if dtype is None else None
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(sum(sizes), step)
        x = x.double() if dtype is None else x
        for x_part, y_part in zip(x.split(sizes), y.split(sizes), strict=True):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(x_part), y_part)
            (loss * len(y_part) / len(y)).backward()
        kfac.step()
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    moments = kfac._executor.store.second_moments
    return factors_of(kfac), grads, {k: v.clone() for k, v in moments.items()}


@BOTH
@pytest.mark.parametrize(
    ("window", "method"),
    [(w, "eigen") for w in WINDOWS] + [("unequal", "inverse"), ("unequal", "ekfac")],
)
def test_accumulation_equals_one_large_batch(window, method, weight_sharing):
    options = {"method": method, "weight_sharing": weight_sharing}
    # EKFAC depends on eigenvectors, which are arbitrary in a null space: with fewer samples than
    # rows, for attention, whose 6 inputs are made of 4, and for means that a norm makes equal.
    sizes = [n * (4 if method == "ekfac" else 1) for n in WINDOWS[window]]
    factors, grads, moments = accumulate(*sizes, **options)
    want_factors, want_grads, want_moments = accumulate(sum(sizes), **options)
    for key, want in want_factors.items():
        assert close(factors[key], want, 1e-9), key
    for (name, _), got, want in zip(Net().named_parameters(), grads, want_grads, strict=True):
        if method != "ekfac" or not name.startswith(("attention", "tokens")):
            assert float((got - want).abs().max()) <= 1e-7 * max(float(want.abs().max()), 1e-3)
    assert bool(want_moments) == (method == "ekfac")
    for name, want in want_moments.items():
        assert close(moments[name], want, 1e-6) or name.startswith(("attention", "tokens")), name


def test_accumulation_in_half_precision():
    factors, _, _ = accumulate(5, 5, 2, dtype=torch.bfloat16)
    want, _, _ = accumulate(12, dtype=torch.bfloat16)
    for key in want:
        assert factors[key].dtype == torch.float32
        assert close(factors[key], want[key], 0.15), key


def test_accumulation_with_a_loss_scale():
    """The scale may change between steps, not within one."""
    model, optimizer, kfac = setup(factor_update_freq=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1)
    asked = []

    def scale():
        asked.append(scaler.get_scale())
        return asked[-1]

    for seed in range(3):
        optimizer.zero_grad()
        for part in (slice(0, 5), slice(5, 8)):
            x, y = (t[part] for t in batch(seed=seed))
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y, reduction="sum") / 8
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        kfac.step(loss_scale=scale)
        scaler.step(optimizer)
        scaler.update()
    assert asked == [512.0, 2048.0]  # only where factors were due
    assert kfac.dropped_statistics == 0
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_window_does_not_leak_into_the_next():
    """Statistics of a window that was given up are those of the next step, as its gradients are."""
    model, optimizer, kfac = setup()
    alone_model, _, alone = setup()
    x, y = batch()
    for part in (slice(0, 4), slice(4, 8)):
        (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
    kfac.step()
    optimizer.zero_grad()
    x, y = batch(seed=2)
    for m, k in ((model, kfac), (alone_model, alone)):
        m.load_state_dict(Net().state_dict())
        F.cross_entropy(m(x), y).backward()
        k.step()
    weights = kfac.state_dict()["layers"]["head"]["A"]["weight"]
    assert float(weights) == pytest.approx(1.95)
    first = setup()
    x, y = batch()
    F.cross_entropy(first[0](x), y).backward()
    first[2].step()
    for key, fresh in factors_of(alone).items():
        want = (0.95 * factors_of(first[2])[key] + fresh) / 1.95
        assert close(factors_of(kfac)[key], want, 1e-4) or "in_proj.k" in key[0], key


@DTYPES
@pytest.mark.parametrize("fisher", ["mc", "type2"])
def test_the_models_own_labels_under_autocast(dtype, fisher):
    """No loss scale is involved: seeds are of the size of the output, not of the loss."""
    results = []
    for autocast in (False, True):
        model, _, kfac = setup(fisher=fisher)
        x, y = batch()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            output = model(x)
        kfac.fisher_backward(output)
        F.cross_entropy(output.float(), y).backward()
        kfac.step(loss_scale=float("nan"))
        results.append(factors_of(kfac))
    assert kfac.dropped_statistics == 0
    for key, want in results[0].items():
        assert results[1][key].dtype == torch.float32
        if fisher == "type2":  # draws may differ by rounding
            assert close(results[1][key], want, TOLERANCE[dtype]), key
        elif key[1] == "G" and "in_proj.k" not in key[0]:
            assert float(results[1][key].abs().max()) > 0


def test_many_positions_under_autocast_do_not_make_g_zero():
    """The share of a position in an example is smaller than what float16 can hold."""
    results = []
    for autocast in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, sgd, fisher="type2", damping=0.1)
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            output = model(torch.randn(2, 1, 256, 256))
        kfac.fisher_backward(output, dim=1)
        output.float().square().mean().backward()
        kfac.step()
        results.append(factors_of(kfac))
    for key, want in results[0].items():
        assert close(results[1][key], want, TOLERANCE[torch.float16]), key
