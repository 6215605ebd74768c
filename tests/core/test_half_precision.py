"""Factors and decompositions kept and sent in bf16 and fp16."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_bench.core import KFAC
from kfac_bench.core.execution import messages
from kfac_bench.core.planning.estimate import memory_bytes, payload_bytes
from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.plan import STRATEGIES, Message, ReduceFactors, ReduceScales, Stage
from tests.core.test_preconditioner import backward, batch, layers_of, matrix_grad, sgd, tiny_model
from tests.support.distributed import run_ranks
from tests.support.quick import quick_if
from tests.support.training import held_bytes

HALVES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.003}
METHODS = ("eigen", "inverse", "ekfac")
OPTIONS = {
    "damping": 0.03,
    "trust_ratio": None,
    "grafting": False,
    "update_freq": 2,
    "factor_update_freq": 1,
    "spread": True,
}


def train(model, steps=4, scale=1.0, **options):
    """The preconditioned gradients of the last step, as one vector, and the preconditioner."""
    kfac = KFAC(model, sgd(model), **(OPTIONS | options))
    for seed in range(steps):
        x, y = batch(seed=seed)
        backward(model, x * scale, y)
        kfac.step()
    return torch.cat([matrix_grad(m).flatten() for m in layers_of(model)]), kfac


def relative_error(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradients_are_those_of_float32_up_to_rounding(dtype, method):
    want, _ = train(tiny_model(), method=method)
    got, _ = train(tiny_model(), method=method, state_dtype=dtype)
    assert 0 < relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", HALVES)
def test_dead_units_in_half_precision(dtype, method):
    gradients = []
    for state_dtype in (dtype, torch.float32):
        model = tiny_model()
        with torch.no_grad():
            model[5].bias[[1, 3]] = -100.0
        gradient, kfac = train(model, method=method, state_dtype=state_dtype)
        assert not kfac.state_dict()["layers"]["5"]["G"]["factor"].any(-1)[0, [1, 3]].any()
        assert kfac.failed_decompositions == 0
        gradients.append(gradient)
    assert 0 < relative_error(*gradients) < TOLERANCE[dtype]


def train_linear(scale, damping, method, dtype=torch.float32):
    """One step of a linear model whose A is ``scale`` squared times that of a Gaussian."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    options = OPTIONS | {"damping": damping, "factored_damping": method == "inverse"}
    kfac = KFAC(model, sgd(model), method=method, state_dtype=dtype, **options)
    F.cross_entropy(model(scale * torch.randn(64, 6)), torch.arange(64) % 4).backward()
    kfac.step()
    return model[0].weight.grad


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [1e-5, 1e3])
def test_half_precision_keeps_tiny_and_huge_factors_and_the_damping(dtype, method, scale):
    """A of 1e-10 and 1e6, the inverse of 1e10: beyond fp16 in both directions.

    The damping is a twentieth of the curvature: it counts, and it would be lost in rounding at 1.
    """
    damping = 0.02 * scale**2
    want = train_linear(scale, damping, method)
    error = relative_error(train_linear(scale, damping, method, dtype), want)
    assert error < TOLERANCE[dtype]
    assert relative_error(train_linear(scale, damping / 100, method), want) > 5 * error


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", HALVES)
def test_memory_is_what_the_plan_says(dtype, method):
    _, kfac = train(tiny_model(), method=method, state_dtype=dtype)
    got = held_bytes(kfac)
    assert got == memory_bytes(kfac.plan, 0)
    assert sum(got.values()) < 0.6 * sum(memory_bytes(train(tiny_model())[1].plan, 0).values()) or (
        method == "ekfac"
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", HALVES)
def test_state_is_float32_and_training_continues_bit_exactly(dtype, method):
    model = tiny_model()
    options = OPTIONS | {"method": method, "state_dtype": dtype}
    _, kfac = train(model, steps=3, **options)
    saved = copy.deepcopy(kfac.state_dict())
    assert saved["layers"]["0"]["A"]["factor"].dtype == torch.float32
    other = copy.deepcopy(model)
    resumed = KFAC(other, sgd(other), **options)
    resumed.load_state_dict(saved)
    for seed in range(3, 6):
        for m, k in ((model, kfac), (other, resumed)):
            backward(m, *batch(seed=seed))
            k.step()
        for a, b in zip(layers_of(model), layers_of(other), strict=True):
            assert torch.equal(matrix_grad(a), matrix_grad(b))


def test_a_statistic_of_zeros_on_several_ranks():
    """The gradients of the layers before a head that starts at zero are zeros at first."""
    spec = LayerSpec("layer", 2, 2)
    op = ReduceScales((0, 1), 0, 2, ((spec, "G"),))
    statistics = {("layer", "G"): (torch.zeros(1, 2, 2), torch.tensor(8.0))}
    bucket = torch.empty(2)
    messages.pack_scales(op, statistics, bucket)
    messages.unpack_scales(op, 2 * bucket, statistics)  # the other rank has the same
    scaled, (weight, size) = statistics["layer", "G"]
    assert not scaled.any()
    assert (weight, size) == (16, 0)


def train_on_rank(strategy, method, dtype, scale, options):
    """Preconditioned gradients of the last step on this rank's part; the plan."""
    model = DistributedDataParallel(tiny_model())
    options = OPTIONS | {"strategy": strategy, "method": method, "state_dtype": dtype} | options
    kfac = KFAC(model, sgd(model), **options)
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in range(4):
        x, y = batch(seed=seed)
        model.zero_grad()
        F.cross_entropy(model(x.chunk(world)[rank] * scale), y.chunk(world)[rank]).backward()
        kfac.step()
    assert held_bytes(kfac) == memory_bytes(kfac.plan, rank)
    return torch.cat([matrix_grad(m).flatten() for m in layers_of(model)]), kfac.plan


BF16 = [
    (world, strategy, method, torch.bfloat16, {})
    for world in (2, 4)
    for strategy in STRATEGIES
    for method in METHODS
    if method != "ekfac" or strategy == "comm_opt"
]
FP16 = [
    (2, strategy, method, torch.float16, {})
    for strategy, method in [
        ("comm_opt", "eigen"), ("comm_opt", "inverse"), ("comm_opt", "ekfac"),
        ("mem_opt", "inverse"), ("owner_reduce", "inverse"),
    ]
]  # fmt: skip
DIAGONALS = [
    (2, "owner_reduce", method, torch.bfloat16, {"max_dim": 8, "grad_worker_fraction": 1.0})
    for method in ("eigen", "inverse")
]
IS_QUICK = [
    *(case for case in BF16 if case[0] == 2 and case[2] != "inverse"),
    FP16[0],
    DIAGONALS[0],
].__contains__


@pytest.mark.ranks
@pytest.mark.supports("ddp", "{strategy}")
@pytest.mark.parametrize(
    ("world", "strategy", "method", "dtype", "options"),
    quick_if(IS_QUICK, [*BF16, *FP16, *DIAGONALS]),
)
def test_ranks_agree_with_one_process_in_float32(world, strategy, method, dtype, options):
    """Where factors are of a rank's own batch, with the same ranks in float32."""
    scale = 1e-2  # an A of 1e-4 times its usual size, which fp16 would flush
    max_dim = {k: v for k, v in options.items() if k == "max_dim"}
    if strategy == "local_factors":
        ranks = run_ranks(world, train_on_rank, strategy, method, torch.float32, scale, options)
        want = ranks[0][0]
    else:
        want, _ = train(tiny_model(), method=method, scale=scale, **max_dim)
    results = run_ranks(world, train_on_rank, strategy, method, dtype, scale, options)
    got, plan = results[0]
    assert all(torch.equal(got, other) for other, _ in results), "ranks drift apart"
    assert relative_error(got, want) < 2 * TOLERANCE[dtype]
    kinds = [type(op) for op in plan.ops(Stage.FACTORS) if isinstance(op, Message)]
    assert kinds[:2] == ([] if strategy == "local_factors" else [ReduceScales, ReduceFactors])
    diagonals = [s for p in plan.placements for s in [p.layer] if s.a_diagonal or s.g_diagonal]
    assert bool(diagonals) == bool(max_dim)
    assert payload_bytes(plan).get("ReduceFactors", 0) == 2 * sum(
        op.numel for op in plan.ops() if isinstance(op, ReduceFactors)
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_half_weights_keeps_float32_factors(method):
    gradients = []
    for dtype in (torch.float16, torch.float32):
        model = tiny_model().to(torch.float16).to(dtype)
        kfac = KFAC(model, sgd(model), **OPTIONS, method=method)
        for seed in range(4):
            x, y = batch(seed=seed)
            model.zero_grad()
            F.cross_entropy(model(x.to(dtype)).float(), y).backward()
            kfac.step()
        kept = kfac.state_dict()["layers"].values()
        assert all(layer[side]["factor"].dtype == torch.float32 for layer in kept for side in "AG")
        assert all(m.weight.grad.dtype == dtype for m in layers_of(model))
        gradients.append(torch.cat([matrix_grad(m).flatten().float() for m in layers_of(model)]))
    assert 0 < relative_error(*gradients) < TOLERANCE[torch.float16]
