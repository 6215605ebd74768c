"""torch.compile: a model is eager while its factors are due, and whole graphs otherwise."""

import gc
import shutil

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.layer_checks import (
    Net,
    assert_same,
    factors_of,
    grads_of,
    kfac_of,
    loss_of,
)
from tests.support.quick import slow

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not"),  # dynamo's
]


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
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
        ],
    ),
]


# Inductor would start processes that import torch, and compile files to try vector instructions.
@torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False})
@pytest.mark.parametrize("before", [slow(True), False])
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
    assert counter.frame_count == 1  # one graph: nothing breaks it, nothing compiles it again
    assert not dynamo["graph_break"]
    assert set(kfac.state_dict()["layers"]) == {
        "tokens", "linear", "norm", "conv", "attention.out_proj",
        *(f"attention.in_proj.{part}" for part in "qkv"),
    }  # fmt: skip


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


class Stack(nn.Module):
    """A model whose own forward the compiler traces; that of nn.Sequential it only inlines."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x):
        return self.layers(x)


def layers_of_stack():
    """Return a container: its class has a forward that the compiler never traces by itself."""
    return Stack().layers


def compile_model(model, **options):
    return torch.compile(model, **options)


def compile_in_place(model, **options):
    model.compile(**options)
    return model


def compile_function(model, **options):
    return torch.compile(lambda x: model(x + 1) * 2, **options)


@pytest.mark.parametrize(
    ("make", "wrap", "fullgraph"),
    [
        (Stack, compile_model, False),
        slow(Stack, compile_model, True),
        slow(Stack, compile_in_place, False),
        (Stack, compile_in_place, True),
        (Stack, compile_function, False),
        slow(Stack, compile_function, True),
        slow(layers_of_stack, compile_model, False),
        (layers_of_stack, compile_model, True),
        (layers_of_stack, compile_in_place, False),
        slow(layers_of_stack, compile_in_place, True),
        slow(layers_of_stack, compile_function, False),
        (layers_of_stack, compile_function, True),
    ],
)
def test_only_the_model_with_statistics_runs_eagerly(make, wrap, fullgraph, dynamo):
    eager, model, other = make(), make(), Stack()
    model.load_state_dict(eager.state_dict())
    counter, others = (torch._dynamo.testing.CompileCounter() for _ in range(2))
    options = {"factor_update_freq": 2, "update_freq": 2}
    kfacs = [kfac_of(m, **options) for m in (eager, model)]
    call = wrap(model, backend=counter, fullgraph=fullgraph)
    call_other = torch.compile(other, backend=others, fullgraph=True)
    frames = []
    for _ in range(6):
        x = torch.randn(6, 4)
        want = eager(x + 1) * 2 if wrap is compile_function else eager(x)
        for output, kfac in ((want, kfacs[0]), (call(x), kfacs[1])):
            loss_of(output, 6).backward()
            call_other(x)
            kfac.step()
        assert_same(grads_of(model), grads_of(eager))
        assert others.frame_count == 1
        frames.append(counter.frame_count)
        assert stance() == "default"
    assert_same(factors_of(kfacs[1]), factors_of(kfacs[0]))
    # With statistics, the rest of a function is a graph of its own, unless it must be whole.
    first = int(wrap is compile_function and not fullgraph) * 2
    assert frames == [first] + 5 * [first + 1]


@pytest.mark.parametrize("first", ["same", "other", "other later"])
def test_graphs_from_models_without_hooks_do_not_serve_this_model(first, dynamo):
    torch._dynamo.config.skip_nnmodule_hook_guards = True  # as in a new process
    model = Stack()
    without = model if first == "same" else Stack()
    call = torch.compile(lambda model, x: model(x) * 2, backend="eager")
    if first != "other later":
        loss_of(call(without, torch.randn(6, 4)), 6).backward()
    kfac = kfac_of(model)
    call(without, torch.randn(6, 4))
    loss_of(call(model, torch.randn(6, 4)), 6).backward()
    kfac.step()  # else there would be a warning, which is an error here
    assert factors_of(kfac)["layers.0"]["A"].any()


def test_every_step_with_statistics(dynamo):
    model, counter = Stack(), torch._dynamo.testing.CompileCounter()
    kfac = kfac_of(model)
    call = compile_function(model, backend=counter)
    frames = []
    for _ in range(3):
        loss_of(call(torch.randn(6, 4)), 6).backward()
        kfac.step()
        frames.append(counter.frame_count)
    assert frames == [2, 2, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])  # a hook never sees the second
def test_a_forward_that_fails_leaves_no_stance(error, dynamo):
    model = Stack()
    kfac = kfac_of(model)
    compiled = torch.compile(model, backend="eager")

    def fail(*_):
        assert stance() == "force_eager"
        raise error

    handle = model.layers[1].register_forward_hook(fail)
    with pytest.raises(error):
        compiled(torch.randn(6, 4))
    handle.remove()
    if error is KeyboardInterrupt:
        compiled(torch.randn(6, 4))
    assert stance() == "default"
    handle = model.layers[1].register_forward_hook(fail)
    with pytest.raises(error):
        compiled(torch.randn(6, 4))
    del kfac, model, compiled, handle
    gc.collect()
    assert stance() == "default"


def test_repeated_parts_run_eagerly_too(dynamo):
    """Checkpointing compares what the forward and its repetition inside backward save."""
    model = nn.Sequential(Stack(), nn.Linear(3, 2))
    kfac = kfac_of(model, factor_update_freq=2)
    block = torch.compile(model[0], backend="aot_eager")
    for _ in range(3):
        x = torch.randn(6, 4, requires_grad=True)
        loss_of(model[1](checkpoint(block, x, use_reentrant=False)), 6).backward()
        kfac.step()
    assert set(factors_of(kfac)) == {"0.layers.0", "0.layers.2", "1"}


def test_a_stance_of_the_user_is_restored(dynamo):
    model = Stack()
    kfac = kfac_of(model)
    with torch.compiler.set_stance("eager_on_recompile"):
        model(torch.randn(6, 4))
        assert stance() == "eager_on_recompile"
    kfac.detach()


def test_names_do_not_contain_wrappers(dynamo):
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
