"""Bytes and FLOPs of a plan: a small example by hand, and what holds of all plans."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kfac_bench.core.estimate import (
    flops,
    memory_bytes,
    payload_bytes,
    stage_flops,
    wire_bytes,
)
from kfac_bench.core.plan import (
    METHODS,
    STRATEGIES,
    ComputeFactor,
    Decompose,
    LayerSpec,
    Precondition,
    ReduceFactors,
    Stage,
    make_plan,
)

SPECS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8).map(
    lambda dims: [LayerSpec(f"layer{i}", a, g) for i, (a, g) in enumerate(dims)]
)
WORLDS = st.sampled_from([2, 3, 4, 6, 8, 16])
CAPS = st.sampled_from([1, 500, 1 << 22])

# By hand: x has A 3 x 3 and G 2 x 2, y has A 4 x 4 and G 1 x 1
X, Y = LayerSpec("x", 3, 2), LayerSpec("y", 4, 1)
ROWS = {"x": 10, "y": 5}
FACTORS_OF_ALL = (9 + 4 + 16 + 1) * 4  # bytes
REDUCED = (6 + 1 + 3 + 1 + 10 + 1 + 1 + 1) * 4  # a triangle and a weight each


def for_all(*strategies):
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return lambda test: slow(given(*strategies)(test))


def by_hand(strategy, method, world=2):
    return make_plan([X, Y], world, strategy=strategy, method=method)


@pytest.mark.parametrize(
    ("strategy", "method", "decompositions"),
    [  # eigen: vectors and values; inverse: the matrix. x is on rank 0 and y on rank 1
        ("layer_wise", "eigen", [9 + 3 + 4 + 2, 16 + 4 + 1 + 1]),
        ("layer_wise", "inverse", [9 + 4, 16 + 1]),
        ("comm_opt", "eigen", [40, 40]),
        ("comm_opt", "inverse", [30, 30]),
    ],
)
def test_memory_by_hand(strategy, method, decompositions):
    plan = by_hand(strategy, method)
    for rank, numel in enumerate(decompositions):
        want = {"factors": FACTORS_OF_ALL, "decompositions": numel * 4}
        assert memory_bytes(plan, rank) == want
        assert memory_bytes(plan, rank, itemsize=2) == {k: n // 2 for k, n in want.items()}


@pytest.mark.parametrize(
    ("strategy", "method", "decompositions", "gradients"),
    [
        ("layer_wise", "eigen", None, (6 + 4) * 4),
        ("mem_opt", "inverse", None, (6 + 4) * 4),
        ("comm_opt", "eigen", (12 + 6 + 20 + 2) * 4, None),
        ("comm_opt", "inverse", (6 + 3 + 10 + 1) * 4, None),
    ],
)
def test_payload_by_hand(strategy, method, decompositions, gradients):
    plan = by_hand(strategy, method)
    reduced = {"ReduceFactors": REDUCED}
    shared = {"ShareDecompositions": decompositions} if decompositions else {}
    sent = {"ShareGradients": gradients} if gradients else {}
    assert payload_bytes(plan, Stage.FACTORS) == reduced
    assert payload_bytes(plan, Stage.DECOMPOSE) == shared
    assert payload_bytes(plan, Stage.PRECONDITION) == sent
    assert payload_bytes(plan) == reduced | shared | sent
    assert payload_bytes(plan, Stage.FACTORS, Stage.PRECONDITION) == reduced | sent
    assert payload_bytes(plan, Stage.FACTORS, itemsize=8) == {"ReduceFactors": 2 * REDUCED}


def test_payload_of_two_gradient_workers_by_hand():
    """4 ranks, 2 columns of 2: y is in column 0 (heavier), x in column 1; rows have 2 ranks."""
    plan = make_plan([X, Y], 4, strategy="hybrid_opt", grad_worker_fraction=0.5)
    assert [p.grad_workers for p in plan.placements] == [(1, 3), (0, 2)]
    assert payload_bytes(plan) == {
        "ReduceFactors": REDUCED,
        "ShareDecompositions": (12 + 6 + 20 + 2) * 4,
        "ShareGradients": 2 * (6 + 4) * 4,  # both gradient workers, each along its row
    }
    assert memory_bytes(plan, 3)["decompositions"] == (9 + 3 + 4 + 2) * 4
    for rank in range(4):
        assert wire_bytes(plan, rank) == {
            "ReduceFactors": 2 * 3 / 4 * REDUCED,
            "ShareDecompositions": (18 if rank % 2 else 22) * 4 / 2,
            "ShareGradients": (6 + 4) * 4 / 2,
        }


def test_wire_by_hand():
    plan = by_hand("comm_opt", "inverse", world=4)
    for rank in range(4):
        assert wire_bytes(plan, rank) == {
            "ReduceFactors": 1.5 * REDUCED,
            "ShareDecompositions": 0.75 * 20 * 4,
        }
        assert wire_bytes(plan, rank, Stage.FACTORS, itemsize=2) == {
            "ReduceFactors": 0.75 * REDUCED
        }
        assert wire_bytes(plan, rank, Stage.PRECONDITION) == {}


def test_flops_by_hand():
    assert flops(ComputeFactor((0,), X, "A"), "eigen", ROWS) == 2 * 10 * 9
    assert flops(ComputeFactor((0,), X, "G"), "eigen", ROWS) == 2 * 10 * 4
    assert flops(ComputeFactor((0,), Y, "A"), "inverse", ROWS) == 2 * 5 * 16
    assert flops(Decompose((0,), X, "A"), "eigen", ROWS) == pytest.approx(14 / 3 * 27)
    assert flops(Decompose((0,), Y, "A"), "inverse", ROWS) == 64
    # two rotations there and two back: 2 (2 * 2 * 3) + 2 (2 * 3 * 3) twice
    assert flops(Precondition((0,), X), "eigen", ROWS) == 2 * (2 * 2 * 2 * 3 + 2 * 2 * 3 * 3)
    assert flops(Precondition((0,), X), "inverse", ROWS) == 2 * 2 * 2 * 3 + 2 * 2 * 3 * 3
    assert flops(ReduceFactors((0, 1), 0, 9, ()), "eigen", ROWS) == 0


def test_stage_flops_by_hand():
    factors = 2 * 10 * (9 + 4) + 2 * 5 * (16 + 1)
    work = {0: (27 + 8, 2 * 6 * 5), 1: (64 + 1, 2 * 4 * 5)}  # x on 0, y on 1
    plan = by_hand("layer_wise", "inverse")
    for rank, (decompose, precondition) in work.items():
        assert stage_flops(plan, rank, ROWS) == {
            Stage.FACTORS: factors,
            Stage.DECOMPOSE: decompose,
            Stage.PRECONDITION: precondition,
        }
    plan = by_hand("comm_opt", "inverse")
    both = [stage_flops(plan, rank, ROWS) for rank in range(2)]
    assert sum(s[Stage.DECOMPOSE] for s in both) == 27 + 8 + 64 + 1
    assert [s[Stage.PRECONDITION] for s in both] == [100, 100]


@for_all(SPECS, WORLDS, st.sampled_from(METHODS), CAPS)
def test_strategies_trade_memory_for_communication(specs, world, method, cap):
    plans = {s: build(specs, world, s, method, cap) for s in STRATEGIES}
    assert "ShareGradients" not in payload_bytes(plans["comm_opt"])
    for strategy in ("layer_wise", "mem_opt"):
        assert "ShareDecompositions" not in payload_bytes(plans[strategy])
    one_copy = sum(
        d * d + (d if method == "eigen" else 0) for s in specs for d in (s.a_dim, s.g_dim)
    )
    copies = {"comm_opt": world, "layer_wise": 1, "mem_opt": 1, "hybrid_opt": workers(world)}
    for strategy, plan in plans.items():
        held = [memory_bytes(plan, r) for r in range(world)]
        assert sum(h["decompositions"] for h in held) == copies[strategy] * one_copy * 4
        assert {h["factors"] for h in held} == {
            sum(d * d for s in specs for d in (s.a_dim, s.g_dim)) * 4
        }
    assert len({payload_bytes(p, Stage.FACTORS)["ReduceFactors"] for p in plans.values()}) == 1


def workers(world):
    """Half of the ranks; all of an odd number."""
    return world // 2 if world % 2 == 0 else world


def build(specs, world, strategy, method, cap):
    return make_plan(
        specs,
        world,
        strategy=strategy,
        method=method,
        grad_worker_fraction=workers(world) / world,
        bucket_numel=cap,
    )


@for_all(SPECS, WORLDS, st.sampled_from(METHODS), st.sampled_from(STRATEGIES), CAPS)
def test_buckets_change_no_sum(specs, world, method, strategy, cap):
    small, large = (build(specs, world, strategy, method, c) for c in (cap, 1 << 30))
    assert payload_bytes(small) == payload_bytes(large)
    for rank in range(world):
        assert wire_bytes(small, rank) == pytest.approx(wire_bytes(large, rank))
        rows = dict.fromkeys((s.name for s in specs), 7)
        assert stage_flops(small, rank, rows) == stage_flops(large, rank, rows)


@for_all(SPECS, WORLDS, st.sampled_from(METHODS), st.sampled_from(STRATEGIES), CAPS)
def test_what_all_ranks_receive_is_what_the_messages_carry(specs, world, method, strategy, cap):
    """Over p ranks a broadcast arrives at p - 1, and a ring moves 2 (p - 1) payloads."""
    plan = build(specs, world, strategy, method, cap)
    received = [wire_bytes(plan, rank) for rank in range(world)]
    ranks = {"comm_opt": world, "hybrid_opt": workers(world)}.get(strategy, 1)
    arrivals = {
        "ReduceFactors": 2 * (world - 1),
        "ShareDecompositions": ranks - 1,
        "ShareGradients": world // ranks - 1,
    }
    for kind, payload in payload_bytes(plan).items():
        total = sum(r.get(kind, 0) for r in received)
        assert total == pytest.approx(payload * arrivals[kind])


@for_all(SPECS, st.sampled_from(METHODS), st.sampled_from(STRATEGIES))
def test_a_world_of_one_sends_nothing(specs, method, strategy):
    plan = make_plan(specs, 1, strategy=strategy, method=method, grad_worker_fraction=1)
    assert payload_bytes(plan) == {}
    assert wire_bytes(plan, 0) == {}


@for_all(SPECS, WORLDS, st.sampled_from(METHODS), st.sampled_from(STRATEGIES))
def test_decompositions_are_done_once_in_all(specs, world, method, strategy):
    plan = build(specs, world, strategy, method, 1 << 22)
    rows = dict.fromkeys((s.name for s in specs), 3)
    alone = stage_flops(make_plan(specs, 1, method=method), 0, rows)
    each = [stage_flops(plan, rank, rows) for rank in range(world)]
    assert sum(s[Stage.DECOMPOSE] for s in each) == pytest.approx(alone[Stage.DECOMPOSE])
    assert all(s[Stage.FACTORS] == alone[Stage.FACTORS] for s in each)
    if strategy == "comm_opt":
        assert all(s == alone[Stage.PRECONDITION] for s in (e[Stage.PRECONDITION] for e in each))
