"""The core on a GPU, compared with float64 on the CPU. Without a GPU these tests are skipped.

KFAC_TEST_DEVICE=cpu runs them on a CPU, where torch has no recurrent layers in fp16.
"""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_bench import KFAC, eigen_adam
from kfac_bench.core.kernels.gram import gram
from tests.support.training import Mixed, batch, sentences, sgd, tiny_model

DEVICE = os.environ.get("KFAC_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no GPU"
)
OPTIONS = {"damping": 0.03, "update_freq": 2, "factor_update_freq": 1}
TOLERANCE = 1e-3
"""Largest error in fp32 as a share of a tensor's norm. Rounding alone leaves 1e-6 to 1e-4."""


class Recurrent(nn.Module):
    """Layers that cuDNN computes in one kernel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True)
        self.gru = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.gru(self.lstm(x)[0])[0][:, -1])


def sequences(step):
    generator = torch.Generator().manual_seed(300 + step)
    return torch.randn(16, 7, 4, generator=generator), torch.randint(3, (16,), generator=generator)


class Attention(nn.Module):
    """Attention whose fused kernel hides the projections from hooks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


MODELS = {
    "convolutions": (tiny_model, batch),
    "mixed": (Mixed, sentences),
    "recurrent": (Recurrent, sequences),
    "attention": (Attention, sequences),
}


