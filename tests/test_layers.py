"""Every kind of layer, and every way to call one, against rows written out in float64."""

import copy
import gc
import io
import re
import shutil
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kfac_bench.core import KFAC, capture
from kfac_bench.core.layer import Layer
from kfac_bench.core.layers import LinearLayer
from tests import oracle

DAMPING = 0.03
MADE = weakref.WeakSet()
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    for kfac in MADE:
        kfac.detach()


@pytest.fixture
def dynamo():
    """A fresh compiler; its counters."""
    gc.collect()
    assert stance() == "default"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def stance():
    return torch._dynamo.eval_frame._stance.stance


def kfac_of(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    defaults = {"damping": DAMPING, "kl_clip": None, "update_freq": 1, "factor_update_freq": 1}
    kfac = KFAC(model, optimizer, **(defaults | {"skip": []} | options))
    MADE.add(kfac)
    return kfac


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


BOTH = pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])


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


NORMS = {
    "layer": (nn.LayerNorm(4), (6, 3, 4), lambda x: standardized(x, -1, 1e-5)),
    "layer, two dims": (nn.LayerNorm((3, 4)), (6, 3, 4), lambda x: standardized(x, (-2, -1), 1e-5)),
    "layer, no bias": (nn.LayerNorm(4, bias=False), (6, 4), lambda x: standardized(x, -1, 1e-5)),
    "batch 1d": (nn.BatchNorm1d(4), (6, 4), lambda x: standardized(x, 0, 1e-5)),
    "batch 1d, positions": (nn.BatchNorm1d(4), (6, 4, 3), lambda x: standardized(x, (0, 2), 1e-5)),
    "batch 2d": (nn.BatchNorm2d(4), (6, 4, 2, 3), lambda x: standardized(x, (0, 2, 3), 1e-5)),
    "group": (nn.GroupNorm(2, 4), (6, 4, 3, 2), lambda x: group_standardized(x, 2, 1e-5)),
    "rms": (nn.RMSNorm(4, eps=1e-3), (6, 3, 4), lambda x: standardized(x, -1, 1e-3, False)),
}


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
        shaped = [p if one.shape[-1] == 4 and "batch" not in case and "group" not in case
                  else p.view(-1, *[1] * (one.ndim - 1)) for p in fixed]  # fmt: skip
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


# attention


class Attention(nn.Module):
    """nn.MultiheadAttention made of four Linear layers with the same weights."""

    def __init__(self, packed):
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = (
            packed.embed_dim,
            packed.num_heads,
            packed.dropout,
        )
        self.batch_first = packed.batch_first
        weights = packed.in_proj_weight.detach().chunk(3)
        biases = (None,) * 3 if packed.in_proj_bias is None else packed.in_proj_bias.chunk(3)
        out = packed.out_proj
        self.q, self.k, self.v = map(self._linear, weights, biases)
        self.out = self._linear(out.weight, out.bias)

    @staticmethod
    def _linear(weight, bias):
        linear = nn.Linear(*weight.T.shape, bias=bias is not None)
        linear.weight.data = weight.detach().clone()
        if bias is not None:
            linear.bias.data = bias.detach().clone()
        return linear

    def forward(self, query, key, value, need_weights=True, **ignored):
        inputs = (query, key, value)
        if not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        projected = (m(x) for m, x in zip((self.q, self.k, self.v), inputs, strict=True))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected)
        if need_weights:
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            if self.training:
                weights = F.dropout(weights.flatten(0, 1), self.dropout).view_as(weights)
            out = weights @ v
        else:
            dropout = self.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        out = self.out(out.transpose(1, 2).flatten(2))
        return (out if self.batch_first else out.transpose(0, 1)), None


def assert_attention_equals_linears(packed, run, **options):
    """``run(attention)`` is a loss; compares all four projections."""
    split = Attention(packed)
    parts = {"0.in_proj.q": "q", "0.in_proj.k": "k", "0.in_proj.v": "v", "0.out_proj": "out"}
    results = []
    for attention in (packed, split):
        kfac = kfac_of(nn.ModuleList([attention]), **options)
        torch.manual_seed(1)
        run(attention).backward()
        kfac.step()
        results.append(factors_of(kfac))
    got, want = results
    assert_same(got, {name: want[f"0.{part}"] for name, part in parts.items()})
    rows = packed.in_proj_weight.grad.chunk(3)
    for part, grad in zip((split.q, split.k, split.v), rows, strict=True):
        assert_close(grad, part.weight.grad)
    assert_close(packed.out_proj.weight.grad, split.out.weight.grad)
    if packed.in_proj_bias is not None:
        bias = torch.cat([part.bias.grad for part in (split.q, split.k, split.v)])
        assert_close(packed.in_proj_bias.grad, bias)
        assert_close(packed.out_proj.bias.grad, split.out.bias.grad)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "encoder-decoder", "self without gradient"])
