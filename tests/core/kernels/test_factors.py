"""Raw moments against F.unfold and loops in float64: fast paths, layouts, paddings, groups."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.kernels import gram as gram_module
from kfac_bench.core.kernels import patches as patches_module
from kfac_bench.core.kernels.gram import CONVENTIONS, at_least_float32, gram, sum_of_grams
from kfac_bench.core.kernels.patches import (
    autocorrelation_moment_3x3,
    input_moment,
    pad_input,
    patch_moment,
    patch_rows,
    patch_sum,
)
from tests.support.properties import for_all

torch.set_num_threads(1)

LAYOUTS = ("contiguous", "channels_last", "transposed", "sliced", "expanded")
MODES = ("zeros", "reflect", "replicate", "circular")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def image(n, c, *size, layout="contiguous", seed=0, dtype=torch.float32):
    """Random values with a mean, so that border terms and bias sums matter."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)

    if layout == "channels_last":
        return randn(n, *size, c).movedim(-1, 1)
    if layout == "transposed":
        return randn(n, c, *reversed(size)).permute(0, 1, *reversed(range(2, 2 + len(size))))
    if layout == "sliced":
        return randn(n + 1, c + 2, *size[:-1], 2 * size[-1])[1:, 1:-1, ..., ::2]
    if layout == "expanded":
        return randn(1, c, *size[:-1], 1).expand(n, c, *size)
    return randn(n, c, *size)


