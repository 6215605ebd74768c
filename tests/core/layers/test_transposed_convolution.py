"""Transposed convolutions against torch's own with one-hot kernels, and against convolutions."""

import copy

import pytest
import torch
from torch import nn

from kfac_bench.core.layers.convolution import TransposedConvLayer
from tests.support import oracle
from tests.support.layer_checks import (
    BOTH,
    assert_close,
    assert_same,
    check,
    factors_of,
    kfac_of,
    loss_of,
)

pytestmark = pytest.mark.usefixtures("double")

CASES = {
    "1d": (nn.ConvTranspose1d(3, 4, 3), (5, 3, 6)),
    "1d stride": (nn.ConvTranspose1d(3, 4, 5, stride=2, padding=1, bias=False), (5, 3, 4)),
    "1d stride and dilation": (nn.ConvTranspose1d(3, 2, 4, stride=3, dilation=2), (5, 3, 4)),
    "1d common divisor": (nn.ConvTranspose1d(2, 3, 3, stride=6, dilation=4, padding=3), (4, 2, 3)),
    "1d output padding": (
        nn.ConvTranspose1d(2, 3, 2, stride=3, padding=1, output_padding=2),
        (4, 2, 3),
    ),
    "1d output padding beyond the stride": (
        nn.ConvTranspose1d(2, 3, 2, stride=2, dilation=4, output_padding=3),
        (4, 2, 3),
    ),
    "1d positions without pixels": (
        nn.ConvTranspose1d(2, 3, 4, stride=4, padding=1, output_padding=2),
        (4, 2, 1),
    ),
    "1d no pixel at all": (
        nn.ConvTranspose1d(2, 3, 1, stride=5, padding=2, output_padding=4),
        (4, 2, 1),
    ),
    "2d": (
        nn.ConvTranspose2d(3, 4, (3, 2), stride=(1, 2), dilation=(2, 1), padding=(1, 0)),
        (5, 3, 4, 3),
    ),
    "2d upsampling": (nn.ConvTranspose2d(3, 4, 2, stride=2), (5, 3, 4, 3)),
    "2d DCGAN": (nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1, bias=False), (5, 3, 4, 3)),
    "2d output padding": (
        nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=(1, 0)),
        (5, 3, 4, 3),
    ),
    "2d like 3x3": (nn.ConvTranspose2d(3, 4, 3, padding=1), (5, 3, 6, 5)),
    "2d 1x1, stride": (nn.ConvTranspose2d(3, 4, 1, stride=2), (5, 3, 4, 3)),
    "2d groups": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (5, 4, 3, 4)),
    "2d depthwise": (nn.ConvTranspose2d(3, 6, 3, stride=2, groups=3, bias=False), (5, 3, 3, 4)),
    "2d unbatched": (nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), (3, 4, 5)),
    "3d": (
        nn.ConvTranspose3d(2, 3, (2, 3, 1), stride=(1, 2, 2), padding=(1, 0, 0)),
        (4, 2, 3, 2, 2),
    ),
    "3d groups": (nn.ConvTranspose3d(4, 4, 2, stride=2, dilation=3, groups=2), (4, 4, 2, 2, 1)),
}


def case(name):
    """Return a module in float64, an input, and the number of samples."""
    module, shape = CASES[name]
    module = copy.deepcopy(module).double()
    return module, torch.randn(shape), shape[0] if len(shape) == module.weight.ndim else 1


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_transposed_convolution(name, weight_sharing):
    module, x, samples = case(name)
    check(module, lambda: loss_of(module(x), samples), weight_sharing=weight_sharing)


@pytest.mark.parametrize("name", CASES)
def test_rows_make_the_gradient_of_each_sample(name):
    """The rows of a and g against autograd, sample by sample: g a^T summed over positions."""
    module, x, _ = case(name)
    layer = TransposedConvLayer("", module, 8192)
    x = x if x.ndim == module.weight.ndim else x[None]
    output = module(x)
    (g,) = torch.autograd.grad(loss_of(output, 1), output)
    a_rows, g_rows = layer.rows(x, g)
    got = torch.einsum("knsi,knsj->nkij", g_rows, a_rows)
    for one, mine in zip(x, got, strict=True):
        module.zero_grad()
        loss_of(module(one[None]), 1).backward()
        assert_close(mine, oracle.layer_gradient(module))
        assert_close(mine, layer.get_grad())