def test_attention_equals_four_linear_layers(kind, batch_first, bias, dropout, need_weights):
    packed = nn.MultiheadAttention(6, 2, dropout, bias=bias, batch_first=batch_first)
    needs = not kind.endswith("without gradient")
    x, y, z = (torch.randn(3, t, 6, requires_grad=needs) for t in (4, 5, 5))
    if not batch_first:
        x, y, z = (t.transpose(0, 1) for t in (x, y, z))
    inputs = {"cross": (x, y, z), "encoder-decoder": (x, y, y)}.get(kind, (x, x, x))

    def run(attention):
        return loss_of(attention(*inputs, need_weights=need_weights)[0], 3)

    assert_attention_equals_linears(packed, run)


@pytest.mark.parametrize("method", ["inverse", "ekfac"])
def test_attention_with_other_methods_and_reduce(method):
    packed, x = nn.MultiheadAttention(6, 2, batch_first=True), torch.randn(3, 4, 6)

    def run(attention):
        return loss_of(attention(query=x, key=x, value=x)[0], 3)

    assert_attention_equals_linears(packed, run, method=method)
    packed.zero_grad()
    assert_attention_equals_linears(packed, run, weight_sharing="reduce", method="eigen")


def test_attention_without_a_batch_is_a_batch_of_one():
    one = nn.MultiheadAttention(6, 2)
    other, x, results = copy.deepcopy(one), torch.randn(4, 6), []
    for model, inputs in ((one, x), (other, x.unsqueeze(1))):
        kfac = kfac_of(model)
        loss_of(model(inputs, inputs, inputs)[0], 1).backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results)


def test_attention_called_twice_and_modified_in_place():
    packed, x = nn.MultiheadAttention(6, 2, batch_first=True), torch.randn(3, 4, 6)

    def run(attention):
        return loss_of(attention(*3 * [attention(x, x, x)[0].relu_()])[0].tanh_(), 3)

    assert_attention_equals_linears(packed, run)


def test_attention_inside_an_encoder_layer():
    """Training never takes its fast path; evaluation does, and counts nothing."""
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)
    for module in (layer.dropout, layer.dropout1, layer.dropout2):
        module.p = 0.0  # draws depend on the memory layout of what they are for
    split = copy.deepcopy(layer)
    split.self_attn = Attention(layer.self_attn)
    x, results = torch.randn(3, 4, 6), []
    for model in (layer, split):
        kfac = kfac_of(model)
        if model is layer:
            model.eval()
            slow = model(x)
            with torch.no_grad():
                assert_close(model(x), slow)
            model.train()
        torch.manual_seed(1)
        loss_of(model(x), 3).backward()
        kfac.step()
        results.append(factors_of(kfac))
    got, want = results
    for part, name in (("q", "in_proj.q"), ("k", "in_proj.k"), ("v", "in_proj.v")):
        want[f"self_attn.{name}"] = want.pop(f"self_attn.{part}")
    want["self_attn.out_proj"] = want.pop("self_attn.out")
    assert_same(got, want)
    assert_close(layer.linear1.weight.grad, split.linear1.weight.grad)
    assert_close(layer.self_attn.in_proj_weight.grad[:6], split.self_attn.q.weight.grad)


def test_attention_with_other_key_sizes_is_left_out_with_the_reason():
    model = nn.ModuleList([nn.MultiheadAttention(6, 2, kdim=4), nn.Linear(6, 2)])
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["1"]
    assert {x.reason for x in report.skipped} == {"kdim or vdim differ from embed_dim"}
    assert report.covered_params + report.skipped_params == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
@pytest.mark.parametrize("later", [False, True])
def test_attention_partly_frozen(frozen, later):
    """What is left equals attention of Linear layers, frozen in the same places."""
    packed = nn.Sequential()
    packed.attention = nn.MultiheadAttention(6, 2, batch_first=True)
    packed.head = nn.Linear(6, 2)
    x = torch.randn(3, 4, 6)
    kfac = kfac_of(packed) if later else None
    packed.attention.get_parameter(frozen).requires_grad_(False)
    kfac = kfac or kfac_of(packed)
    for _ in range(2):
        packed.zero_grad()
        loss_of(packed.head(packed.attention(x, x, x)[0]), 3).backward()
        kfac.step()
    assert packed.attention.get_parameter(frozen).grad is None
    assert all(p.grad.isfinite().all() for p in packed.parameters() if p.grad is not None)
    layers = kfac.state_dict()["layers"]
    if not later:
        trained = "attention.out_proj" if frozen == "in_proj_weight" else "attention.in_proj.v"
        if trained in layers:
            assert float(layers[trained]["G"]["weight"]) > 0


