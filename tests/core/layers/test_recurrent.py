"""LSTM, GRU, RNN and their cells against single samples and single time steps, in float64."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from kfac_bench.core.layers import unrolled as unrolled_module
from kfac_bench.core.layers.coverage import find_layers
from kfac_bench.core.layers.unrolled import UnrolledForward
from tests.support import oracle, recurrent_oracle
from tests.support.distributed import run_ranks
from tests.support.layer_checks import (
    BOTH,
    DAMPING,
    assert_close,
    assert_same,
    factors_of,
    grads_of,
    kfac_of,
    loss_of,
    skip_if_torch_cannot,
)
from tests.support.quick import slow

pytestmark = pytest.mark.usefixtures("double")

N, T, D, H = 4, 5, 3, 4

MODULES = {
    "lstm": lambda: nn.LSTM(D, H),
    "lstm, projected": lambda: nn.LSTM(D, H, 2, proj_size=2, bidirectional=True),
    "lstm, all": lambda: nn.LSTM(D, H, 2, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(D, H, 2, batch_first=True),
    "gru, no bias": lambda: nn.GRU(D, H, bias=False, bidirectional=True),
    "rnn": lambda: nn.RNN(D, H, 2, bidirectional=True),
    "rnn, relu, no bias": lambda: nn.RNN(D, H, nonlinearity="relu", bias=False, batch_first=True),
}
PACKED = {"padded": None, "packed": [5, 4, 4, 1], "packed, unsorted": [2, 5, 1, 3]}
modules = pytest.mark.parametrize("name", MODULES)


def some_input(module, lengths=None):
    """A batch as the module wants it, and its sequences one by one."""
    x = torch.randn(N, T, D)
    batch = x if module.batch_first else x.transpose(0, 1)
    if lengths is None:
        return batch, list(x)
    is_sorted = lengths == sorted(lengths, reverse=True)
    packed = pack_padded_sequence(batch, lengths, module.batch_first, enforce_sorted=is_sorted)
    return packed, [one[:length] for one, length in zip(x, lengths, strict=True)]


def some_state(module):
    """A first state as the module wants it, and (h, c) of each sample."""
    h, c = (torch.randn(N, *part.shape) for part in recurrent_oracle.zero_state(module))
    state = (h.transpose(0, 1), c.transpose(0, 1))
    return state if isinstance(module, nn.LSTM) else state[0], list(zip(h, c, strict=True))


def tensors(result):
    """All tensors of what a recurrent module returns."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [result.data]
    return [t for part in result for t in tensors(part)]


def loss(result):
    """Depends on outputs and last states, and is a mean over samples."""
    return sum((i + 1) * loss_of(t, N) for i, t in enumerate(tensors(result)))


def sample_loss(sample):
    parts = [sample.output, *sample.state[: 2 if isinstance(sample.module, nn.LSTM) else 1]]
    return sum((i + 1) * loss_of(t, N) for i, t in enumerate(parts))


def reference(module, sequences, states=None):
    """The samples one by one, after the backward of a copy of the module."""
    module = copy.deepcopy(module)
    states = states or [recurrent_oracle.zero_state(module)] * len(sequences)
    pairs = zip(sequences, states, strict=True)
    samples = [recurrent_oracle.Sample(module, *pair) for pair in pairs]
    sum(map(sample_loss, samples)).backward()
    return module, samples


# factors


@BOTH
@pytest.mark.parametrize("method", ["eigen", slow("inverse")])
@pytest.mark.parametrize("lengths", PACKED)
@modules
def test_factors_and_gradients_equal_single_steps(name, lengths, method, weight_sharing):
    module = MODULES[name]()
    batch, sequences = some_input(module, PACKED[lengths])
    state, states = some_state(module)
    alone, samples = reference(module, sequences, states)
    kfac = kfac_of(module, method=method, weight_sharing=weight_sharing)
    loss(module(batch, state)).backward()
    kfac.step()
    factors = factors_of(kfac)
    directions = 2 if module.bidirectional else 1
    count = module.num_layers * directions * (3 if module.proj_size else 2)
    assert len(factors) == count
    for map_name, got in factors.items():
        a, g = recurrent_oracle.factors(samples, map_name, weight_sharing == "reduce")
        assert_close(got["A"][0], a)
        assert_close(got["G"][0], g)
        raw = recurrent_oracle.gradient(alone, map_name)
        want = oracle.precondition(raw, a, g, DAMPING, method)
        assert_close(recurrent_oracle.gradient(module, map_name), want)
        assert not torch.allclose(want, raw, rtol=0.1)


