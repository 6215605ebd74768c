"""nn.MultiheadAttention, and the blocks of transformers, against linear layers of their own."""

import copy

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

from tests.support.layer_checks import (
    BOTH,
    PLAIN,
    assert_close,
    assert_same,
    check,
    factors_of,
    grads_of,
    kfac_of,
    loss_of,
)

pytestmark = pytest.mark.usefixtures("double")


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


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_without_samples_counts_nothing(batch_first):
    model = nn.MultiheadAttention(6, 2, batch_first=batch_first)
    kfac, x = kfac_of(model), torch.zeros((0, 4, 6) if batch_first else (4, 0, 6))
    model(x, x, x)[0].sum().backward()
    kfac.step()
    assert all(float(s["A"]["weight"]) == 0 for s in kfac.state_dict()["layers"].values())


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


def test_attention_with_a_forward_of_its_own_is_left_to_the_optimizer():
    class Own(nn.MultiheadAttention):
        def forward(self, *, x):
            return super().forward(x, x, x)[0]

    model, x = Own(6, 2), torch.randn(3, 4, 6)
    kfac = kfac_of(model)
    with pytest.warns(UserWarning, match="has a forward, input or output of an unknown form"):
        model(x=x).square().sum().backward()
    raw = model.in_proj_weight.grad.clone()
    kfac.step()
    assert torch.equal(model.in_proj_weight.grad, raw)


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
