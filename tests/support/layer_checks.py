"""What the tests of layers share: one step of a model against the oracle, in float64."""

import weakref

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from kfac_bench.core import KFAC
from tests.support import oracle

BOTH = pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
DAMPING = 0.03
MADE = weakref.WeakSet()
PLAIN = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)


def kfac_of(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    defaults = {"method": "eigen", "damping": DAMPING, "trust_ratio": None, "grafting": False}
    defaults |= {"update_freq": 1, "factor_update_freq": 1}
    kfac = KFAC(model, optimizer, **(defaults | {"skip": []} | options))
    MADE.add(kfac)
    return kfac


def skip_if_torch_cannot(layer, x, dtype):
    """Skip where torch itself cannot, such as LSTM in half precision on a CPU without AVX-512."""
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype):
            layer(x)
    except RuntimeError as error:
        pytest.skip(f"torch: {error}")


def loss_of(output, samples):
    """A mean over samples of something not linear."""
    return (output.square() + output.tanh()).sum() / samples


def factors_of(kfac):
    layers = kfac.state_dict()["layers"]
    return {n: {f: layers[n][f]["factor"].clone() for f in "AG"} for n in layers}


def grads_of(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_close(got, want, rtol=1e-7):
    """``rtol`` of the largest element; what is 0 but for rounding (K's bias) is 0."""
    torch.testing.assert_close(got, want, rtol=0, atol=rtol * max(float(want.abs().max()), 1e-6))


def assert_same(got, want, rtol=1e-7):
    """Nested dicts of tensors."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, dict):
            assert_same(got[key], value, rtol)
        elif value is None:
            assert got[key] is None
        else:
            assert_close(got[key], value, rtol)


def check(model, forward, *, kinds=PLAIN, method="eigen", weight_sharing="expand", **options):
    """Factors and preconditioned gradients of all layers after one step equal the oracle's."""
    names = {n: m for n, m in model.named_modules() if isinstance(m, kinds)}
    recorder = oracle.Calls(names.values())
    kfac = kfac_of(model, method=method, weight_sharing=weight_sharing, **options)
    forward().backward()
    raw = {m: oracle.layer_gradient(m) for m in names.values()}
    kfac.step()
    factors = factors_of(kfac)
    assert set(names) == set(factors)
    for name, module in names.items():
        rows = [oracle.layer_rows(module, x, g) for x, g in recorder.calls[module]]
        wants = oracle.layer_factors(rows, weight_sharing == "reduce")
        used = []
        for key, want in zip("AG", wants, strict=True):
            got = factors[name][key]
            diagonal = torch.diagonal(want, dim1=1, dim2=2)
            assert_close(got, diagonal if got.ndim == 2 else want)
            used.append(torch.diag_embed(diagonal) if got.ndim == 2 else want)
        want = [
            oracle.precondition(*parts, DAMPING, method)
            for parts in zip(raw[module], *used, strict=True)
        ]
        assert_close(oracle.layer_gradient(module), torch.stack(want))
        assert not torch.allclose(oracle.layer_gradient(module), raw[module], rtol=0.1)
    return kfac


class Net(nn.Module):
    """Blocks of every kind, for one input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.extra = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x, extra=False):
        h = self.second(self.first(x).tanh())
        if extra:
            h = self.extra(h)
        return self.last(h.tanh())


def train(model, steps=3, kfac=None, run=None, **options):
    """Gradients after each step, and the factors at the end."""
    kfac = kfac or kfac_of(model, **options)
    optimizer, grads = torch.optim.SGD(model.parameters(), lr=0.05), {}
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        model.zero_grad()
        x = torch.randn(6, 5, 4, generator=generator)
        loss_of((run or model)(x), 6).backward()
        kfac.step()
        grads[str(step)] = grads_of(model)
        optimizer.step()
    return {"grads": grads, "factors": factors_of(kfac)}