@pytest.mark.parametrize("lengths", PACKED)
@modules
def test_rows_make_the_gradient_of_each_sample(name, lengths):
    module = MODULES[name]()
    batch, sequences = some_input(module, PACKED[lengths])
    layers = {layer.name: layer for layer in find_layers(module)[0]}
    with UnrolledForward() as unrolled:
        total = loss(module(batch))
        seen = {name: calls[0] for name, calls in unrolled.calls.items()}
    edges = [call.edge for call in seen.values()]
    gradients = torch.autograd.grad(total, edges)
    order = getattr(batch, "sorted_indices", None)
    order = range(N) if order is None else order.tolist()
    for (map_name, call), g in zip(seen.items(), gradients, strict=True):
        a_rows, g_rows = layers[map_name].rows(call.x, g)
        got = g_rows[0].mT @ a_rows[0]
        for i, sample in enumerate(order):
            alone, _ = reference(module, [sequences[sample]])
            assert_close(got[i], recurrent_oracle.gradient(alone, map_name))


@pytest.mark.parametrize("lengths", ["padded", "packed, unsorted"])
def test_second_moments_of_ekfac_equal_the_definition(lengths):
    """With factor_decay=0 they are the last step's alone."""
    module = nn.LSTM(D, H, batch_first=True)
    kfac = kfac_of(module, method="ekfac", update_freq=100, early_updates=False, factor_decay=0)
    for _ in range(2):
        batch, sequences = some_input(module, PACKED[lengths])
        module.zero_grad()
        loss(module(batch)).backward()
        kfac.step()
    for name, entry in kfac.state_dict()["layers"].items():
        qa, qg = (entry[factor]["eigen"][1][0] for factor in "AG")
        each = [recurrent_oracle.gradient(reference(module, [s])[0], name) for s in sequences]
        # The loss of one sample alone is N times its part of the mean.
        want = (qg.mT @ (N * torch.stack(each)) @ qa).square().mean(0)
        assert_close(entry["second_moment"][0], want)


@pytest.mark.parametrize("convention", ["sc20", "kaisa"])
def test_conventions_count_time_steps_as_samples(convention):
    """As positions of a Linear layer; see tests.support.oracle.factors."""
    module = nn.GRU(D, H, batch_first=True)
    batch, sequences = some_input(module)
    _, samples = reference(module, sequences)
    kfac = kfac_of(module, factor_convention=convention)
    loss(module(batch)).backward()
    kfac.step()
    for name, got in factors_of(kfac).items():
        parts = zip(*recurrent_oracle.rows(samples, name), strict=True)
        a, g = (torch.cat(part) for part in parts)
        scale = N * T if convention == "sc20" else 1
        assert_close(got["A"][0], a.T @ a / (N * T))
        assert_close(got["G"][0], (scale * g).T @ (scale * g) / (N * T))


@BOTH
def test_diagonal_factors(weight_sharing):
    module = nn.LSTM(D, H)
    batch, sequences = some_input(module, PACKED["packed"])
    _, samples = reference(module, sequences)
    kfac = kfac_of(module, max_dim=1, weight_sharing=weight_sharing)
    loss(module(batch)).backward()
    kfac.step()
    for name, got in factors_of(kfac).items():
        a, g = recurrent_oracle.factors(samples, name, weight_sharing == "reduce")
        assert_close(got["A"][0], a.diagonal())
        assert_close(got["G"][0], g.diagonal())


