"""torch.compile: eager while factors are due, whole graphs at all other steps."""

import gc
import shutil

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from tests.support.layer_checks import Net, assert_same, factors_of, kfac_of, loss_of

pytestmark = pytest.mark.usefixtures("double")


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
    assert counter.frame_count == 1  # one graph: nothing breaks it, nothing compiles it again
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


def test_the_stance_of_the_compiler_is_restored(dynamo):
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


def test_a_stance_of_the_user_is_restored(dynamo):
    with torch.compiler.set_stance("eager_on_recompile"):
        kfac = kfac_of(Net(), factor_update_freq=2)
        assert stance() == "force_eager"
        kfac.detach()
        assert stance() == "eager_on_recompile"
    assert stance() == "default"


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