# transformers


def bert_attention():
    from transformers.models.bert import modeling_bert

    config = modeling_bert.BertConfig(
        hidden_size=6, num_attention_heads=2, intermediate_size=8, attn_implementation="eager"
    )
    return modeling_bert.BertAttention(config)


def gpt2_block():
    from transformers.models.gpt2 import modeling_gpt2

    config = modeling_gpt2.GPT2Config(n_embd=6, n_head=2, n_inner=8, attn_implementation="eager")
    return modeling_gpt2.GPT2Block(config, layer_idx=0)


@BOTH
@pytest.mark.parametrize("make", [bert_attention, gpt2_block])
def test_blocks_of_transformers(make, weight_sharing):
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    model, x = make().double(), torch.randn(3, 4, 6)

    def forward():
        out = model(x)
        return loss_of(out if isinstance(out, torch.Tensor) else out[0], 3)

    kfac = check(model, forward, kinds=(*PLAIN, Conv1D), skip=["Norm", "ln_"],
                 weight_sharing=weight_sharing)  # fmt: skip
    assert len(kfac.report().layers) == 4


@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_conv1d_of_transformers_equals_a_linear_layer(bias, weight_sharing):
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    linear, conv = nn.Linear(5, 3, bias=bias), Conv1D(3, 5)
    conv.weight.data = linear.weight.detach().T.clone()
    if bias:
        conv.bias.data = linear.bias.detach().clone()
    conv.bias.requires_grad_(bias)
    x = torch.randn(4, 2, 5)
    kfacs = [kfac_of(m, weight_sharing=weight_sharing) for m in (linear, conv)]
    for module, kfac in zip((linear, conv), kfacs, strict=True):
        loss_of(module(x), 4).backward()
        kfac.step()
    assert_same(factors_of(kfacs[1]), factors_of(kfacs[0]))
    assert_close(conv.weight.grad, linear.weight.grad.T)
    if bias:
        assert_close(conv.bias.grad, linear.bias.grad)


# sharing


@BOTH
def test_a_module_called_several_times_in_one_forward(weight_sharing):
    """Further calls are further positions of the same samples."""
    layer, x, y = nn.Linear(4, 4), torch.randn(6, 4), torch.randn(6, 3, 4)

    def forward():
        return loss_of(layer(layer(layer(x)).tanh()), 6) + loss_of(layer(y), 6)

    check(nn.Sequential(layer), forward, weight_sharing=weight_sharing)


@BOTH
def test_the_model_itself_called_twice_is_two_micro_batches(weight_sharing):
    """Also with one backward; an extra dimension of samples is the same then."""
    model, x, y = nn.Sequential(nn.Linear(4, 4)), torch.randn(6, 4), torch.randn(3, 4)
    other = copy.deepcopy(model)
    kfac, kfac_other = (kfac_of(m, weight_sharing=weight_sharing) for m in (model, other))
    (loss_of(model(x), 9) + loss_of(model(y), 9)).backward()
    loss_of(other(torch.cat([x, y])), 9).backward()
    kfac.step()
    kfac_other.step()
    assert_same(factors_of(kfac), factors_of(kfac_other))
    assert_same(grads_of(model), grads_of(other))


@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_two_linear_modules_of_one_weight_are_one_layer(bias, weight_sharing):
    torch.manual_seed(2)
    one, other, x = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias), torch.randn(6, 4)
    other.weight, other.bias = one.weight, one.bias
    model, alone = nn.Sequential(one, nn.Tanh(), other), nn.ModuleList([copy.deepcopy(one)])
    kfacs = [kfac_of(m, weight_sharing=weight_sharing) for m in (model, alone)]
    loss_of(model(x), 6).backward()
    loss_of(alone[0](alone[0](x).tanh()), 6).backward()
    for kfac in kfacs:
        kfac.step()
    assert_same(factors_of(kfacs[0]), factors_of(kfacs[1]))
    assert_same(grads_of(model[0]), grads_of(alone[0]))
    assert len(kfacs[0].report().layers) == 1