def test_float32():
    for name in MODULES:
        module = MODULES[name]()
        batch, sequences = some_input(module, PACKED["packed"])
        _, samples = reference(module, sequences)
        module, batch = module.float(), batch.to(torch.float32)
        kfac = kfac_of(module)
        loss(module(batch)).backward()
        kfac.step()
        for map_name, got in factors_of(kfac).items():
            assert got["A"].dtype == torch.float32
            a, g = recurrent_oracle.factors(samples, map_name)
            assert_close(got["A"][0].double(), a, rtol=1e-5)
            assert_close(got["G"][0].double(), g, rtol=1e-5)


class Steps(nn.Module):
    """A cell in the user's own loop over time."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, outputs = None, []
        for one in x.unbind(1):
            state = self.cell(one, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


@BOTH
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_cell_in_a_loop_equals_the_whole_module(kind, weight_sharing):
    cell, whole = getattr(nn, f"{kind}Cell")(D, H), getattr(nn, kind)(D, H, batch_first=True)
    for name, p in cell.named_parameters():
        whole.get_parameter(f"{name}_l0").data = p.detach().clone()
    x, results = torch.randn(N, T, D), []
    for model in (Steps(cell), whole):
        kfac = kfac_of(model, weight_sharing=weight_sharing)
        output = model(x)
        loss_of(output if isinstance(output, torch.Tensor) else output[0], N).backward()
        kfac.step()
        results.append((factors_of(kfac), grads_of(model)))
    (factors, grads), (want, want_grads) = results
    assert_same(factors, {f"cell.{name}": want[f"{name}_l0"] for name in ("ih", "hh")})
    for name, grad in want_grads.items():
        assert_close(grads["cell." + name.removesuffix("_l0")], grad)


def test_a_cell_without_a_batch_is_one_sample():
    model, x = nn.GRUCell(D, H), torch.randn(D)
    other = copy.deepcopy(model)
    kfacs = [kfac_of(model), kfac_of(other)]
    loss_of(model(x), 1).backward()
    loss_of(other(x[None]), 1).backward()
    for kfac in kfacs:
        kfac.step()
    assert_same(factors_of(kfacs[0]), factors_of(kfacs[1]))


def test_a_sequence_without_a_batch_is_one_sample():
    for batch_first in (True, False):
        model = nn.GRU(D, H, batch_first=batch_first)
        other, x = copy.deepcopy(model), torch.randn(T, D)
        kfacs = [kfac_of(model), kfac_of(other)]
        loss_of(model(x)[0], 1).backward()
        loss_of(other(x[None] if batch_first else x[:, None])[0], 1).backward()
        for kfac in kfacs:
            kfac.step()
        assert_same(factors_of(kfacs[0]), factors_of(kfacs[1]))


# the unrolled forward


def test_autocast_asks_the_fused_function_with_contiguous_states(monkeypatch):
    """cuDNN refuses other states; a CPU takes them."""
    asked = []
    own = unrolled_module._in_dtypes_of
    monkeypatch.setattr(
        unrolled_module,
        "_in_dtypes_of",
        lambda f, args, out: asked.append(args) or own(f, args, out),
    )
    with UnrolledForward(), torch.autocast("cpu", torch.bfloat16):
        nn.LSTM(3, 4, 2, batch_first=True)(torch.randn(5, 6, 3))
        nn.GRU(3, 4, bidirectional=True)(torch.randn(6, 5, 3))
    (_, (h, c), *_), (_, state, *_) = asked
    assert all(x.shape[1] == 1 and x.is_contiguous() for x in (h, c, state))


@pytest.mark.filterwarnings("ignore:.*oneDNN")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lengths", PACKED)
@modules
def test_outputs_and_gradients_equal_torchs(name, lengths, dtype):
    """Dropout draws the same random numbers on a CPU."""
    module = MODULES[name]()
    module.dropout = 0.4 if module.num_layers > 1 else 0.0
    module = module.to(dtype)
    for with_state in (True, False):
        batch, _ = some_input(module, PACKED[lengths])
        batch, state = batch.to(dtype), None
        if with_state:
            state, _ = some_state(module)
            state = [t.to(dtype).requires_grad_() for t in tensors(state)]
            state = tuple(state) if isinstance(module, nn.LSTM) else state[0]
        results = []
        for context in (UnrolledForward(), torch.enable_grad()):
            torch.manual_seed(1)
            with context:
                result = module(batch, state)
            inputs = [*module.parameters(), *(tensors(state) if with_state else ())]
            outputs = tensors(result)
            results.append([*outputs, *torch.autograd.grad(loss(result), inputs)])
        for got, want in zip(*results, strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert got.is_contiguous() or not want.is_contiguous()
            tolerance = 1e-12 if dtype == torch.float64 else 1e-5
            assert_close(got.detach(), want.detach(), tolerance)


def test_steps_without_statistics_call_torchs_function(monkeypatch):
    """Other steps, eval mode, no_grad, and after detach."""
    unrolled, own = [], UnrolledForward.__torch_function__

    def spy(self, func, types, args=(), kwargs=None):
        unrolled.append(func.__name__)
        return own(self, func, types, args, kwargs)

    monkeypatch.setattr(UnrolledForward, "__torch_function__", spy)
    model, x = nn.GRU(D, H), torch.randn(T, N, D)
    kfac = kfac_of(model, factor_update_freq=2, update_freq=2)

    def was_unrolled():
        unrolled.clear()
        loss_of(model(x)[0], N).backward()
        return "gru" in unrolled

    assert was_unrolled()
    model.eval()
    assert not was_unrolled()
    model.train()
    with torch.no_grad():
        unrolled.clear()
        model(x)
        assert not unrolled
    kfac.step()
    assert not was_unrolled()
    kfac.step()
    assert was_unrolled()
    kfac.detach()
    assert not was_unrolled()


def test_steps_without_statistics_before_the_first_gradient():
    """The check of the loss scale looks at other layers: these have calls at some steps only."""
    model, x = nn.GRU(D, H), torch.randn(T, N, D)
    kfac = kfac_of(model, factor_update_freq=2, update_freq=2)
    for weight in (0, 0, 1):
        model.zero_grad()
        (weight * loss_of(model(x)[0], N)).backward()
        kfac.step()


def test_a_dry_run_counts_rows_without_values():
    with torch.device("meta"):
        model, x = nn.LSTM(D, H, 2, batch_first=True, proj_size=2), torch.randn(N, T, D)
    layers, _ = find_layers(model)
    with UnrolledForward() as unrolled:
        output = model(x)[0]
        calls = {name: call for name, (call,) in unrolled.calls.items()}
    assert output.shape == (N, T, 2)
    for layer in layers:
        g = torch.empty(N * T, layer.spec.g_dim, device="meta")
        assert layer.size(calls[layer.name].x, g) == (N, T)


def test_an_error_in_the_forward_ends_the_context():
    model = nn.GRU(D, H)
    kfac = kfac_of(model)
    with pytest.raises((RuntimeError, ValueError)):
        model(torch.randn(T, N, D + 1))
    assert not torch.overrides._get_current_function_mode_stack()
    kfac.detach()


def test_a_forward_after_an_interrupted_one_ends_the_context():
    """As in a notebook, where Ctrl-C ends a cell and not the process."""

    def interrupt(module, inputs, output):
        raise KeyboardInterrupt

    model, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    kfac = kfac_of(model)
    handle = model.register_forward_hook(interrupt, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    loss_of(model(x)[0], 2).backward()
    assert not torch.overrides._get_current_function_mode_stack()
    kfac.step()
    handle = model.register_forward_hook(interrupt, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    kfac.detach()  # else all recurrent modules would run in the context, which keeps their graphs
    assert not torch.overrides._get_current_function_mode_stack()


def test_outputs_may_be_changed_in_place():
    for batch_first in (True, False):
        one = nn.GRU(D, H, batch_first=batch_first)
        other, x = copy.deepcopy(one), torch.randn(N, T, D)
        kfac = kfac_of(one)
        for model in (one, other):
            output, last = model(x)
            loss_of(output.relu_(), N).backward(retain_graph=True)
            loss_of(last.mul_(2), N).backward()
        assert_same(grads_of(one), grads_of(other))
        kfac.detach()


@pytest.mark.filterwarnings("ignore:.*oneDNN")
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (make, dtype)
        for make in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
        for dtype in (torch.bfloat16, torch.float16)
    ],
)
def test_autocast(make, dtype):
    """Dtypes are torch's own; factors are float32 and near those of float32."""
    model = make(D, H).float()
    x = torch.randn(T, N, D).float() if "Cell" not in make.__name__ else torch.randn(N, D).float()
    skip_if_torch_cannot(model, x, dtype)
    dtypes, factors = [], []
    for is_half in (True, False):
        kfac = kfac_of(model)
        with torch.autocast("cpu", dtype=dtype, enabled=is_half):
            result = model(x)
        if is_half:
            dtypes = [t.dtype for t in tensors(result)]
        loss_of(tensors(result)[0].float(), N).backward()
        kfac.step()
        factors.append(factors_of(kfac))
        kfac.detach()
        with torch.autocast("cpu", dtype=dtype, enabled=is_half):
            assert not is_half or dtypes == [t.dtype for t in tensors(model(x))]
    assert_same(*factors, rtol=0.05)
    assert all(f.dtype == torch.float32 for layer in factors[0].values() for f in layer.values())