def patches(x, kernel, stride, dilation, groups=1):
    """[N, groups, positions, channels of a group * kernel] in float64, one position at a time."""
    n, c, *size = x.shape
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    starts = [range(0, s - r, t) for s, r, t in zip(size, reach, stride, strict=True)]
    out = []
    for start in itertools.product(*starts):
        window = [slice(a, a + r + 1, d) for a, r, d in zip(start, reach, dilation, strict=True)]
        out.append(x.double()[:, :, *window].reshape(n, groups, c // groups * math.prod(kernel)))
    return torch.stack(out, dim=2)


def moment(rows, *, bias=False):
    """Of [groups, R, d], in float64."""
    if bias:
        rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
    return torch.stack([r.T @ r for r in rows.double()])


def patch_moments(*args, bias=False):
    return moment(patches(*args).transpose(0, 1).flatten(1, 2), bias=bias)


def close(got, want, terms=None):
    """Compare up to rounding; ``terms`` are the sizes of what a sum adds, which may cancel."""
    assert got.shape == want.shape
    tolerance = 1e-10 if got.dtype == torch.float64 else 1e-5
    size = (want if terms is None else terms).abs().max()
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * size)


def symmetric(got):
    assert got.is_contiguous()
    assert torch.equal(got, got.mT)


def widened(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


# The oracle itself


@for_all(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.integers(1, 3),
)
def test_the_reference_loop_equals_unfold(kernel, stride, dilation, groups):
    x = image(2, 2 * groups, 7, 6, dtype=torch.float64)
    want = F.unfold(x, kernel, dilation, 0, stride).unflatten(1, (groups, -1)).mT
    assert torch.equal(patches(x, kernel, stride, dilation, groups), want)


# Products


@for_all(
    groups=st.integers(1, 3),
    rows=st.integers(1, 9),
    d=st.one_of(st.integers(1, 9), st.integers(60, 70), st.sampled_from([127, 129, 257, 300])),
    transposed=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_gram(groups, rows, d, transposed, bias, dtype):
    """Sizes around those of the blocks of its triangle."""
    torch.manual_seed(d)
    x = torch.randn(groups, d, rows).mT if transposed else torch.randn(groups, rows, d)
    x = x.to(dtype)
    before = x.clone()
    got = gram(x, bias=bias)
    assert got.dtype == widened(dtype)
    symmetric(got)
    close(got, moment(x, bias=bias))
    assert torch.equal(x, before)


def test_gram_of_groups_that_lie_beside_each_other():
    """As grouped layers have them: [R, groups, d] seen as [groups, R, d]."""
    for d in (5, 200):
        x = torch.randn(7, 3, d, dtype=torch.float64).transpose(0, 1)
        close(gram(x, bias=True), moment(x, bias=True))


def test_parts_add_up():
    """Also where only one triangle is computed, block by block."""
    for d in (5, 200):
        x = torch.randn(2, 7, d, dtype=torch.float64)
        close(sum_of_grams([x[:, :3], x[:, 3:]], bias=True), moment(x, bias=True))


def test_nothing_is_read_before_it_is_written(monkeypatch):
    """New memory may hold NaN, and 0 NaN is NaN."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(float("nan"))
    )
    x = image(2, 3, 5, 4)
    for d in (3, 200):
        assert gram(torch.randn(2, 3, d), bias=True).isfinite().all()
    assert patch_moment(x, (3, 3), (1, 1), (1, 1), bias=True).isfinite().all()
    assert autocorrelation_moment_3x3(x, bias=True).isfinite().all()


def test_half_precision_is_summed_in_float32():
    assert gram(torch.full((1, 2, 1), 256.0, dtype=torch.float16)).item() == 2 * 65536.0
    x = torch.full((1, 1, 512), 256.0, dtype=torch.bfloat16)
    assert patch_sum(x, (1,), (1,), (1,)).item() == 131072.0
    assert patch_sum(x + 1, (2,), (1,), (1,)).dtype == torch.float32
    assert at_least_float32(x).dtype == torch.float32
    assert at_least_float32(x.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_as_on_a_gpu(monkeypatch, dtype):
    """A CPU has no product of half precision with a sum in float32, so it gets one here."""
    for module in (gram_module, patches_module):
        monkeypatch.setattr(module, "multiplicand", lambda x: x)
    monkeypatch.setattr(gram_module, "product", lambda x, y: x.float() @ y.float())
    monkeypatch.setattr(patches_module, "PATCH_NUMEL", 500)
    for d in (5, 200):
        x = torch.randn(2, 7, d).to(dtype)
        for bias in (False, True):
            got = sum_of_grams([x[:, :3], x[:, 3:]], bias=bias)
            assert got.dtype == torch.float32
            close(got, moment(x.double(), bias=bias))
    x = image(6, 4, 5, 4, dtype=dtype)
    got = patch_moment(x, (3, 2), (1, 1), (1, 1), 2, bias=True)
    close(got, patch_moments(x.double(), (3, 2), (1, 1), (1, 1), 2, bias=True))
    rows = x.view(6, 2, 2, -1).permute(1, 0, 3, 2).flatten(1, 2)
    close(gram_module.channel_gram(x.view(6, 2, 2, -1)), moment(rows.double()))


# Patches


@st.composite
def convolutions(draw):
    """x, kernel, stride, dilation, groups of 1, 2 or 3 spatial dimensions, no padding."""
    dims = draw(st.integers(1, 3))

    def some(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel = (
        draw(st.just((1,) * dims) | st.just((3,) * dims)) if draw(st.booleans()) else some(1, 3)
    )
    stride, dilation = some(1, 3), some(1, 2)
    more = some(0, 4)
    size = [d * (k - 1) + 1 + m for k, d, m in zip(kernel, dilation, more, strict=True)]
    groups = draw(st.integers(1, 3))
    x = image(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)) * groups,
        *size,
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 99)),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    return x, kernel, stride, dilation, groups


@for_all(
    convolution=convolutions(), bias=st.booleans(), memory=st.sampled_from([1, 50, 500, 1 << 20])
)
def test_patch_moment(convolution, bias, memory):
    """However many patches are made at a time."""
    x, before = convolution[0], convolution[0].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches_module, "PATCH_NUMEL", memory)
        got = patch_moment(*convolution, bias=bias)
    assert got.dtype == widened(x.dtype)
    symmetric(got)
    close(got, patch_moments(*convolution, bias=bias))
    assert torch.equal(x, before)


@for_all(convolution=convolutions())
def test_patch_rows(convolution):
    got = patch_rows(*convolution)
    assert torch.equal(got.double(), patches(*convolution))


@for_all(convolution=convolutions())
def test_patch_sum(convolution):
    x, before = convolution[0], convolution[0].clone()
    got = patch_sum(*convolution)
    assert got.dtype == widened(x.dtype)
    rows = patches(*convolution)
    close(got, rows.sum(2), terms=rows.abs().sum(2))
    assert torch.equal(x, before)


def test_patch_sum_of_a_large_image_is_accurate():
    x = torch.randn(1, 2, 300, 200) + 100
    want = F.unfold(x.double(), (3, 2), (1, 2), 0, (2, 1)).sum(2).unsqueeze(1)
    close(patch_sum(x, (3, 2), (2, 1), (1, 2)), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(40, 2, 9, 8), (1, 2, 40, 8), (2, 3, 90), (1, 1, 30, 3, 3)])
def test_the_memory_of_patches_is_bounded(monkeypatch, shape, layout):
    numbers = []
    make = patches_module._patches
    monkeypatch.setattr(
        patches_module, "_patches", lambda *a: numbers.append(make(*a).numel()) or make(*a)
    )
    monkeypatch.setattr(patches_module, "PATCH_NUMEL", 500)
    x, ones = image(*shape, layout=layout), (1,) * (len(shape) - 2)
    kernel = tuple(2 for _ in ones)
    close(patch_moment(x, kernel, ones, ones), patch_moments(x, kernel, ones, ones))
    assert len(numbers) > 1
    assert max(numbers) <= 500
    assert sum(numbers) == patches(x, kernel, ones, ones).numel()


# 3x3 without patches


@for_all(
    size=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7), st.integers(1, 7)),
    layout=st.sampled_from(LAYOUTS),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES[:2]),
    seed=st.integers(0, 99),
)
def test_autocorrelation(size, layout, bias, dtype, seed):
    x = image(*size, layout=layout, seed=seed, dtype=dtype)
    before = x.clone()
    got = autocorrelation_moment_3x3(x, bias=bias)
    assert got.dtype == dtype
    symmetric(got)
    close(got, patch_moments(F.pad(x, (1, 1, 1, 1)), (3, 3), (1, 1), (1, 1), bias=bias))
    assert torch.equal(x, before)


# What a convolution sees: its own padding, the fastest way


CONVOLUTIONS = {
    "3x3 without patches": {"kernel_size": 3, "padding": 1},
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
    "3x3 of two groups": {"kernel_size": 3, "padding": 1, "groups": 2},
    "3x3 depthwise": {"kernel_size": 3, "padding": 1, "groups": 4},
    "1x1": {"kernel_size": 1},
    "1x1 stride 2": {"kernel_size": 1, "stride": 2},
    "1x1 padding 1": {"kernel_size": 1, "padding": 1},
    "1x1 of two groups": {"kernel_size": 1, "groups": 2},
    "2x2 padding same is uneven": {"kernel_size": 2, "padding": "same"},
    "4x2 padding same": {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 2)},
    "3x1": {"kernel_size": (3, 1), "padding": (1, 0)},
    "1x3": {"kernel_size": (1, 3), "padding": (0, 1)},
    "5x5": {"kernel_size": 5, "padding": 2},
    "5x5 stride 3": {"kernel_size": 5, "padding": 2, "stride": 3},
    "padding valid": {"kernel_size": 3, "padding": "valid"},
    "all uneven": {"kernel_size": (2, 3), "padding": (2, 1), "stride": (3, 2), "dilation": (2, 1)},
    "7x7 stride 2": {"kernel_size": 7, "padding": 3, "stride": 2},
    "dilation over a small image": {"kernel_size": 2, "padding": 4, "dilation": 8},
}


def weight_gradients(conv, x):
    """Of every output alone, by autograd: the patches, whatever the convolution takes for one."""
    conv, x = conv.double(), x.double()
    per_group = conv.out_channels // conv.groups
    y = conv(x)[:, ::per_group]  # one output channel of each group sees all that the group sees
    out = []
    for n, position in itertools.product(
        range(len(x)), itertools.product(*map(range, y.shape[2:]))
    ):
        params = [conv.weight] if conv.bias is None else [conv.weight, conv.bias]
        grads = torch.autograd.grad(y[n, :, *position].sum(), params, retain_graph=True)
        out.append(torch.cat([g[::per_group].flatten(1) for g in grads[:1]], 1))
        if conv.bias is not None:
            out[-1] = torch.cat([out[-1], grads[1][::per_group, None]], 1)
    return torch.stack(out, 1)  # [groups, rows, a]


@pytest.fixture
def autocorrelation(monkeypatch):
    """For small inputs, too."""
    monkeypatch.setattr(patches_module, "AUTOCORRELATION_NUMEL", 0)


def check_input_moment(conv, x):
    got = input_moment(
        x,
        conv.kernel_size,
        conv.stride,
        conv._reversed_padding_repeated_twice,
        conv.padding_mode,
        conv.dilation,
        conv.groups,
        bias=conv.bias is not None,
    )
    close(got, moment(weight_gradients(conv, x)))
    assert got.is_contiguous()
    return got


@pytest.mark.usefixtures("autocorrelation")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_input_moment_is_that_of_the_convolution(name, bias):
    for layout in LAYOUTS:
        conv = nn.Conv2d(4, 4, bias=bias, **CONVOLUTIONS[name])
        check_input_moment(conv, image(2, 4, 6, 5, layout=layout))


@pytest.mark.usefixtures("autocorrelation")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_kernel_offsets_that_meet_only_padding_have_exact_zeros(name, bias):
    """Zeros that rounding has changed make a decomposition slow, and often fail."""
    for size in ((1, 1), (2, 2), (1, 4), (3, 1), (2, 3)):
        conv, x = nn.Conv2d(4, 4, bias=bias, **CONVOLUTIONS[name]), image(3, 4, *size)
        sizes = F.pad(x, conv._reversed_padding_repeated_twice).shape[2:]
        reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        if all(n > r for n, r in zip(sizes, reach, strict=True)):  # the kernel fits
            got = check_input_moment(conv, x)
            assert torch.equal(got.any(-1), weight_gradients(conv, x).any(1))


@pytest.mark.usefixtures("autocorrelation")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": "same", "dilation": 2},
        {"kernel_size": 2, "padding": 2, "stride": 2, "groups": 2},
        {"kernel_size": 1, "padding": 1},
    ],
    ids=str,
)
def test_padding_modes(mode, dims, options):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 2, padding_mode=mode, **options)
    for layout in ("contiguous", "channels_last", "sliced"):
        check_input_moment(conv, image(2, 2, *(5, 4, 3)[:dims], layout=layout))


@pytest.mark.usefixtures("autocorrelation")
def test_padding_modes_differ_and_so_do_their_moments():
    x = image(3, 2, 5, 5)
    ones = ((3, 3), (1, 1), (1, 1, 1, 1))
    moments = [input_moment(x, *ones, mode, (1, 1)) for mode in MODES]
    for a, b in itertools.combinations(moments, 2):
        assert not torch.allclose(a, b, rtol=0.01)


def test_when_autocorrelation_is_chosen(monkeypatch):
    """Its arithmetic is that of one kind of convolution; where it pays was measured on CPUs."""
    calls = []
    monkeypatch.setattr(
        patches_module,
        "autocorrelation_moment_3x3",
        lambda x, bias: calls.append(x) or torch.zeros(1),
    )

    def chosen(x, kernel=(3, 3), stride=(1, 1), padding=(1,) * 4, mode="zeros", **options):
        calls.clear()
        input_moment(x, kernel, stride, padding, mode, options.pop("dilation", (1, 1)), **options)
        return bool(calls)

    x = torch.ones(16, 2, 32, 32)
    assert chosen(x)
    assert not chosen(x[:2])
    assert not chosen(x.to("meta"))
    assert not chosen(x, groups=2)
    assert not chosen(x, mode="circular")
    assert not chosen(x, stride=(1, 2))
    assert not chosen(x, dilation=(2, 1))
    assert not chosen(x, padding=(1, 1, 0, 0))
    assert not chosen(x, padding=(0, 2, 0, 2))
    assert not chosen(x, kernel=(3, 1))
    assert not chosen(x[..., 0], (3,), (1,), (1, 1), dilation=(1,))


@pytest.mark.usefixtures("autocorrelation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_inputs(dtype, layout):
    x = image(3, 2, 5, 4, layout=layout, dtype=dtype)
    for mode in MODES:
        got = input_moment(x, (3, 3), (1, 1), (1, 1, 1, 1), mode, (1, 1), bias=True)
        padded = pad_input(x.double(), (1, 1, 1, 1), mode)
        assert got.dtype == torch.float32
        close(got, patch_moments(padded, (3, 3), (1, 1), (1, 1), bias=True))


def test_without_padding_nothing_is_copied():
    x = image(2, 3, 4, 4)
    assert pad_input(x, [0, 0, 0, 0], "reflect") is x


# Conventions


def test_conventions():
    """1 / (N s) and N: the paper's; the others divide by what their sources divide by."""
    scales = {name: scale(4, 9, True) for name, scale in CONVENTIONS.items()}
    assert scales["kfc"] == (1 / 36, 4)
    assert scales["sc20"] == (1 / (4 * 81), 36)
    assert scales["kaisa"] == (1 / (4 * 729), 1 / (4 * 729))
    linear = {name: scale(4, 9, False) for name, scale in CONVENTIONS.items()}
    assert linear == {"kfc": (1 / 36, 4), "sc20": (1 / 36, 36), "kaisa": (1 / 36, 1 / 36)}


def test_ranks_that_share_samples_out_scale_for_all_samples_of_the_loss():
    """The loss is a mean over 8 samples. This rank has 2 of them, with 3 positions each."""
    sums = Collected(torch.ones(1), torch.ones(1), 2, 6, loss_samples=8)
    assert sums.scales(CONVENTIONS["kfc"], is_conv=False) == pytest.approx((1 / 6, 32))
