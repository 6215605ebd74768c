"""A and G of a call against unfold in float64: fast paths, layouts, paddings, conventions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from kfac_bench.core.factors import autocorrelation_moment_3x3, gram, patch_moment, with_bias
from kfac_bench.core.layers import Conv2dLayer, LinearLayer
from tests import oracle

torch.set_num_threads(1)

LAYOUTS = ("contiguous", "channels_last", "transposed", "sliced", "expanded")


def for_all(*strategies, **named):
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return lambda test: slow(given(*strategies, **named)(test))


def image(n, c, h, w, layout="contiguous", seed=0, dtype=torch.float32):
    """Random values with a mean, so that border terms and bias sums matter."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype) + 0.5

    if layout == "channels_last":
        return randn(n, c, h, w).to(memory_format=torch.channels_last)
    if layout == "transposed":
        return randn(n, c, w, h).transpose(2, 3)
    if layout == "sliced":
        return randn(n + 1, c + 2, h + 1, 2 * w)[1:, 1:-1, :h, ::2]
    if layout == "expanded":
        return randn(1, c, h, 1).expand(n, c, h, w)
    return randn(n, c, h, w)


def unfolded(x, kernel, stride=1, dilation=1, padding=0, *, bias=False):
    """sum a a^T over samples and positions, [c kh kw (+ 1)] square, in float64."""
    rows = F.unfold(x.double(), kernel, dilation, padding, stride).mT.flatten(0, 1)
    if bias:
        rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1)
    return rows.T @ rows


def close(got, want):
    assert got.shape == want.shape
    tolerance = 1e-10 if got.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        got.double(), want, rtol=tolerance, atol=tolerance * want.abs().max()
    )


SIZES = {
    "n": st.integers(1, 4),
    "c": st.integers(1, 5),
    "layout": st.sampled_from(LAYOUTS),
    "bias": st.booleans(),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "seed": st.integers(0, 99),
}


@for_all(h=st.integers(2, 7), w=st.integers(2, 7), **SIZES)
def test_autocorrelation_is_exact(n, c, h, w, layout, bias, dtype, seed):
    x = image(n, c, h, w, layout, seed, dtype)
    before = x.clone()
    got = autocorrelation_moment_3x3(x, bias=bias)
    assert got.dtype == dtype
    close(got, unfolded(x, 3, padding=1, bias=bias))
    assert torch.equal(x, before)


PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@for_all(
    kernel=PAIRS,
    stride=PAIRS,
    dilation=PAIRS,
    more=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    **SIZES,
)
def test_patch_moment_is_exact(n, c, kernel, stride, dilation, more, layout, bias, dtype, seed):
    h, w = (d * (k - 1) + 1 + m for k, d, m in zip(kernel, dilation, more, strict=True))
    x = image(n, c, h, w, layout, seed, dtype)
    before = x.clone()
    got = patch_moment(x, kernel, stride, dilation, bias=bias)
    assert got.dtype == dtype
    close(got, unfolded(x, kernel, stride, dilation, bias=bias))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_inputs_are_summed_in_float32(dtype, layout):
    x = image(3, 2, 5, 4, layout, dtype=dtype)
    for got in (
        autocorrelation_moment_3x3(x, bias=True),
        patch_moment(F.pad(x, (1, 1, 1, 1)), (3, 3), (1, 1), (1, 1), bias=True),
    ):
        assert got.dtype == torch.float32
        close(got, unfolded(x, 3, padding=1, bias=True))
    assert gram(torch.full((2, 1), 256.0, dtype=torch.float16)).item() == 2 * 65536.0


@pytest.mark.parametrize("rows", [1, 5])
def test_with_bias_is_a_column_of_ones(rows):
    x = torch.randn(rows, 3, dtype=torch.float64)
    ones = torch.cat([x, torch.ones(rows, 1, dtype=x.dtype)], 1)
    close(with_bias(gram(x), x.sum(0), rows), ones.T @ ones)


# Layers: what their modules compute is what their factors are made of


def check_layer(layer, x, kinds=("A", "G")):
    """Raw moments times the mean's weights against the oracle's factors of the same call."""
    recorder = oracle.Recorder([layer.module])
    generator = torch.Generator().manual_seed(7)
    y = layer.module(x)
    weights = torch.randn(y.shape, generator=generator)
    (y * weights).sum().backward()
    ((_, g),) = recorder.calls[layer.module]
    moments = layer.moments(x.detach(), g)
    _, _, n, s = oracle.per_call_rows(layer.module, x.detach(), g)
    assert (moments.samples, moments.rows) == (n, n * s)
    a_want, g_want = oracle.factors(layer.module, x.detach(), g)
    assert layer.spec.a_dim == len(a_want)
    assert layer.spec.g_dim == len(g_want)
    close(moments.a / (n * s), a_want)
    close(moments.g * n, g_want)
    for moment in (moments.a, moments.g):
        assert moment.is_contiguous()
        torch.testing.assert_close(moment, moment.T)