# ways to use a model


class Tagger(nn.Module):
    """Every second thing that recurrent networks have."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.tokens = nn.Embedding(7, D)
        self.lstm = nn.LSTM(D, H, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * H, 3)

    def forward(self, x):
        h = self.tokens(x)
        if self.use_reentrant is not None:
            return self.head(checkpoint(self.lstm, h, use_reentrant=self.use_reentrant)[0])
        return self.head(self.lstm(h)[0])


def train(model, steps=3, samples=N, **options):
    """Gradients and factors after some steps."""
    kfac, generator = kfac_of(model, **options), torch.Generator().manual_seed(3)
    optimizer, grads = torch.optim.SGD(model.parameters(), lr=0.05), {}
    for step in range(steps):
        optimizer.zero_grad()
        tokens = torch.randint(7, (samples, T), generator=generator)
        logits = model(tokens).flatten(0, 1)
        kfac.fisher_backward(logits)
        F.cross_entropy(logits, tokens.flatten() % 3).backward()
        kfac.step()
        grads[str(step)] = grads_of(model)
        optimizer.step()
    return {"grads": grads, "factors": factors_of(kfac)}


@BOTH
@pytest.mark.parametrize("method", ["eigen", slow("inverse"), "ekfac"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_counts_once(use_reentrant, method, weight_sharing):
    one, other = Tagger(use_reentrant), Tagger()
    other.load_state_dict(one.state_dict())
    # EKFAC depends on eigenvectors, which are arbitrary if there are fewer samples than rows.
    options = {"method": method, "weight_sharing": weight_sharing, "samples": 16}
    assert_same(train(one, **options), train(other, **options))


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_statistics_beside_training_are_the_same(fisher):
    one, other, results = Tagger(), Tagger(), []
    other.load_state_dict(one.state_dict())
    for model, background in ((one, True), (other, False)):
        torch.manual_seed(2)
        options = {"background": background, "fisher": fisher, "update_freq": 10}
        results.append(train(model, 1, **options)["factors"])
    assert_same(*results, rtol=0)


def test_checkpointing_with_the_exact_fisher():
    one, other = Tagger(False), Tagger()
    other.load_state_dict(one.state_dict())
    assert_same(train(one, fisher="type2"), train(other, fisher="type2"))


def on_ranks(options):
    """The tagger's weights after three steps on this rank's share of each batch, in float32."""
    dist = torch.distributed
    torch.manual_seed(0)
    model = Tagger().float()
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    kfac = kfac_of(wrapped, overlap=world > 1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(7, (N, T), generator=generator).chunk(world)[rank]
        F.cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten() % 3).backward()
        kfac.step()
        optimizer.step()
    kfac.detach()
    return dict(model.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["comm_opt", slow("mem_opt")])
def test_ranks_equal_one_process(strategy):
    torch.set_default_dtype(torch.float32)
    options = {"strategy": strategy, "spread": False}
    want = on_ranks(options)
    for got in run_ranks(2, on_ranks, options):
        assert_same(got, want, rtol=1e-4)


def test_gradient_accumulation_equals_one_batch():
    one, x = nn.LSTM(D, H, batch_first=True), torch.randn(N, T, D)
    other = copy.deepcopy(one)
    kfacs = [kfac_of(one), kfac_of(other)]
    for part in x.split([3, 1]):
        loss_of(one(part)[0], N).backward()
    loss_of(other(x)[0], N).backward()
    for kfac in kfacs:
        kfac.step()
    assert_same(factors_of(kfacs[0]), factors_of(kfacs[1]))
    assert_same(grads_of(one), grads_of(other))


@BOTH
def test_a_module_called_several_times_in_one_forward(weight_sharing):
    """Further calls are further positions: two halves with the state carried over are the whole."""

    class Halves(nn.Module):
        def __init__(self, lstm):
            super().__init__()
            self.lstm = lstm

        def forward(self, x):
            first, state = self.lstm(x[:, :2])
            second, _ = self.lstm(x[:, 2:], state)
            return torch.cat([first, second], 1)

    one, x = Halves(nn.LSTM(D, H, batch_first=True)), torch.randn(N, T, D)
    other = copy.deepcopy(one.lstm)
    kfacs = [kfac_of(m, weight_sharing=weight_sharing) for m in (one, other)]
    loss_of(one(x), N).backward()
    loss_of(other(x)[0], N).backward()
    for kfac in kfacs:
        kfac.step()
    got, want = map(factors_of, kfacs)
    assert_same(got, {f"lstm.{name}": factors for name, factors in want.items()})
    assert_same(grads_of(one.lstm), grads_of(other))


def test_copies_and_saved_models_use_torchs_function():
    model, x = Tagger(), torch.randint(7, (N, T))
    kfac = kfac_of(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        loss_of(copied(x), N).backward()
        assert not kfac._capture._moments._collected
        again = kfac_of(copied)
        copied.zero_grad()
        loss_of(copied(x), N).backward()
        again.step()
        again.detach()
    loss_of(model(x), N).backward()
    kfac.step()
    assert_same(grads_of(model), grads_of(copied))
    kfac.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_state_resumes():
    model, options = Tagger(), {"update_freq": 2, "factor_update_freq": 1}
    kfac = kfac_of(model, **options)

    def step(model, kfac, seed):
        model.zero_grad()
        tokens = torch.randint(7, (N, T), generator=torch.Generator().manual_seed(seed))
        loss_of(model(tokens), N).backward()
        kfac.step()

    step(model, kfac, 0)
    file = io.BytesIO()
    torch.save(kfac.state_dict(), file)
    file.seek(0)
    resumed = copy.deepcopy(model)
    other = kfac_of(resumed, **options)
    other.load_state_dict(torch.load(file, weights_only=True))
    for seed in (1, 2):
        step(model, kfac, seed)
        step(resumed, other, seed)
    assert_same(factors_of(kfac), factors_of(other))
    assert_same(grads_of(model), grads_of(resumed))


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.usefixtures("dynamo")
@pytest.mark.slow
@pytest.mark.parametrize("has_cell", [True, False])
def test_compiled_training_equals_eager(has_cell):
    """A graph contains a cell as a whole, and breaks at nn.LSTM, as torch's compiler does."""

    def make():
        if has_cell:
            return nn.Sequential(nn.Embedding(7, D), Steps(nn.LSTMCell(D, H)), nn.Linear(H, 3))
        return Tagger()

    one, other = make(), make()
    other.load_state_dict(one.state_dict())
    options = {"factor_update_freq": 2, "update_freq": 2}
    compiled = copy.deepcopy(one)
    compiled.compile(backend="aot_eager", fullgraph=has_cell)
    assert_same(train(compiled, 5, **options), train(other, 5, **options))


