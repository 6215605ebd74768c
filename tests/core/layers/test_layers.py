"""Linear, convolution, embedding and norm layers against rows written out in float64."""

import copy

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from tests.support import oracle
from tests.support.layer_checks import (
    BOTH,
    DAMPING,
    assert_close,
    check,
    factors_of,
    kfac_of,
    loss_of,
)

pytestmark = pytest.mark.usefixtures("double")


@BOTH
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (6, 5), (6, 3, 5), (6, 2, 3, 5)])
def test_linear(shape, bias, weight_sharing):
    layer, x = nn.Linear(5, 3, bias=bias), torch.randn(shape)
    samples = shape[0] if len(shape) > 1 else 1
    check(layer, lambda: loss_of(layer(x), samples), weight_sharing=weight_sharing)


@BOTH
def test_linear_on_inputs_that_are_not_contiguous(weight_sharing):
    layer, x = nn.Linear(5, 3), torch.randn(5, 4, 6).permute(2, 1, 0)
    assert not x.is_contiguous()

    def forward():
        return loss_of(layer(x).transpose(1, 2), 6)

    check(layer, forward, weight_sharing=weight_sharing)


CONVOLUTIONS = {
    "1d": (nn.Conv1d(3, 4, 3, stride=2, dilation=2, padding=2), (5, 3, 9)),
    "1d same, even kernel": (nn.Conv1d(3, 4, 4, padding="same", bias=False), (5, 3, 9)),
    "2d": (nn.Conv2d(3, 4, (3, 2), stride=(1, 2), dilation=(2, 1), padding=(1, 0)), (5, 3, 7, 6)),
    "2d 3x3": (nn.Conv2d(3, 4, 3, padding=1), (5, 3, 6, 5)),
    "2d 3x3, no bias": (nn.Conv2d(3, 4, 3, padding=1, bias=False), (5, 3, 6, 5)),
    "2d 3x3, one row": (nn.Conv2d(3, 4, 3, padding=1), (5, 3, 1, 5)),
    "2d same": (nn.Conv2d(3, 4, 3, padding="same", dilation=2), (5, 3, 6, 5)),
    "2d same, even kernel": (nn.Conv2d(3, 4, (4, 3), padding="same"), (5, 3, 6, 5)),
    "2d valid": (nn.Conv2d(3, 4, 3, padding="valid", stride=2), (5, 3, 6, 5)),
    "2d 1x1, stride": (nn.Conv2d(3, 4, 1, stride=2), (5, 3, 6, 5)),
    "2d 1x1, padded": (nn.Conv2d(3, 4, 1, padding=1), (5, 3, 4, 5)),
    "2d groups": (nn.Conv2d(4, 6, 3, padding=1, groups=2), (5, 4, 6, 5)),
    "2d groups 1x1": (nn.Conv2d(4, 6, 1, groups=2), (5, 4, 6, 5)),
    "2d depthwise": (nn.Conv2d(3, 6, 3, groups=3, padding=1, bias=False), (5, 3, 6, 5)),
    "2d unbatched": (nn.Conv2d(3, 4, 3, padding=1), (3, 6, 5)),
    "1d groups unbatched": (nn.Conv1d(4, 4, 3, groups=2), (4, 6)),
    "3d": (nn.Conv3d(2, 3, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 0)), (4, 2, 3, 5, 2)),
    "3d groups": (nn.Conv3d(4, 4, 2, dilation=(1, 2, 1), groups=2), (4, 4, 3, 5, 2)),
}
MODES = [
    (kind, mode, padding)
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for mode in ("zeros", "reflect", "replicate", "circular")
    for padding in (1, "same")
]


def check_convolution(module, x, weight_sharing="expand"):
    module = copy.deepcopy(module).double()
    samples = len(x) if x.ndim == module.weight.ndim else 1
    check(module, lambda: loss_of(module(x), samples), weight_sharing=weight_sharing)


even_kernels = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@BOTH
@even_kernels
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case, weight_sharing):
    module, shape = CONVOLUTIONS[case]
    check_convolution(module, torch.randn(shape), weight_sharing)


@even_kernels
@pytest.mark.parametrize("case", [c for c in CONVOLUTIONS if c[0] == "2" and "unb" not in c])
def test_channels_last(case):
    module, shape = CONVOLUTIONS[case]
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    check_convolution(module.to(memory_format=torch.channels_last), x)


@BOTH
@pytest.mark.parametrize(("kind", "mode", "padding"), MODES)
def test_padding_modes(kind, mode, padding, weight_sharing):
    dims = int(kind.__name__[4])
    module = kind(2, 3, 3, padding=padding, padding_mode=mode)
    check_convolution(module, torch.randn(4, 2, *range(4, 4 + dims)), weight_sharing)


@BOTH
@pytest.mark.parametrize("shape", [(), (6,), (6, 4), (6, 2, 3)])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding(shape, padding_idx, weight_sharing):
    layer = nn.Embedding(7, 3, padding_idx=padding_idx)
    tokens = torch.randint(7, shape)
    if tokens.ndim:
        tokens.view(-1)[0] = 2
    samples = len(tokens) if tokens.ndim else 1
    kfac = kfac_of(layer, weight_sharing=weight_sharing)
    recorder = oracle.Calls([layer])
    loss_of(layer(tokens), samples).backward()
    raw = oracle.layer_gradient(layer)
    kfac.step()
    rows = [oracle.layer_rows(layer, *call) for call in recorder.calls[layer]]
    a, g = oracle.layer_factors(rows, weight_sharing == "reduce")
    got = factors_of(kfac)[""]
    assert_close(got["G"], g)
    assert_close(got["A"][0], a[0].diagonal())  # all of A if each sample has one token
    want = oracle.precondition(raw[0], a[0].diagonal().diag(), g[0], DAMPING)
    assert_close(oracle.layer_gradient(layer)[0], want)
    if padding_idx is not None:
        assert not layer.weight.grad[padding_idx].any()