class Tied(nn.Module):
    def __init__(self, heads=1):
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 7, bias=False) for _ in range(heads))
        for head in self.heads:
            head.weight = self.tokens.weight

    def forward(self, x):
        h = self.hidden(self.tokens(x)).tanh()
        return sum(head(h) for head in self.heads)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("skip", [[], ["Embedding"]])
def test_an_embedding_tied_to_the_head_is_left_to_the_optimizer_with_it(skip, heads):
    model = Tied(heads)
    kfac = kfac_of(model, skip=skip)
    report = kfac.report()
    assert [x.name for x in report.layers] == ["hidden"]
    reasons = {x.name: x.reason for x in report.skipped}
    assert set(reasons) == {"tokens", *(f"heads.{i}" for i in range(heads))}
    assert re.search("weight tied to tokens", reasons["heads.0"])
    assert reasons["tokens"] == ("skip pattern 'Embedding'" if skip else "weight tied to heads.0")
    loss_of(model(torch.randint(7, (5, 3))), 5).backward()
    before = model.tokens.weight.grad.clone()
    kfac.step()
    assert torch.equal(model.tokens.weight.grad, before)


def test_one_weight_with_two_biases_is_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["2"]
    assert [x.name for x in report.skipped] == ["0", "1"]
    assert "tied to 1" in report.skipped[0].reason


def test_one_bias_of_two_weights_leaves_both_layers_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["2"]
    assert [x.name for x in report.skipped] == ["0", "1"]
    assert "tied to 1" in report.skipped[0].reason


def test_what_is_shared_but_frozen_does_not_matter():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(6, 4)
    model[2].bias = model[0].bias
    model[0].bias.requires_grad_(False)
    check(model, lambda: loss_of(model(x), 6))


def test_the_shared_part_of_two_attentions_is_left_out():
    one, other = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)
    other.in_proj_weight = one.in_proj_weight
    report = kfac_of(nn.ModuleList([one, other])).report()
    assert [x.name for x in report.layers] == ["0.out_proj", "1.out_proj"]
    assert report.skipped[0].reason == "in_proj_weight tied to 1"


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding, nn.LayerNorm])
def test_weights_that_are_computed_are_left_out(kind):
    model = nn.Sequential(kind(4) if kind is nn.LayerNorm else kind(4, 3), nn.Linear(3, 2))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    report = kfac_of(model).report()
    assert [x.name for x in report.layers] == ["1"]
    reasons = {x.name: x.reason for x in report.skipped}
    assert kind is nn.Embedding or "parametrization" in reasons["0"]
    assert report.covered_params + report.skipped_params == sum(
        p.numel() for p in model.parameters()
    )


# what is covered, and how


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_a_vocabulary_head_keeps_only_the_diagonal_of_g(method):
    head, x = nn.Linear(4, 50), torch.randn(6, 3, 4)
    kfacs = []
    for max_dim in (49, 50):
        model = nn.Sequential(copy.deepcopy(head))
        kfacs.append(kfac_of(model, max_dim=max_dim, method=method))
        loss_of(model(x), 6).backward()
        kfacs[-1].step()
    (small,), (full,) = (factors_of(kfac).values() for kfac in kfacs)
    assert small["G"].shape == (1, 50)
    assert_close(small["G"][0], full["G"][0].diagonal())
    assert_close(small["A"], full["A"])
    assert "G 50 (diagonal)" in str(kfacs[0].report())
    assert "diagonal" not in str(kfacs[1].report())


def test_nothing_of_a_vocabulary_head_is_v_by_v():
    """100,000 words: a dense G would be 40 GB."""
    model, x = nn.Sequential(nn.Linear(2, 100_000, bias=False)).float(), torch.randn(3, 2).float()
    for method in ("eigen", "inverse", "ekfac"):
        kfac = kfac_of(copy.deepcopy(model), method=method)
        loss_of(kfac._model(x), 3).backward()
        kfac.step()
        sizes = [
            t.numel()
            for entry in kfac.state_dict()["layers"]["0"].values()
            for t in (entry["factor"], *entry.get("eigen", ()), *entry.get("inverse", ()))
        ]
        assert max(sizes) == 100_000


@pytest.mark.parametrize("dims", ["G", "A", "both"])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@BOTH
def test_diagonal_factors_precondition(dims, method, weight_sharing):
    layer = nn.Linear(*{"G": (3, 9), "A": (9, 3), "both": (9, 8)}[dims])
    x = torch.randn(6, 2, layer.in_features)
    check(
        layer, lambda: loss_of(layer(x), 6), max_dim=6, method=method, weight_sharing=weight_sharing
    )


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_diagonal_factors_of_convolutions(method):
    layer, x = nn.Conv2d(4, 12, 3, groups=2), torch.randn(5, 4, 5, 5)
    kfac = check(layer, lambda: loss_of(layer(x), 5), max_dim=5, method=method)
    assert factors_of(kfac)[""]["A"].shape == (2, 19)