# what is covered


def test_report_names_each_matrix():
    model = nn.ModuleDict({"lstm": nn.LSTM(D, H, proj_size=2, bidirectional=True)})
    report = kfac_of(model).report()
    names = ["ih_l0", "hh_l0", "hr_l0", "ih_l0_reverse", "hh_l0_reverse", "hr_l0_reverse"]
    assert [layer.name for layer in report.layers] == [f"lstm.{name}" for name in names]
    assert not report.skipped
    assert report.covered_params == sum(p.numel() for p in model.parameters())
    assert "lstm.ih_l0          LSTM        A 4, G 16" in str(report)
    assert "lstm.hr_l0          LSTM        A 4, G 2" in str(report)


@pytest.mark.parametrize("skip", [["LSTM"], ["rec"]])
def test_a_pattern_skips_a_whole_module(skip):
    model = nn.ModuleDict({"rec": nn.LSTM(D, H), "head": nn.Linear(H, 2)})
    report = kfac_of(model, skip=skip).report()
    assert [layer.name for layer in report.layers] == ["head"]
    assert [(s.name, s.kind) for s in report.skipped] == [("rec", "LSTM")]
    assert report.skipped_params == sum(p.numel() for p in model.rec.parameters())


def left_out(model, **options):
    """The covered layers, and the reasons why others are not."""
    report = kfac_of(model, **options).report()
    total = sum(p.numel() for p in model.parameters())
    assert report.covered_params + report.skipped_params == total
    return [x.name for x in report.layers], {x.name: x.reason for x in report.skipped}