CONVOLUTIONS = {
    "3x3 same as the fast path": {"kernel_size": 3, "padding": 1},
    "3x3 padding same": {"kernel_size": 3, "padding": "same"},
    "3x3 no padding": {"kernel_size": 3},
    "3x3 padding 2": {"kernel_size": 3, "padding": 2},
    "3x3 padding of one side": {"kernel_size": 3, "padding": (1, 0)},
    "3x3 padding of the other": {"kernel_size": 3, "padding": (0, 1)},
    "3x3 stride 2": {"kernel_size": 3, "padding": 1, "stride": 2},
    "3x3 stride of one side": {"kernel_size": 3, "padding": 1, "stride": (1, 2)},
    "3x3 dilation 2": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "3x3 dilation 2, padding 1": {"kernel_size": 3, "padding": 1, "dilation": 2},
    "3x3 dilation of one side": {"kernel_size": 3, "padding": 1, "dilation": (2, 1)},
    "1x1": {"kernel_size": 1},
    "1x1 stride 2": {"kernel_size": 1, "stride": 2},
    "1x1 padding 1": {"kernel_size": 1, "padding": 1},
    "2x2 padding same is uneven": {"kernel_size": 2, "padding": "same"},
    "4x2 padding same": {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 2)},
    "3x1": {"kernel_size": (3, 1), "padding": (1, 0)},
    "1x3": {"kernel_size": (1, 3), "padding": (0, 1)},
    "5x5": {"kernel_size": 5, "padding": 2},
    "5x5 stride 3": {"kernel_size": 5, "padding": 2, "stride": 3},
    "padding valid": {"kernel_size": 3, "padding": "valid"},
    "all uneven": {"kernel_size": (2, 3), "padding": (2, 1), "stride": (3, 2), "dilation": (2, 1)},
    "7x7 stride 2": {"kernel_size": 7, "padding": 3, "stride": 2},
}
MODES = ("zeros", "reflect", "replicate", "circular")


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, layout):
    torch.manual_seed(0)
    for bias in (True, False):
        conv = nn.Conv2d(2, 3, bias=bias, **CONVOLUTIONS[name])
        check_layer(Conv2dLayer("conv", conv), image(3, 2, 7, 6, layout))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": "same"},
        {"kernel_size": (3, 4), "padding": "same", "dilation": (2, 1)},
        {"kernel_size": 3, "padding": (2, 1), "stride": 2},
        {"kernel_size": 1, "padding": 1},
    ],
    ids=str,
)
def test_padding_modes(mode, options):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, padding_mode=mode, **options)
    for layout in ("contiguous", "channels_last", "sliced"):
        check_layer(Conv2dLayer("conv", conv), image(3, 2, 7, 6, layout))


def test_padding_modes_differ_and_so_do_their_factors():
    x, moments = image(3, 2, 5, 5), []
    for mode in MODES:
        layer = Conv2dLayer("conv", nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode))
        moments.append(layer.moments(x, torch.ones(3, 3, 5, 5)).a)
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(moments[i], moments[j], rtol=0.01)


@pytest.mark.parametrize(("h", "w"), [(1, 1), (1, 5), (5, 1), (2, 2), (2, 9), (9, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_of_one_or_two_rows(h, w, layout):
    """H or W of 1 has no fast path: its two edges would be one."""
    torch.manual_seed(0)
    check_layer(Conv2dLayer("conv", nn.Conv2d(2, 3, 3, padding=1)), image(3, 2, h, w, layout))


def test_channels_last_weights_keep_the_columns_of_the_gradient():
    """The factor's column order is that of weight.flatten(1), whatever the memory format."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
    layer = Conv2dLayer("conv", conv)
    x = image(2, 3, 4, 5, "channels_last")
    check_layer(layer, x)
    conv(x).square().mean().backward()
    grad = layer.get_grad()
    assert torch.equal(grad[:, :-1], conv.weight.grad.reshape(4, 27))
    assert torch.equal(grad[:, -1], conv.bias.grad)
    new = torch.arange(4.0 * 28).view(4, 28)
    layer.set_grad(new)
    assert torch.equal(conv.weight.grad.reshape(4, 27), new[:, :-1])
    assert torch.equal(layer.get_grad(), new)


def test_a_single_image_is_a_batch_of_one():
    torch.manual_seed(0)
    for options in ({"padding": 1}, {"stride": 2}):
        layer = Conv2dLayer("conv", nn.Conv2d(2, 3, 3, **options))
        x = image(1, 2, 5, 6)
        g = torch.randn_like(layer.module(x))
        batched, single = layer.moments(x, g), layer.moments(x[0], g[0])
        assert torch.equal(batched.a, single.a)
        assert torch.equal(batched.g, single.g)
        assert (single.samples, single.rows) == (batched.samples, batched.rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 5), (6, 2, 3), (1, 4)])
def test_linear_with_dimensions_between(shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(4, 3, bias=bias)
    check_layer(LinearLayer("fc", linear), torch.randn(*shape, 4) + 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[::2, :, :],
        lambda x: x[:, ::2],
        lambda x: x[:, :1].expand(-1, 3, -1),
        lambda x: torch.stack([x, x + 1], -1)[..., 1],  # strided features
        lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    ],
)
def test_linear_on_a_non_contiguous_input(make):
    torch.manual_seed(0)
    x = make(torch.randn(6, 5, 4))
    assert not x.is_contiguous()
    check_layer(LinearLayer("fc", nn.Linear(4, 3)), x)


def test_linear_reads_a_non_contiguous_gradient():
    layer = LinearLayer("fc", nn.Linear(4, 3))
    x, g = torch.randn(5, 6, 4), torch.randn(6, 5, 3).transpose(0, 1)
    got = layer.moments(x, g)
    close(got.g, g.reshape(-1, 3).double().T @ g.reshape(-1, 3).double())


def test_one_vector_is_one_sample():
    layer = LinearLayer("fc", nn.Linear(4, 3))
    x, g = torch.randn(4), torch.randn(3)
    got, batched = layer.moments(x, g), layer.moments(x[None], g[None])
    assert (got.samples, got.rows) == (1, 1)
    assert torch.equal(got.a, batched.a)
    assert torch.equal(got.g, batched.g)