def test_a_frozen_bias_is_a_constant():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Conv1d(3, 2, 1)), torch.randn(6, 3, 4)
    model[0].bias.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    check(model, lambda: loss_of(model[2](model[0](x).tanh().mT), 6))
    assert model[0].bias.grad is None


def test_skip_patterns_are_searched_in_names_and_class_names():
    model = nn.ModuleDict(
        {
            "stem": nn.Conv2d(1, 2, 3),
            "blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "norm": nn.LayerNorm(2),
            "tokens": nn.Embedding(3, 2),
        }
    )

    def covered(**options):
        return [x.name for x in kfac_of(model, **options).report().layers]

    everything = ["stem", "blocks.0", "blocks.1", "norm", "tokens"]
    assert covered(skip=[]) == everything
    assert covered(skip=["^Linear$"]) == ["stem", "norm", "tokens"]
    assert covered(skip=[r"blocks\.1", "Conv"]) == ["blocks.0", "norm", "tokens"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert [x.name for x in KFAC(model, optimizer).report().layers] == everything[:3]


# a layer type of the user's own


class ScaledLinear(nn.Module):
    """y = s W x, s fixed; W is what is learned."""

    def __init__(self, inputs, outputs, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.scale = scale

    def forward(self, x):
        return self.scale * (x @ self.weight.T)


class ScaledLinearLayer(Layer):
    """As y = W a with a = s x."""

    def rows(self, x, g):
        a = self.modules[0].scale * x
        # [groups = 1, samples, shared positions, size]
        return a.reshape(1, len(a), -1, a.shape[-1]), g.reshape(1, len(g), -1, g.shape[-1])


@BOTH
@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize("max_dim", [100, 3])
def test_a_layer_type_of_the_users_own(method, weight_sharing, max_dim):
    own, same = ScaledLinear(4, 3, scale=2.5), nn.Linear(4, 3, bias=False)
    same.weight.data = own.weight.detach().clone()
    x, types = torch.randn(6, 5, 4), {ScaledLinear: ScaledLinearLayer}
    options = {"method": method, "weight_sharing": weight_sharing, "max_dim": max_dim}
    kfacs = [kfac_of(own, layer_types=types, **options), kfac_of(same, **options)]
    loss_of(own(x), 6).backward()
    loss_of(same(2.5 * x), 6).backward()
    for kfac in kfacs:
        kfac.step()
    assert_same(factors_of(kfacs[0]), factors_of(kfacs[1]))
    assert_close(own.weight.grad, same.weight.grad)


def test_a_layer_type_may_stand_for_a_known_one_or_a_subclass():
    class Mine(nn.Linear):
        pass

    class MineLayer(LinearLayer):
        pass

    model = nn.Sequential(Mine(3, 3), nn.Linear(3, 3))
    kinds = [type(x) for x in kfac_of(model, layer_types={Mine: MineLayer}).report().layers]
    assert kinds == [MineLayer, LinearLayer]
    assert [type(x) for x in kfac_of(model).report().layers] == [LinearLayer, LinearLayer]


# the many ways to use a model


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


def test_a_layer_used_only_every_other_step():
    """It keeps its factors while it is not used, and weighs only what it saw."""
    model = nn.Sequential(Net())
    recorder = oracle.Calls([model[0].extra])
    kfac = kfac_of(model, factor_decay=0.7)
    for step in range(5):
        model.zero_grad()
        x = torch.randn(6, 4)
        loss_of(model[0](x, extra=step % 2 == 0), 6).backward()
        kfac.step()
        assert (model[0].extra.weight.grad is None) == (step % 2 == 1)
        if step == 3:
            before = factors_of(kfac)["0.extra"]
    fresh = [
        oracle.layer_factors([oracle.layer_rows(model[0].extra, *call)])
        for call in recorder.calls[model[0].extra]
    ]
    weights = [0.7**2, 0.7, 1.0]
    for i, key in enumerate("AG"):
        want = sum(w * f[i] for w, f in zip(weights, fresh, strict=True)) / sum(weights)
        assert_close(factors_of(kfac)["0.extra"][key], want)
        assert not torch.equal(before[key], want)


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@BOTH
def test_a_layer_never_used_does_not_matter(method, weight_sharing):
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())
    del other.extra
    got, want = (train(m, method=method, weight_sharing=weight_sharing) for m in (one, other))
    del got["factors"]["extra"]
    for grads in got["grads"].values():
        assert grads.pop("extra.weight") is None
        assert grads.pop("extra.bias") is None
    assert_same(got, want)


def test_a_layer_frozen_later_leaves_the_others_alone():
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())
    kfacs = [kfac_of(m) for m in (one, other)]
    for m in (one, other):
        train(m, kfac=kfacs[(one, other).index(m)])
    one.second.requires_grad_(False)
    got, want = (train(m, 1, kfac=k) for m, k in zip((one, other), kfacs, strict=True))
    for name in ("second.weight", "second.bias"):
        assert got["grads"]["0"].pop(name) is None
        want["grads"]["0"].pop(name)
    assert_same(got["grads"], want["grads"])