def test_parts_of_a_module_are_left_out_with_a_reason():
    gru, x = nn.GRU(D, H, 2), torch.randn(T, N, D)
    gru.weight_ih_l0.requires_grad_(False)
    covered, reasons = left_out(gru, skip=["ih_l1"])
    assert covered == ["hh_l0", "hh_l1"]
    assert reasons == {"ih_l0": "weight is frozen", "ih_l1": "skip pattern 'ih_l1'"}
    loss_of(gru(x)[0], N).backward()


def test_only_the_recurrent_weight_is_trained():
    """Then no gradient of the gates depends on an input that needs one."""
    module = nn.LSTM(D, H)
    for name in ("weight_ih_l0", "bias_ih_l0", "bias_hh_l0"):
        module.get_parameter(name).requires_grad_(False)
    batch, sequences = some_input(module)
    module_alone = copy.deepcopy(module)
    kfac = kfac_of(module)
    loss(module(batch)).backward()
    kfac.step()
    assert list(factors_of(kfac)) == ["hh_l0"]
    for p in module_alone.parameters():
        p.requires_grad_(True)
    _, samples = reference(module_alone, sequences)
    a, g = recurrent_oracle.factors(samples, "hh_l0")
    assert_close(factors_of(kfac)["hh_l0"]["A"][0], a[:-1, :-1])
    assert_close(factors_of(kfac)["hh_l0"]["G"][0], g)