def test_the_gradient_survives_a_round_trip():
    for name in CASES:
        module, _, _ = case(name)
        layer = TransposedConvLayer("", module, 8192)
        weight, bias = torch.randn_like(module.weight), None
        if module.bias is not None:
            bias = torch.randn_like(module.bias)
        assert_same(
            dict(enumerate(layer.from_matrix(layer.to_matrix(weight, bias)))),
            dict(enumerate((weight, bias))),
            rtol=0,
        )


@pytest.mark.parametrize("name", [n for n in CASES if n[0] == "2" and "unbatched" not in n])
def test_channels_last(name):
    module, x, samples = case(name)
    module = module.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    check(module, lambda: loss_of(module(x), samples))


def test_float32():
    for name in CASES:
        module, x, samples = case(name)
        module, x = module.float(), x.float()
        recorder, kfac = oracle.Calls([module]), kfac_of(module)
        loss_of(module(x), samples).backward()
        kfac.step()
        rows = [oracle.layer_rows(module.double(), *call) for call in recorder.calls[module]]
        a, g = oracle.layer_factors(rows)
        got = factors_of(kfac)[""]
        assert_close(got["A"].double(), a, rtol=1e-5)
        assert_close(got["G"].double(), g, rtol=1e-5)


@BOTH
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("name", CASES)
def test_diagonal_factors(name, method, weight_sharing):
    module, x, samples = case(name)
    kfac = check(
        module,
        lambda: loss_of(module(x), samples),
        max_dim=1,
        method=method,
        weight_sharing=weight_sharing,
    )
    assert all(factor.ndim == 2 for factor in factors_of(kfac)[""].values())


@BOTH
def test_each_call_may_choose_its_output_size(weight_sharing):
    """The sizes 7 and 8 belong to one input size; further calls are further positions."""
    layer, x = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), torch.randn(5, 3, 4, 4)

    def forward():
        small, large = layer(x), layer(output_size=[7, 8], input=x.tanh())
        assert (small.shape[2:], large.shape[2:]) == ((7, 7), (7, 8))
        return loss_of(small, 5) + loss_of(large, 5)

    check(nn.Sequential(layer), forward, weight_sharing=weight_sharing)


def as_convolution(transposed):
    """Return the convolution that equals a transposed convolution of stride 1."""
    padding = [
        d * (k - 1) - p
        for d, k, p in zip(
            transposed.dilation, transposed.kernel_size, transposed.padding, strict=True
        )
    ]
    layer = nn.Conv2d(
        transposed.in_channels,
        transposed.out_channels,
        transposed.kernel_size,
        padding=padding,
        dilation=transposed.dilation,
        groups=transposed.groups,
    )
    layer.weight.data = swapped(transposed.weight.data, transposed.groups)
    layer.bias.data = transposed.bias.data.clone()
    return layer


def swapped(weight, groups):
    """Mirror the kernels, and turn [inputs, outputs / groups] into [outputs, inputs / groups]."""
    weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flip(2, 3).clone()


@BOTH
@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize("convention", ["kfc", "sc20", "kaisa"])
def test_stride_1_equals_the_convolution(convention, method, weight_sharing):
    one = nn.ConvTranspose2d(4, 6, (3, 2), padding=1, dilation=(1, 2), groups=2)
    other, x = as_convolution(one), torch.randn(20, 4, 6, 5)
    assert_close(one(x).detach(), other(x).detach())
    # Fewer samples than columns of A would leave EKFAC's basis undetermined.
    options = {
        "factor_convention": convention,
        "method": method,
        "weight_sharing": weight_sharing,
        "update_freq": 10,
    }
    kfacs = [kfac_of(module, **options) for module in (one, other)]
    for scale in (1, 2):  # EKFAC's second moments start in the step after the decomposition
        for module, kfac in zip((one, other), kfacs, strict=True):
            module.zero_grad()
            loss_of(module(scale * x), 20).backward()
            kfac.step()
    got, want = (factors_of(kfac)[""] for kfac in kfacs)
    # Columns are (channel, *tap), and the taps of a convolution are mirrored.
    taps = torch.arange(12).view(2, 3, 2).flip(1, 2).flatten()
    mirror = torch.cat([taps, torch.tensor([12])])
    assert_close(got["A"], want["A"][:, mirror[:, None], mirror])
    assert_close(got["G"], want["G"])
    assert_close(swapped(one.weight.grad, 2), other.weight.grad)
    assert_close(one.bias.grad, other.bias.grad)


def test_a_convolutional_decoder():
    model = nn.Sequential(
        nn.Linear(3, 8),
        nn.Unflatten(-1, (2, 2, 2)),
        nn.ReLU(),
        nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(3, 1, 2, stride=2),
    )
    x = torch.randn(6, 3)
    check(model, lambda: loss_of(model(x), 6))
