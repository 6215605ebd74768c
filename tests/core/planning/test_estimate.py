"""Bytes and FLOPs of a plan: a small example by hand, and what holds of all plans."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import strategies as st

from kfac_bench.core.planning.estimate import (
    flops,
    memory_bytes,
    payload_bytes,
    rank_costs,
    wire_bytes_of,
)
from kfac_bench.core.planning.layer_spec import FACTORS, LayerSpec
from kfac_bench.core.planning.plan import (
    METHODS,
    STRATEGIES,
    STRATEGY_TABLE,
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    Message,
    Precondition,
    ReduceFactors,
    ReduceSecondMoments,
    Stage,
)
from kfac_bench.core.planning.planner import make_plan
from tests.support.properties import for_all

DIMS = st.one_of(st.sampled_from([1, 2, 3, 8]), st.integers(1, 60))
SHAPES = st.tuples(
    DIMS,
    DIMS,
    st.sampled_from([1, 1, 1, 2, 5]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([False, False, False, True]),
)
SPECS = st.lists(SHAPES, min_size=1, max_size=8).map(
    lambda shapes: [LayerSpec(f"layer{i}", *shape) for i, shape in enumerate(shapes)]
)
WORLDS = st.sampled_from([2, 3, 4, 6, 8, 16])
CAPS = st.sampled_from([1, 500, 1 << 22])
CHOICES = st.sampled_from(
    [(s, m) for s in STRATEGIES for m in METHODS if m != "ekfac" or s == "comm_opt"]
)

# By hand: x has A 3 x 3 and G 2 x 2, y has A 4 x 4 and G 1 x 1
X, Y = LayerSpec("x", 3, 2), LayerSpec("y", 4, 1)
ROWS = {"x": 10, "y": 5}
FACTORS_OF_ALL = (9 + 4 + 16 + 1) * 4  # bytes
REDUCED = (6 + 1 + 3 + 1 + 10 + 1 + 1 + 1) * 4  # a triangle and a weight each

# Two groups of A 3 x 3 and G 2 x 2; an A of 5 on the diagonal and G 2 x 2; a G of 7 on it, A 2 x 2
GROUPED = LayerSpec("grouped", 3, 2, groups=2)
EMBEDDING = LayerSpec("embedding", 5, 2, a_diagonal=True)
HEAD = LayerSpec("head", 2, 7, g_diagonal=True)
ALL_KINDS = [GROUPED, EMBEDDING, HEAD]
ROWS_OF_ALL = {"grouped": 10, "embedding": 4, "head": 6}


def stage_flops(plan, rank, rows):
    return {
        stage: sum(flops(op, plan.method, rows) for op in plan.ops(stage) if rank in op.ranks)
        for stage in Stage
    }


def wire_bytes(plan, rank, *stages):
    """Bytes that a rank receives, by kind of message."""
    total = Counter()
    for op in plan.ops(*stages):
        if isinstance(op, Message) and rank in op.ranks:
            total[type(op).__name__] += wire_bytes_of(op)
    return dict(total)


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


def test_factors_of_owners_by_hand():
    """x is on rank 0 and y on rank 1; each gets and keeps its own."""
    plan = by_hand("owner_reduce", "eigen")
    assert [p.a_worker for p in plan.placements] == [1, 0]  # y is heavier
    for rank, (factors, decompositions) in enumerate([(16 + 1, 22), (9 + 4, 18)]):
        want = {"factors": 4 * factors, "decompositions": 4 * decompositions}
        assert memory_bytes(plan, rank) == want
        # half of each message, and the other's gradients
        assert wire_bytes(plan, rank) == {
            "ReduceFactors": REDUCED / 2,
            "ShareGradients": (6 + 4) * 4 / 2,
        }
    assert payload_bytes(plan, Stage.FACTORS) == {"ReduceFactors": REDUCED}
    local = by_hand("local_factors", "eigen")
    assert payload_bytes(local) == {"ShareGradients": (6 + 4) * 4}
    assert [memory_bytes(local, r) for r in range(2)] == [memory_bytes(plan, r) for r in range(2)]
    flop = [stage_flops(local, r, ROWS)[Stage.FACTORS] for r in range(2)]
    assert flop == [2 * 5 * (16 + 1), 2 * 10 * (9 + 4)]


def test_half_precision_of_owners_by_hand():
    """Diagonals are fp32, also those that an owner sends to the other gradient workers."""
    plan = make_plan(ALL_KINDS, 2, strategy="owner_reduce", grad_worker_fraction=1.0, itemsize=2)
    values = (6 + 4) + (5 + 2) + (2 + 7)
    assert payload_bytes(plan) == {
        "ReduceScales": 6 * 2 * 4,
        "ReduceFactors": 2 * (12 + 6 + 5 + 3 + 3 + 7),
        "ShareDecompositions": 4 * values + 2 * (18 + 8 + 4 + 4),
    }
    assert wire_bytes(plan, 0)["ReduceScales"] == 6 * 2 * 4  # to all
    assert wire_bytes(plan, 0)["ReduceFactors"] == 12 + 6 + 5 + 3 + 3 + 7


@pytest.mark.parametrize(
    ("method", "decompositions", "sent"),
    [
        ("eigen", 30 * 2 + 10 * 4, 30 * 2 + 10 * 4),  # vectors; values in fp32
        ("inverse", 30 * 2 + 4 * 4, 20 * 2 + 4 * 4),  # of each matrix its size in fp32
    ],
)
def test_half_precision_by_hand(method, decompositions, sent):
    plan = make_plan([X, Y], 2, method=method, itemsize=2)
    want = {"factors": 30 * 2 + 4 * 4, "decompositions": decompositions}
    assert memory_bytes(plan, 0) == memory_bytes(plan, 1) == want
    assert payload_bytes(plan) == {
        "ReduceScales": 4 * 2 * 4,  # of each factor its size and weight in fp32
        "ReduceFactors": 20 * 2,
        "ShareDecompositions": sent,
    }
    assert wire_bytes(plan, 0)["ReduceScales"] == 4 * 2 * 4


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
        assert wire_bytes(plan, rank, Stage.PRECONDITION) == {}


@pytest.mark.parametrize(
    ("method", "factors", "decompositions"),
    [
        ("eigen", 26 + 9 + 11, (24 + 12) + (5 + 6) + (6 + 7)),
        ("inverse", 26 + 9 + 11, 26 + (5 + 4) + (4 + 7)),
        ("ekfac", 26 + 9 + 11 + 12, (24 + 12) + (5 + 6) + (6 + 7)),  # second moments of grouped
        ("eigen_adam", 26 + 9 + 11, (24 + 12) + (5 + 6) + (6 + 7)),
    ],
)
def test_memory_of_groups_and_diagonals_by_hand(method, factors, decompositions):
    plan = make_plan(ALL_KINDS, 2, method=method)
    for rank in range(2):
        want = {"factors": factors * 4, "decompositions": decompositions * 4}
        if method == "eigen_adam":
            want["moments"] = 2 * (12 + 10 + 14) * 4
        assert memory_bytes(plan, rank) == want


def test_moments_are_on_the_gradient_workers():
    """x is on rank 1 and y on rank 0; fp32 also where factors have two bytes."""
    plan = make_plan([X, Y], 2, strategy="mem_opt", method="eigen_adam", itemsize=2)
    assert [p.grad_workers for p in plan.placements] == [(1,), (0,)]
    assert [memory_bytes(plan, r)["moments"] for r in range(2)] == [2 * 4 * 4, 2 * 6 * 4]
    both = make_plan([X, Y], 2, method="eigen_adam")
    assert [memory_bytes(both, r)["moments"] for r in range(2)] == [2 * 10 * 4] * 2


@pytest.mark.parametrize(
    ("method", "decompositions"),
    [("eigen", 24 + 12 + 6 + 6), ("inverse", 12 + 6 + 3 + 3), ("ekfac", 24 + 12 + 6 + 6)],
)
def test_payload_of_groups_and_diagonals_by_hand(method, decompositions):
    """Diagonals are sent to be reduced, not as decompositions."""
    plan = make_plan(ALL_KINDS, 4, method=method)
    reduced = (12 + 1 + 6 + 1) + (5 + 1 + 3 + 1) + (3 + 1 + 7 + 1)
    second = {"ReduceSecondMoments": (12 + 1) * 4} if method == "ekfac" else {}
    assert payload_bytes(plan, Stage.FACTORS) == {"ReduceFactors": reduced * 4} | second
    assert payload_bytes(plan, Stage.DECOMPOSE) == {"ShareDecompositions": decompositions * 4}
    assert payload_bytes(plan, Stage.PRECONDITION) == {}
    for rank in range(4):
        assert wire_bytes(plan, rank, Stage.FACTORS) == {
            kind: 2 * 3 / 4 * n for kind, n in payload_bytes(plan, Stage.FACTORS).items()
        }
    by_layer = make_plan(ALL_KINDS, 2, strategy="mem_opt")
    assert payload_bytes(by_layer, Stage.PRECONDITION) == {"ShareGradients": (12 + 10 + 14) * 4}


def test_flops_of_groups_and_diagonals_by_hand():
    def of(op, method="eigen"):
        return flops(op, method, ROWS_OF_ALL)

    assert of(ComputeFactor((0,), GROUPED, "A")) == 2 * 10 * 2 * 9
    assert of(ComputeFactor((0,), EMBEDDING, "A")) == 2 * 4 * 5
    assert of(ComputeFactor((0,), HEAD, "G")) == 2 * 6 * 7
    assert of(ComputeFactor((0,), HEAD, "A")) == 2 * 6 * 4
    batch = Decompose((0,), ((GROUPED, "A"), (HEAD, "A")))
    assert of(batch, "inverse") == 2 * 27 + 8
    assert of(batch) == of(batch, "ekfac") == pytest.approx(14 / 3 * (2 * 27 + 8))
    assert of(Decompose((0,), ((EMBEDDING, "A"), (HEAD, "G")))) == 0
    # one side alone where the other is a diagonal
    assert of(Precondition((0,), (GROUPED,)), "inverse") == 2 * (2 * 2 * 2 * 3 + 2 * 2 * 3 * 3)
    assert of(Precondition((0,), (EMBEDDING,)), "inverse") == 2 * 2 * 2 * 5
    assert of(Precondition((0,), (HEAD,)), "inverse") == 2 * 7 * 2 * 2
    assert of(Precondition((0,), (HEAD, EMBEDDING))) == 2 * (2 * 7 * 2 * 2 + 2 * 2 * 2 * 5)
    # rows times Q_A, rows times Q_G, and the product of squares
    assert of(ComputeSecondMoment((0,), GROUPED), "ekfac") == 2 * 10 * 2 * (9 + 4 + 6)
    assert of(ReduceSecondMoments((0, 1), 0, 9, ()), "ekfac") == 0


def test_flops_by_hand():
    assert flops(ComputeFactor((0,), X, "A"), "eigen", ROWS) == 2 * 10 * 9
    assert flops(ComputeFactor((0,), X, "G"), "eigen", ROWS) == 2 * 10 * 4
    assert flops(ComputeFactor((0,), Y, "A"), "inverse", ROWS) == 2 * 5 * 16
    assert flops(Decompose((0,), ((X, "A"),)), "eigen", ROWS) == pytest.approx(14 / 3 * 27)
    assert flops(Decompose((0,), ((Y, "A"),)), "inverse", ROWS) == 64
    # two rotations there and two back: 2 (2 * 2 * 3) + 2 (2 * 3 * 3) twice
    assert flops(Precondition((0,), (X,)), "eigen", ROWS) == 2 * (2 * 2 * 2 * 3 + 2 * 2 * 3 * 3)
    assert flops(Precondition((0,), (X,)), "inverse", ROWS) == 2 * 2 * 2 * 3 + 2 * 2 * 3 * 3
    assert flops(ReduceFactors((0, 1), 0, 9, ()), "eigen", ROWS) == 0


def test_flops_of_eigen_adam_by_hand():
    """X X^T; per Newton-Schulz step a square; but for the first also three products; the basis."""
    hidden = dataclasses.replace(GROUPED, orthogonal_steps=3)
    rotations = 2 * 2 * (2 * 2 * 2 * 3 + 2 * 2 * 3 * 3)
    steps = 2 * (2 * 2 * 2 * 3 + 3 * 2 * 2**3 + 2 * 3 * 2 * 2**3 + 2 * 2**3)
    batch = Precondition((0,), (GROUPED, hidden))
    each = flops(Precondition((0,), (GROUPED,)), "eigen_adam", ROWS_OF_ALL)
    assert flops(batch, "eigen_adam", ROWS_OF_ALL) == 2 * each + steps
    assert each == rotations
    tall = dataclasses.replace(hidden, a_dim=hidden.g_dim, g_dim=hidden.a_dim)
    more = flops(Precondition((0,), (tall,)), "eigen_adam", ROWS_OF_ALL)
    assert more == rotations + steps
    # a product, and Householder's QR with its Q
    step = flops(Decompose((0,), ((X, "A"),)), "eigen_adam", ROWS)
    assert step == pytest.approx((2 + 8 / 3) * 27)


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


def stored(spec, factor):
    """Elements of a factor."""
    n = spec.dim(factor)
    return spec.groups * (n if spec.is_diagonal(factor) else n * n)


@for_all(SPECS, WORLDS, st.sampled_from(["eigen", "inverse"]), CAPS)
def test_strategies_trade_memory_for_communication(specs, world, method, cap):
    plans = {s: build(specs, world, s, method, cap) for s in STRATEGIES}
    assert "ShareGradients" not in payload_bytes(plans["comm_opt"])
    for strategy in ("layer_wise", "mem_opt"):
        assert "ShareDecompositions" not in payload_bytes(plans[strategy])
    factors = sum(stored(s, f) for s in specs for f in FACTORS)
    values = sum(s.groups * s.dim(f) for s in specs for f in FACTORS if not s.is_diagonal(f))
    one_copy = factors + (values if method == "eigen" else 0)
    for strategy, plan in plans.items():
        held = [memory_bytes(plan, r) for r in range(world)]
        copies = workers_of(strategy, world)
        assert sum(h["decompositions"] for h in held) == copies * one_copy * 4
        if plan.factors_on == "all":
            assert {h["factors"] for h in held} == {factors * 4}
        else:
            assert sum(h["factors"] for h in held) == factors * 4
    assert payload_bytes(plans["local_factors"], Stage.FACTORS) == {}
    sent = [payload_bytes(plans[s], Stage.FACTORS) for s in STRATEGIES if s != "local_factors"]
    assert all(s == sent[0] for s in sent)
    arriving = {s: sum(wire_bytes(plans[s], r, Stage.FACTORS)["ReduceFactors"]
                       for r in range(world)) for s in ("mem_opt", "owner_reduce")}  # fmt: skip
    assert 2 * arriving["owner_reduce"] == pytest.approx(arriving["mem_opt"])


@for_all(SPECS, WORLDS, CAPS)
def test_ekfac_costs_second_moments_more_than_eigen(specs, world, cap):
    eigen, ekfac = (build(specs, world, "comm_opt", m, cap) for m in ("eigen", "ekfac"))
    having = [s for s in specs if not (s.a_diagonal or s.g_diagonal)]
    kept = sum(s.grad_numel for s in having)
    for rank in range(world):
        more, less = (memory_bytes(p, rank) for p in (ekfac, eigen))
        assert more == less | {"factors": less["factors"] + 4 * kept}
    sent, without = payload_bytes(ekfac), payload_bytes(eigen)
    assert sent.pop("ReduceSecondMoments", 0) == 4 * (kept + len(having))
    assert sent == without


def workers(world):
    """Half of the ranks; all of an odd number."""
    return world // 2 if world % 2 == 0 else world


def workers_of(strategy, world):
    """Of :func:`build`."""
    if STRATEGY_TABLE[strategy].adjustable:
        return workers(world)
    return world if strategy == "comm_opt" else 1


def build(specs, world, strategy, method, cap, **options):
    return make_plan(
        specs,
        world,
        strategy=strategy,
        method=method,
        grad_worker_fraction=workers(world) / world,
        bucket_numel=cap,
        **options,
    )


@for_all(
    SPECS,
    WORLDS,
    CHOICES,
    st.fixed_dictionaries(
        {
            "bucket_numel": st.sampled_from([1, 500, 1 << 30]),
            "batch_numel": st.sampled_from([0, 1, 100, 1 << 30]),
            "spread": st.sampled_from([1, 2, 99]),
        }
    ),
)
def test_buckets_batches_and_slices_change_no_sum(specs, world, choice, options):
    plain = build(specs, world, *choice, 1 << 22)
    fraction = workers(world) / world
    plan = make_plan(
        specs,
        world,
        strategy=choice[0],
        method=choice[1],
        grad_worker_fraction=fraction,
        **options,
    )
    rows = {s.name: 7 + i for i, s in enumerate(specs)}
    for stage in Stage:
        assert payload_bytes(plan, stage) == payload_bytes(plain, stage)
    for rank in range(world):
        assert memory_bytes(plan, rank) == memory_bytes(plain, rank)
        assert wire_bytes(plan, rank) == pytest.approx(wire_bytes(plain, rank))
        want = stage_flops(plain, rank, rows)
        assert stage_flops(plan, rank, rows) == pytest.approx(want, rel=1e-12)


@for_all(SPECS, WORLDS, CHOICES, CAPS)
def test_all_ranks_together_receive_what_messages_carry(specs, world, choice, cap):
    """Over p ranks a broadcast arrives at p - 1, and a ring moves 2 (p - 1) payloads."""
    (strategy, _), plan = choice, build(specs, world, *choice, cap)
    received = [wire_bytes(plan, rank) for rank in range(world)]
    ranks = workers_of(strategy, world)
    arrivals = {
        "ReduceFactors": (1 if strategy == "owner_reduce" else 2) * (world - 1),
        "ReduceSecondMoments": 2 * (world - 1),
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


@for_all(SPECS, WORLDS, CHOICES)
def test_ranks_together_decompose_each_factor_once(specs, world, choice):
    strategy, method = choice
    plan = build(specs, world, strategy, method, 1 << 22)
    rows = dict.fromkeys((s.name for s in specs), 3)
    alone = stage_flops(make_plan(specs, 1, method=method), 0, rows)
    each = [stage_flops(plan, rank, rows) for rank in range(world)]
    assert sum(s[Stage.DECOMPOSE] for s in each) == pytest.approx(alone[Stage.DECOMPOSE])
    if strategy == "local_factors":
        assert sum(s[Stage.FACTORS] for s in each) == alone[Stage.FACTORS]
    else:
        assert all(s[Stage.FACTORS] == alone[Stage.FACTORS] for s in each)
    if strategy == "comm_opt":
        assert all(s == alone[Stage.PRECONDITION] for s in (e[Stage.PRECONDITION] for e in each))


# ---- all ranks at once ----


def costs_of(plan, rows=ROWS):
    return rank_costs(plan, lambda op: flops(op, plan.method, rows))


def test_rank_costs_by_hand():
    """4 ranks, 2 columns of 2: y on ranks 0 and 2, x on 1 and 3, which decompose A and G alone."""
    plan = make_plan([X, Y], 4, strategy="hybrid_opt", grad_worker_fraction=0.5)
    assert [(p.a_worker, p.workers[-1]) for p in plan.placements] == [(1, 1), (0, 0)]
    rank = costs_of(plan)[3]
    assert rank.memory_bytes == memory_bytes(plan, 3)
    assert rank.statistics_bytes == FACTORS_OF_ALL
    shared, gradients = (9 + 3 + 4 + 2) * 4, [6 * 4, 4 * 4]
    assert rank.bucket_bytes == {
        Stage.FACTORS: REDUCED,
        Stage.DECOMPOSE: shared,
        Stage.PRECONDITION: sum(gradients),  # its own and what comes from rank 2, both at once
    }
    assert rank.peak_bytes == sum(rank.memory_bytes.values()) + FACTORS_OF_ALL + REDUCED
    assert rank.flops[Stage.DECOMPOSE] == 0
    assert {
        kind: (t.messages, t.payload_bytes, t.wire_bytes)
        for kinds in rank.traffic.values()
        for kind, t in kinds.items()
    } == {
        "ReduceFactors": (1, REDUCED, 1.5 * REDUCED),
        "ShareDecompositions": (1, shared, shared / 2),
        "ShareGradients": (2, sum(gradients), sum(gradients) / 2),
    }


def test_peak_of_bucket_bytes_by_hand():
    """Scales are gone before the factors come; of slices, one at a time."""
    world = [X, Y]
    half = make_plan(world, 2, itemsize=2, bucket_numel=1)
    assert costs_of(half)[0].bucket_bytes[Stage.FACTORS] == 20 * 2
    tiny = make_plan([LayerSpec("tiny", 1, 1)], 2, itemsize=2)
    assert costs_of(tiny, {"tiny": 1})[0].bucket_bytes[Stage.FACTORS] == 4 * 4  # the scales'
    sliced = make_plan([LayerSpec("x", 3, 1), Y], 2, spread=2)
    # The A of y is the heaviest factor, so the first slice sends most: 4^2 + 4 numbers.
    sent = [sum(op.numel * 4 for op in p if hasattr(op, "numel")) for p in sliced.slices]
    assert sent == [20 * 4, (12 + 2 + 2) * 4]
    assert costs_of(sliced, ROWS)[0].bucket_bytes[Stage.DECOMPOSE] == sent[0]


def test_the_jobs_of_a_thread_are_those_of_the_largest_slice():
    """A job has copies of the factors, and its results until they are in use."""
    plan = make_plan([LayerSpec("x", 3, 1), Y], 1, spread=2)
    # The first slice has the A of y alone, the second has the three smaller factors.
    (plain,), (beside,) = costs_of(plan), rank_costs(plan, lambda op: 0.0, background=True)
    assert beside.memory_bytes == plain.memory_bytes | {"jobs": 4 * (16 + 16 + 4)}
    assert beside.peak_bytes == plain.peak_bytes + beside.memory_bytes["jobs"]


@for_all(SPECS, WORLDS, CHOICES, CAPS)
def test_rank_costs_are_those_of_each_rank_alone(specs, world, choice, cap):
    plan = build(specs, world, *choice, cap)
    rows = {s.name: 7 + i for i, s in enumerate(specs)}
    for rank, cost in enumerate(costs_of(plan, rows)):
        assert cost.memory_bytes == memory_bytes(plan, rank)
        assert cost.flops == pytest.approx(stage_flops(plan, rank, rows))
        for stage in Stage:
            wire = {kind: t.wire_bytes for kind, t in cost.traffic[stage].items()}
            assert wire == pytest.approx(wire_bytes(plan, rank, stage))
            payload = sum(t.payload_bytes for t in cost.traffic[stage].values())
            assert payload == cost.bucket_bytes[stage]


def test_options_that_change_flops_by_hand():
    def of(op, **options):
        return flops(op, "eigen", ROWS, **options)

    reduced = {"x": 3, "y": 2}
    assert of(ComputeFactor((0,), X, "A"), reduced=reduced) == 2 * 3 * 9
    assert of(ComputeFactor((0,), X, "A"), seeds=5) == 2 * 10 * 9
    assert of(ComputeFactor((0,), X, "G"), reduced=reduced, seeds=5) == 5 * 2 * 3 * 4
    second = 5 * 2 * 10 * (9 + 4 + 6)
    assert of(ComputeSecondMoment((0,), X), reduced=reduced, seeds=5) == second