def test_embedding_with_gradients_that_have_no_rows_is_left_out():
    for options, reason in (
        ({"sparse": True}, "sparse gradients"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
    ):
        model = nn.Sequential(nn.Embedding(5, 3, **options), nn.Linear(3, 2))
        (skipped,) = kfac_of(model).report().skipped
        assert (skipped.name, skipped.reason) == ("0", reason)


# norms: blocks are exact, from gradients of each sample alone


def standardized(x, dims, eps, center=True):
    if center:
        x = x - x.mean(dims, keepdim=True)
    return x / (x.square().mean(dims, keepdim=True) + eps).sqrt()


def group_standardized(x, groups, eps):
    return standardized(x.reshape(len(x), groups, -1), 2, eps).view_as(x)


class ChannelsFirst(nn.LayerNorm):
    """The LayerNorm2d of torchvision and timm."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


LayerNorm2d = type("LayerNorm2d", (ChannelsFirst,), {})

NORMS = {
    "layer": (nn.LayerNorm(4, eps=0.1), (6, 3, 4), lambda x: standardized(x, -1, 0.1)),
    "layer, two dims": (nn.LayerNorm((3, 4)), (6, 3, 4), lambda x: standardized(x, (-2, -1), 1e-5)),
    "layer, no bias": (nn.LayerNorm(4, bias=False), (6, 4), lambda x: standardized(x, -1, 1e-5)),
    "layer, channels first": (
        ChannelsFirst(4),
        (6, 4, 3, 2),
        lambda x: standardized(x, 1, 1e-5),
    ),
    "layer, channels first, square": (
        LayerNorm2d(4),
        (6, 4, 4, 4),
        lambda x: standardized(x, 1, 1e-5),
    ),
    "batch 1d": (nn.BatchNorm1d(4, eps=0.1), (6, 4), lambda x: standardized(x, 0, 0.1)),
    "batch 1d, positions": (nn.BatchNorm1d(4), (6, 4, 3), lambda x: standardized(x, (0, 2), 1e-5)),
    "batch 2d": (nn.BatchNorm2d(4, 0.1), (6, 4, 2, 3), lambda x: standardized(x, (0, 2, 3), 0.1)),
    "group": (nn.GroupNorm(2, 4, 0.1), (6, 4, 3, 2), lambda x: group_standardized(x, 2, 0.1)),
    "rms": (nn.RMSNorm(4, eps=0.1), (6, 3, 4), lambda x: standardized(x, -1, 0.1, False)),
}


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_without_a_batch_sees_a_batch_of_one(make):
    module, x, found = make((3, 4)), torch.randn(3, 4), []
    for inputs in (x, x.unsqueeze(0)):
        kfac = kfac_of(module, method="ekfac")
        loss_of(module(inputs), 1).backward()
        kfac.step()
        found.append(factors_of(kfac)[""])
        kfac.detach()
        module.zero_grad()
    assert_close(found[0]["G"], found[1]["G"])
    assert torch.equal(found[0]["A"], found[1]["A"])


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize("case", NORMS)
def test_norm_blocks_are_second_moments_of_per_sample_gradients(case, method):
    module, shape, normalize = NORMS[case]
    module = copy.deepcopy(module).double()
    for p in module.parameters():
        nn.init.normal_(p)
    x, recorder, kfac = torch.randn(shape), oracle.Calls([module]), kfac_of(module, method=method)
    loss_of(module(x), len(x)).backward()
    params = list(module.parameters())
    raw = torch.stack([p.grad.flatten() for p in params], 1)
    kfac.step()

    ((x, g),) = recorder.calls[module]
    each = []
    for one, g_one in zip(normalize(x), g * len(x), strict=True):
        fixed = [p.detach().clone().requires_grad_() for p in params]
        is_last = case.startswith(("layer", "rms")) and "first" not in case
        shaped = [p if is_last else p.view(-1, *[1] * (one.ndim - 1)) for p in fixed]
        y = one * shaped[0] + (shaped[1] if len(shaped) > 1 else 0)
        grads = torch.autograd.grad((y * g_one).sum(), fixed)
        each.append(torch.stack([p.flatten() for p in grads], 1))
    blocks = torch.stack([torch.stack([torch.outer(u, u) for u in s]) for s in each]).mean(0)
    got = factors_of(kfac)[""]
    assert_close(got["G"], blocks)
    assert torch.equal(got["A"], torch.ones_like(got["A"]))
    damped_a = 1 + DAMPING if method == "inverse" else 1
    eye = DAMPING * torch.eye(len(params))
    want = torch.linalg.solve((blocks + eye) * damped_a, raw)
    new = torch.stack([p.grad.flatten() for p in params], 1)
    assert_close(new, want)
    assert not torch.allclose(new, raw, rtol=0.1)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_a_norm_may_keep_the_diagonal_of_its_blocks(method):
    found, x = [], torch.randn(6, 4)
    for max_dim in (1, 2):
        torch.manual_seed(0)
        module = nn.BatchNorm1d(4)
        kfac = kfac_of(module, method=method, max_dim=max_dim)
        loss_of(module(x), len(x)).backward()
        raw = torch.stack([p.grad for p in module.parameters()], 1)
        kfac.step()
        found.append(factors_of(kfac)[""]["G"])
        new = torch.stack([p.grad for p in module.parameters()], 1)
        if max_dim == 1:
            damped_a = 1 + DAMPING if method == "inverse" else 1
            assert_close(new, raw / (found[0] + DAMPING) / damped_a)
    assert_close(found[0], found[1].diagonal(dim1=1, dim2=2))