@pytest.fixture(autouse=True)
def full_precision():
    """No TensorFloat-32, whose products have three digits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    yield
    torch.backends.cudnn.allow_tf32 = before


def cast(x, device, dtype):
    return x.to(device, dtype if x.is_floating_point() else None)


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def train(name, device=DEVICE, dtype=torch.float32, steps=4, wrap=None, **options):
    """Train; the last gradients, the factors and K-FAC."""
    make, make_batch = MODELS[name]
    model = make().to(device, dtype)
    optimizer = sgd(model)
    kfac = KFAC(model, optimizer, **(OPTIONS | options))
    run = wrap(model) if wrap else model
    for step in range(steps):
        x, y = (cast(t, device, dtype) for t in make_batch(step))
        optimizer.zero_grad()
        loss_of(run, x, y).backward()
        kfac.step()
        optimizer.step()
    grads = {n: p.grad for n, p in model.named_parameters()}
    layers = kfac.state_dict()["layers"]
    factors = {f"{n}.{f}": layers[n][f]["factor"] for n in layers for f in "AG" if f in layers[n]}
    return {"gradients": grads, "factors": factors}, kfac


def assert_near(got, want, tolerance=TOLERANCE):
    assert got.keys() == want.keys()
    for kind, tensors in want.items():
        assert got[kind].keys() == tensors.keys()
        for name, expected in tensors.items():
            found, expected = got[kind][name].detach().cpu().double(), expected.cpu().double()
            error = (found - expected).norm()
            assert error <= tolerance * expected.norm() + 1e-6, (kind, name, float(error))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["inverse", "eigen", "ekfac", "identity"])
def test_a_step_is_that_of_float64_on_the_cpu(method, name):
    want, _ = train(name, "cpu", torch.float64, method=method)
    got, kfac = train(name, method=method)
    assert bool(want["factors"]) == (method != "identity")
    assert_near(got, want)
    assert {x.device.type for x in got["gradients"].values()} == {DEVICE}
    assert kfac.report()


@pytest.mark.parametrize("name", MODELS)
def test_eigen_adam_is_that_of_float64_on_the_cpu(name):
    make, make_batch = MODELS[name]

    def weights(device, dtype):
        model = make().to(device, dtype)
        # Adam divides rounding errors by their own size where a gradient is 0.
        intervals = {"update_freq": 2, "factor_update_freq": 1}
        optimizer = eigen_adam(model, 0.01, eps=1e-2, orthogonal_scale=0.5, kfac=intervals)
        for step in range(4):
            x, y = (cast(t, device, dtype) for t in make_batch(step))
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        return {"weights": dict(model.named_parameters())}

    assert_near(weights(DEVICE, torch.float32), weights("cpu", torch.float64), 5e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"damping": None},
        {"block_size": 4},
        {"max_dim": 6},
        {"background": True},
        {"state_dtype": torch.bfloat16},
        {"kl_clip": 1e-3, "trust_ratio": None, "grafting": False},
        {"early_updates": False, "spread": True},
    ],
    ids=str,
)
def test_options_on_both_devices(options):
    bf16 = "state_dtype" in options
    want, _ = train("convolutions", "cpu", steps=6, **options)
    got, _ = train("convolutions", steps=6, **options)
    assert_near(got, want, 0.05 if bf16 else TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["inverse", "eigen", "ekfac"])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_leaves_float32_and_an_overflow_leaves_nothing(name, method, dtype):
    make, make_batch = MODELS[name]
    model = make().to(DEVICE)
    optimizer = sgd(model)
    kfac = KFAC(model, optimizer, method=method, **OPTIONS)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled=dtype == torch.float16)

    def step(number, factor=1.0):
        x, y = (t.to(DEVICE) for t in make_batch(number))
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=dtype):
            loss = factor * loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        kfac.step(loss_scale=scaler.get_scale)
        scaler.step(optimizer)
        scaler.update()

    for number in range(3):
        step(number)
    before = {n: side["G"]["factor"].clone() for n, side in kfac.state_dict()["layers"].items()}
    assert {x.dtype for x in before.values()} == {torch.float32}
    assert all(x.isfinite().all() for x in before.values())
    assert all(p.isfinite().all() for p in model.parameters())
    assert kfac.dropped_statistics == 0
    if dtype == torch.float16:
        weights = [p.detach().clone() for p in model.parameters()]
        step(3, float("inf"))
        layers = kfac.state_dict()["layers"]
        assert all(torch.equal(layers[n]["G"]["factor"], x) for n, x in before.items())
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
        assert kfac.dropped_statistics > 0


@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_one_rank_of_nccl_is_a_process_alone(method, tmp_path):
    want, _ = train("convolutions", method=method)
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
    )
    try:
        got, _ = train("convolutions", method=method, wrap=DistributedDataParallel)
    finally:
        dist.destroy_process_group()
    assert_near(got, want, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 4096, 768), (1, 100352, 64), (3, 37, 5)], ids=str)
def test_a_moment_of_half_precision_is_summed_in_float32(shape, dtype):
    rows = torch.randn(shape, device=DEVICE).to(dtype)
    with_ones = F.pad(rows, (0, 1), value=1.0).double()
    want = with_ones.mT @ with_ones
    got = gram(rows, bias=True)
    assert got.dtype == torch.float32
    assert torch.equal(got, got.mT)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_a_state_moves_between_devices():
    _, kfac = train("convolutions")
    saved = copy.deepcopy(kfac.state_dict())
    for device in ("cpu", DEVICE):
        model = tiny_model().to(device)
        other = KFAC(model, sgd(model), **OPTIONS)
        other.load_state_dict(saved)
        layers = other.state_dict()["layers"]
        for name, sides in saved["layers"].items():
            for f in sides.keys() & set("AG"):
                assert torch.equal(layers[name][f]["factor"].cpu(), sides[f]["factor"].cpu())
        x, y = (t.to(device) for t in batch(9))
        loss_of(model, x, y).backward()
        other.step()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_compiled_model_attached_to_its_optimizer():
    def gradients(compiled):
        model = tiny_model().to(DEVICE)
        optimizer = sgd(model)
        KFAC(model, optimizer, **OPTIONS).attach()
        run = torch.compile(model) if compiled else model
        for step in range(4):
            x, y = (t.to(DEVICE) for t in batch(step))
            optimizer.zero_grad()
            loss_of(run, x, y).backward()
            optimizer.step()
        return {"weights": dict(model.named_parameters())}

    assert_near(gradients(True), gradients(False))


def test_a_budget_is_chosen_from_times_of_the_device():
    _, kfac = train("convolutions", steps=8, max_overhead=50.0, damping=None)
    assert "more time per step with max_dim=" in str(kfac.report())