def test_shared_matrices_are_left_out():
    one, other = nn.GRU(D, H, 2), nn.GRU(D, H)
    one.weight_hh_l1 = one.weight_hh_l0
    other.weight_ih_l0 = one.weight_ih_l0
    covered, reasons = left_out(nn.ModuleList([one, other]))
    assert covered == ["0.ih_l1", "1.hh_l0"]
    assert reasons == {
        "0.ih_l0": "weight_ih_l0 tied to 1.ih_l0",
        "0.hh_l0": "weight_hh_l0 tied to 0.hh_l1",
        "0.hh_l1": "weight_hh_l1 tied to 0.hh_l0",
        "1.ih_l0": "weight_ih_l0 tied to 0.ih_l0",
    }


def test_computed_weights_are_left_out():
    model = nn.LSTM(D, H, bias=False)
    nn.utils.parametrize.register_parametrization(model, "weight_hh_l0", nn.Tanh())
    covered, reasons = left_out(model)
    assert covered == ["ih_l0"]
    assert "parametrization" in reasons["hh_l0"]


def test_a_forward_of_the_users_own_is_left_out():
    class Own(nn.GRUCell):
        def forward(self, x, h=None):
            return F.linear(x, self.weight_ih, self.bias_ih)

    model = nn.ModuleDict({"own": Own(D, H)})
    kfac = kfac_of(model)
    with pytest.warns(UserWarning, match=r"layer 'own\.[ih]h' \(Own\) .* K-FAC cannot read"):
        output = model["own"](torch.randn(N, D))
    output.square().mean().backward()
    kfac.step()
    kfac.detach()