def test_a_forward_without_gradients_counts_nothing():
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())

    def run(x):
        with torch.no_grad():
            one.first(x)  # in training mode
            one(torch.randn(2, 4))
        with torch.inference_mode():
            one(torch.randn(2, 4))
        one(torch.randn(2, 4))  # no backward
        return one(x)

    assert_same(train(one, run=run), train(other))


def test_keyword_arguments():
    class Keyword(Net):
        def forward(self, x):
            h = self.second(input=self.first(input=x).tanh())
            return self.last(input=h.tanh())

    one, other = Keyword(), Net()
    other.load_state_dict(one.state_dict())
    assert_same(train(one), train(other))


class InPlace(Net):
    """Everything between the layers in place, or not."""

    def __init__(self, act, in_place):
        super().__init__()
        self.act, self.in_place = act, in_place

    def forward(self, x):
        if not self.in_place:
            h = self.second(self.first(x).relu())
            h = torch.cat([h[..., :2].relu(), h[..., 2:]], -1)
            return self.last(h) * 2
        h = self.second(self.first(x).relu_())
        h[..., :2].relu_()
        return self.last(h).mul_(2)


@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 2, 5, 4), (6, 4), (4,)])
@pytest.mark.parametrize("bias", [True, False])
def test_in_place_operations_after_layers(shape, bias):
    one, other = InPlace(None, True), InPlace(None, False)
    for model in (one, other):
        for layer in (model.first, model.second, model.last):
            layer.bias = layer.bias if bias else None
    other.load_state_dict(one.state_dict())
    x, results = torch.randn(shape), []
    for model in (one, other):
        kfac = kfac_of(model)
        loss_of(model(x), 6).backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results)
    assert not torch.equal(results[0]["f"]["first"]["G"][0], torch.eye(6))


@pytest.mark.parametrize("shape", [(5, 2, 6, 6), (2, 6, 6)])
def test_in_place_operations_after_convolutions_and_norms(shape):
    def make(in_place):
        return nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.ReLU(in_place),
            nn.GroupNorm(2, 4) if len(shape) == 4 else nn.Softplus(),
            nn.ReLU(in_place),
            nn.Conv2d(4, 3, 3),
            nn.Hardtanh(inplace=in_place),
        )

    one, other, x = make(True), make(False), torch.randn(shape)
    other.load_state_dict(one.state_dict())
    assert_same(*(train(m, 2, run=lambda _, m=m: m(x)) for m in (one, other)))


class Checkpointed(Net):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)

    def block(self, h):
        h = self.second(h.tanh()).relu_()
        return self.attention(*3 * [self.norm(h)])[0]

    def forward(self, x):
        h = self.first(x)
        if self.use_reentrant is None:
            return self.last(self.block(h))
        return self.last(checkpoint(self.block, h, use_reentrant=self.use_reentrant))


@BOTH
@pytest.mark.parametrize("method", ["eigen", "ekfac"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_counts_once(use_reentrant, method, weight_sharing):
    one, other = Checkpointed(use_reentrant), Checkpointed(None)
    other.load_state_dict(one.state_dict())
    got, want = (train(m, method=method, weight_sharing=weight_sharing) for m in (one, other))
    assert_same(got, want)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_statistics_bring_no_further_recomputation(use_reentrant):
    model, forwards = Checkpointed(use_reentrant), []
    model.second.register_forward_hook(lambda *args: forwards.append(1))
    kfac_of(model)
    output = model(torch.randn(6, 5, 4))
    assert len(forwards) == 1
    loss_of(output, 6).backward()
    assert len(forwards) == 2


def test_activation_checkpointing_with_the_exact_fisher():
    one, other = Checkpointed(False), Checkpointed(None)
    other.load_state_dict(one.state_dict())
    results, x = [], torch.randn(6, 5, 4)
    for model in (one, other):
        kfac = kfac_of(model, fisher="type2")
        output = model(x).sum(1)
        kfac.fisher_backward(output)
        F.cross_entropy(output, torch.arange(6) % 3).backward()
        kfac.step()
        results.append({"f": factors_of(kfac), "g": grads_of(model)})
    assert_same(*results)


@BOTH
@pytest.mark.parametrize("fisher", ["empirical", "type2"])
def test_a_model_whose_own_forward_is_never_called(fisher, weight_sharing):
    """With gradient accumulation: micro-batches are told apart by their backward."""
    one = nn.ModuleDict({"body": nn.Linear(4, 6), "head": nn.Linear(6, 3)})
    other = nn.Sequential(*one.values(), nn.Identity())
    other = copy.deepcopy(other)
    x, y = torch.randn(9, 5, 4), torch.randint(3, (9,))
    options = {"fisher": fisher, "weight_sharing": weight_sharing}
    kfacs = [kfac_of(m, **options) for m in (one, other)]

    def run(forward, kfac, part):
        output = forward(x[part]).sum(1)
        kfac.fisher_backward(output)
        (F.cross_entropy(output, y[part], reduction="sum") / 9).backward()

    for part in (slice(0, 4), slice(4, 8), slice(8, 9)):
        run(lambda x: one["head"](one["body"](x)), kfacs[0], part)
    run(other, kfacs[1], slice(0, 9))
    for kfac in kfacs:
        kfac.step()
    factors = factors_of(kfacs[1])
    assert_same(factors_of(kfacs[0]), {"body": factors["0"], "head": factors["1"]})
    assert_close(one["body"].weight.grad, other[0].weight.grad)


def test_no_cycle_holds_activations():
    """What a forward kept is freed with its graph, not by Python's garbage collection."""
    model = nn.ModuleList([Net(), nn.MultiheadAttention(3, 1, batch_first=True)])
    kfac = kfac_of(model)
    gc.collect()
    gc.disable()
    try:
        for with_backward in (True, False):
            out = model[0](torch.randn(6, 5, 4)).relu_()
            loss = model[1](out, out, out)[0].sum()
            assert any(type(x) is capture._Seen for x in gc.get_objects())
            if with_backward:
                loss.backward()
                kfac.step()
            del out, loss
            assert not any(type(x) is capture._Seen for x in gc.get_objects())
    finally:
        gc.enable()


def test_copies_and_saved_models_carry_no_hook_that_acts():
    model = Net()
    kfac, x = kfac_of(model), torch.randn(6, 4)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        loss_of(copied(x), 6).backward()
        assert not kfac._capture._collected
        for hook in copied.first._forward_hooks.values():
            assert "kfac_bench.core.capture" in hook.__module__
            assert hook.__name__ == "no_hook"
        again = kfac_of(copied)  # a preconditioner of its own
        copied.zero_grad()
        loss_of(copied(x), 6).backward()
        again.step()
        assert not kfac._capture._collected
        again.detach()
    loss_of(model(x), 6).backward()
    kfac.step()
    assert_same(grads_of(model), grads_of(copied))


def test_detach_takes_every_hook_off():
    model = nn.Sequential(Net(), nn.MultiheadAttention(6, 2))
    kfac = kfac_of(model)
    kfac.detach()
    kfac.detach()  # twice is once
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    loss_of(model[0](torch.randn(6, 4)), 6).backward()
    with pytest.raises(RuntimeError, match="after detach"):
        kfac.step()


def test_a_double_model_with_float32_as_the_default_dtype():
    """Nothing takes its dtype from the default."""
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Flatten(0, 1), nn.BatchNorm1d(4)
    )
    model.unused = nn.Linear(4, 4)
    x = torch.randint(5, (6, 3))
    for method in ("eigen", "inverse", "ekfac"):
        for weight_sharing in ("expand", "reduce"):
            results = []
            for default in (torch.float64, torch.float32):
                one = copy.deepcopy(model)
                torch.set_default_dtype(default)
                kfac = kfac_of(one, method=method, weight_sharing=weight_sharing)
                for _ in range(2):
                    one.zero_grad()
                    loss_of(nn.Sequential.forward(nn.Sequential(*list(one)[:5]), x), 6).backward()
                    kfac.step()
                torch.set_default_dtype(torch.float64)
                factors = factors_of(kfac)
                del factors["unused"]
                results.append({"f": factors, "g": grads_of(one)})
            assert_same(*results)


# torch.compile: eager while factors are due, whole graphs at all other steps


class Mixed(nn.Module):
    """Convolution, norm, attention, embedding, and a layer called twice."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 3, 3, padding=1)

    def forward(self, x):
        h = self.linear(self.linear(self.tokens(x)).relu_())
        h = self.norm(h + self.attention(h, h, h)[0])
        return self.conv(h.mT)


def train_mixed(model, kfac, steps=5):
    grads, generator = {}, torch.Generator().manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        model.zero_grad()
        loss_of(model(torch.randint(5, (6, 4), generator=generator)), 6).backward()
        kfac.step()
        params = model.named_parameters()
        grads[str(step)] = {n.removeprefix("_orig_mod."): p.grad.clone() for n, p in params}
        optimizer.step()
    return {"grads": grads, "factors": factors_of(kfac)}


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    ),
]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_training_equals_eager(backend, before, dynamo):
    eager, model = Mixed(), Mixed()
    model.load_state_dict(eager.state_dict())
    options = {"factor_update_freq": 2, "update_freq": 2}
    want = train_mixed(eager, kfac_of(eager, **options))
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    if before:
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        kfac = kfac_of(compiled, **options)
    else:
        kfac = kfac_of(model, **options)
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert_same(train_mixed(compiled, kfac), want, rtol=1e-6)
    assert counter.frame_count == 1  # one graph: nothing breaks it, nothing compiles it anew
    assert not dynamo["graph_break"]
    assert set(kfac.state_dict()["layers"]) == {
        "tokens", "linear", "norm", "conv", "attention.out_proj",
        *(f"attention.in_proj.{part}" for part in "qkv"),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_parts_of_a_model_compiled_alone(dynamo):
    eager, model = nn.Sequential(Mixed()), nn.Sequential(Mixed())
    model.load_state_dict(eager.state_dict())
    options = {"factor_update_freq": 2}
    kfac_eager = kfac_of(eager, **options)
    want = train_mixed(eager, kfac_eager)
    model[0].linear = torch.compile(model[0].linear, backend="aot_eager", fullgraph=True)
    model[0].attention.compile(backend="aot_eager", fullgraph=True)  # in place
    kfac = kfac_of(model, **options)
    got = train_mixed(model, kfac)
    assert_same(got["factors"], want["factors"], 1e-6)
    assert set(kfac.state_dict()["layers"]) == set(kfac_eager.state_dict()["layers"])
    kfac.load_state_dict(kfac_eager.state_dict())


def test_the_stance_of_the_compiler_comes_back(dynamo):
    options = {"factor_update_freq": 2}
    one, other = Net(), Net()
    kfacs = [kfac_of(m, **options) for m in (one, other)]

    def step(model, kfac):
        loss_of(model(torch.randn(6, 4)), 6).backward()
        kfac.step()

    assert stance() == "force_eager"
    step(one, kfacs[0])
    assert stance() == "force_eager"  # the other's factors are due
    step(other, kfacs[1])
    assert stance() == "default"
    step(other, kfacs[1])
    step(one, kfacs[0])
    assert stance() == "force_eager"
    kfacs[0].detach()
    assert stance() == "force_eager"
    kfacs[1].detach()
    assert stance() == "default"


def test_a_forgotten_preconditioner_does_not_keep_models_eager(dynamo):
    model = Net()
    kfac = kfac_of(model)
    assert stance() == "force_eager"
    del kfac, model
    gc.collect()
    assert stance() == "default"


def test_a_users_stance_comes_back(dynamo):
    with torch.compiler.set_stance("eager_on_recompile"):
        kfac = kfac_of(Net(), factor_update_freq=2)
        assert stance() == "force_eager"
        kfac.detach()
        assert stance() == "eager_on_recompile"
    assert stance() == "default"


def test_names_are_free_of_wrappers(dynamo):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(Net()))
    kfac = kfac_of(torch.compile(model))
    assert set(kfac.state_dict()["layers"]) == {
        f"0.{n}" for n in ("first", "second", "extra", "last")
    }


def test_a_double_layer_first_used_later():
    """Where there is no statistic yet, its place is held in the layer's own precision."""
    model = Net()
    torch.set_default_dtype(torch.float32)
    kfac = kfac_of(model)
    for extra in (False, True):
        loss_of(model(torch.randn(6, 4).double(), extra), 6).backward()
        kfac.step()
    assert factors_of(kfac)["extra"]["G"].dtype == torch.float64
