"""Properties of every plan, whatever the layers, the world, the strategy and the bucket size."""

import dataclasses
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kfac_bench.core.plan import (
    FACTORS,
    METHODS,
    STRATEGIES,
    ComputeFactor,
    Decompose,
    LayerSpec,
    Message,
    Precondition,
    ReduceFactors,
    ShareDecompositions,
    ShareGradients,
    Stage,
    cubic_cost,
    decomposition_numel,
    make_plan,
    packed_numel,
)

SPECS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12).map(
    lambda dims: [LayerSpec(f"layer{i}", a, g) for i, (a, g) in enumerate(dims)]
)


def for_all(*strategies):
    """``given`` without a stopwatch: the machine may be busy."""
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return lambda test: slow(given(*strategies)(test))


@dataclasses.dataclass
class Case:
    """A plan and what it was asked for."""

    specs: list
    world: int
    workers: int
    bucket_numel: int
    plan: object


def build(specs, world, workers, strategy, method, bucket_numel):
    fraction = workers / world if strategy == "hybrid_opt" else 0.5
    return make_plan(
        specs,
        world,
        strategy=strategy,
        grad_worker_fraction=fraction,
        method=method,
        bucket_numel=bucket_numel,
    )


@st.composite
def cases(draw, strategies=STRATEGIES):
    specs, world = draw(SPECS), draw(st.integers(1, 16))
    strategy, method = draw(st.sampled_from(strategies)), draw(st.sampled_from(METHODS))
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    workers = {"comm_opt": world, "hybrid_opt": draw(st.sampled_from(divisors))}.get(strategy, 1)
    bucket_numel = draw(st.sampled_from([1, 50, 400, 2000, 1 << 22]))
    plan = build(specs, world, workers, strategy, method, bucket_numel)
    return Case(specs, world, workers, bucket_numel, plan)


def of_kind(plan, kind):
    return [op for op in plan.ops() if isinstance(op, kind)]


def numels(op, method):
    """Elements of each member of a message."""
    if isinstance(op, ShareGradients):
        return [spec.a_dim * spec.g_dim for spec in op.members]
    if isinstance(op, ReduceFactors):
        return [packed_numel(spec.dim(f)) + 1 for spec, f in op.members]
    return [decomposition_numel(spec.dim(f), method) for spec, f in op.members]


@for_all(cases())
def test_the_grid_has_the_number_of_gradient_workers_asked_for(case):
    assert [p.layer for p in case.plan.placements] == case.specs
    columns = {p.grad_workers for p in case.plan.placements}
    for column in columns:
        assert len(set(column)) == len(column) == case.workers
        assert set(column) <= set(range(case.world))
    assert sum(len(c) for c in columns) == len({r for c in columns for r in c}), "columns overlap"


@for_all(cases())
def test_every_rank_computes_and_reduces_every_factor_once(case):
    plan = case.plan
    wanted = Counter((spec, f) for spec in case.specs for f in FACTORS)
    everybody = tuple(range(case.world))
    computed = of_kind(plan, ComputeFactor)
    assert Counter((op.layer, op.factor) for op in computed) == wanted
    reduced = of_kind(plan, ReduceFactors)
    members = Counter(m for op in reduced for m in op.members)
    assert members == (wanted if case.world > 1 else Counter())
    assert all(op.ranks == everybody for op in [*computed, *reduced])


@for_all(cases())
def test_each_factor_is_decomposed_once_by_a_gradient_worker_of_its_layer(case):
    decomposed = of_kind(case.plan, Decompose)
    assert Counter((op.layer, op.factor) for op in decomposed) == Counter(
        (spec, f) for spec in case.specs for f in FACTORS
    )
    placement = {p.layer: p for p in case.plan.placements}
    for op in decomposed:
        assert op.ranks == (placement[op.layer].worker(op.factor),)
        assert op.ranks[0] in placement[op.layer].grad_workers


@for_all(cases())
def test_every_gradient_worker_gets_every_decomposition_of_its_layer_once(case):
    got = Counter((op.ranks[0], op.layer, op.factor) for op in of_kind(case.plan, Decompose))
    for op in of_kind(case.plan, ShareDecompositions):
        assert op.root in op.ranks
        got.update((r, *member) for member in op.members for r in op.ranks if r != op.root)
    assert got == Counter(
        (r, p.layer, f) for p in case.plan.placements for r in p.grad_workers for f in FACTORS
    )


@for_all(cases())
def test_every_rank_gets_every_preconditioned_gradient_once(case):
    got = Counter((r, op.layer) for op in of_kind(case.plan, Precondition) for r in op.ranks)
    for op in of_kind(case.plan, ShareGradients):
        assert op.root in op.ranks
        got.update((r, spec) for spec in op.members for r in op.ranks if r != op.root)
    assert got == Counter((r, spec) for spec in case.specs for r in range(case.world))


@for_all(cases())
def test_gradient_workers_precondition(case):
    workers = {p.layer: p.grad_workers for p in case.plan.placements}
    assert {op.layer: op.ranks for op in of_kind(case.plan, Precondition)} == workers


def deadlocks(ops, world):
    """Whether blocking ranks that work off their queues in order get stuck."""
    queues = {r: [op for op in ops if r in op.ranks] for r in range(world)}
    while any(queues.values()):
        heads = {r: q[0] for r, q in queues.items() if q}
        ready = next(
            (op for op in heads.values() if all(heads.get(r) is op for r in op.ranks)), None
        )
        if ready is None:
            return True
        for r in ready.ranks:
            queues[r].pop(0)
    return False


@for_all(cases())
def test_ranks_meet_shared_messages_in_one_order(case):
    ops = list(case.plan.ops())
    assert not deadlocks(ops, case.world)
    for op in ops:  # a rank takes part once, and only a real one
        assert op.ranks
        assert list(op.ranks) == sorted(set(op.ranks))
        assert set(op.ranks) <= set(range(case.world))


@for_all(cases())
def test_messages_are_named_once_and_have_more_than_one_rank(case):
    messages = of_kind(case.plan, Message)
    names = [op.name for op in messages]
    assert len(names) == len(set(names))
    assert all(len(op.ranks) > 1 for op in messages)
    for kind in (ReduceFactors, ShareDecompositions, ShareGradients):
        indices = [op.index for op in messages if isinstance(op, kind)]
        assert indices == list(range(len(indices)))
        assert {op.name for op in messages if isinstance(op, kind)} == {
            f"{kind.__name__}/{i}" for i in indices
        }


@for_all(cases())
def test_a_bucket_holds_its_members_and_closes_as_soon_as_it_reaches_the_cap(case):
    for op in of_kind(case.plan, Message):
        sizes = numels(op, case.plan.method)
        assert op.numel == sum(sizes)
        assert op.members
        last = 1
        if isinstance(op, ReduceFactors):  # A and G of a layer travel together
            assert [m[0] for m in op.members[::2]] == [m[0] for m in op.members[1::2]]
            last = 2
        assert op.numel - sum(sizes[-last:]) < case.bucket_numel


@pytest.mark.parametrize(("cap", "sizes"), [(12, [12, 12]), (13, [18, 6]), (11, [12, 12])])
def test_buckets_by_hand(cap, sizes):
    """All factors are 2 x 2: a rank makes four decompositions of 6 elements, or gradients of 4."""
    specs = [LayerSpec(f"layer{i}", 2, 2) for i in range(4)]
    plan = make_plan(specs, 2, bucket_numel=cap)
    shared = of_kind(plan, ShareDecompositions)
    for root in range(2):
        assert [op.numel for op in shared if op.root == root] == sizes
    gradients = of_kind(make_plan(specs, 2, strategy="mem_opt", bucket_numel=8), ShareGradients)
    assert [(op.root, op.numel) for op in gradients] == [(1, 8), (0, 8)]
    reduced = of_kind(make_plan(specs, 2, bucket_numel=16), ReduceFactors)
    assert [op.numel for op in reduced] == [16, 16]


@for_all(cases())
def test_only_the_last_bucket_of_its_ranks_and_root_is_below_the_cap(case):
    for kind in (ReduceFactors, ShareDecompositions, ShareGradients):
        below = [
            (op.ranks, getattr(op, "root", None))
            for op in of_kind(case.plan, kind)
            if op.numel < case.bucket_numel
        ]
        assert len(below) == len(set(below))


@for_all(cases())
def test_what_a_message_carries_was_made_before_it_on_its_root(case):
    made = {ReduceFactors: ComputeFactor, ShareDecompositions: Decompose}
    done = set()  # (kind of op, rank, member)
    for op in case.plan.ops():
        match op:
            case ComputeFactor() | Decompose():
                done |= {(type(op), r, (op.layer, op.factor)) for r in op.ranks}
            case Precondition():
                done |= {(type(op), r, op.layer) for r in op.ranks}
            case Message():
                roots = op.ranks if isinstance(op, ReduceFactors) else (op.root,)
                kind = made.get(type(op), Precondition)
                assert all((kind, r, m) in done for r in roots for m in op.members)


@for_all(cases())
def test_stages_hold_their_own_kinds_in_order(case):
    plan = case.plan
    kinds = {
        Stage.FACTORS: (ComputeFactor, ReduceFactors),
        Stage.DECOMPOSE: (Decompose, ShareDecompositions),
        Stage.PRECONDITION: (Precondition, ShareGradients),
    }
    for stage in Stage:
        assert all(isinstance(op, kinds[stage]) for op in plan.ops(stage))
    assert list(plan.ops()) == [op for stage in Stage for op in plan.ops(stage)]


@for_all(cases(), st.data())
def test_the_digest_tells_plans_apart_and_equal_ones_not(case, data):
    plan = case.plan
    options = [case.world, case.workers, plan.strategy, plan.method, case.bucket_numel]
    again = [LayerSpec(s.name, s.a_dim, s.g_dim) for s in case.specs]
    assert build(again, *options) == plan
    assert build(again, *options).digest() == plan.digest()

    at = data.draw(st.integers(0, len(again) - 1))
    old = again[at]
    for changes in ({"name": "another"}, {"a_dim": old.a_dim + 1}, {"g_dim": old.g_dim + 1}):
        changed = list(again)
        changed[at] = dataclasses.replace(old, **changes)
        assert build(changed, *options).digest() != plan.digest()
    assert build(again[1:], *options).digest() != plan.digest()
    for strategy in set(STRATEGIES) - {plan.strategy}:
        other = build(again, case.world, 1, strategy, plan.method, case.bucket_numel)
        assert other.digest() != plan.digest()
    method = "inverse" if plan.method == "eigen" else "eigen"
    other = build(again, case.world, case.workers, plan.strategy, method, case.bucket_numel)
    assert other.digest() != plan.digest()


def test_the_digest_is_the_same_in_another_process():
    """Hash order must not enter it: ranks are processes."""
    specs = [LayerSpec(f"layer{i}", 3 + i, 2 + i) for i in range(9)]
    plan = make_plan(specs, 6, strategy="hybrid_opt")
    code = (
        "from kfac_bench.core.plan import *\n"
        "specs = [LayerSpec(f'layer{i}', 3 + i, 2 + i) for i in range(9)]\n"
        "print(make_plan(specs, 6, strategy='hybrid_opt').digest())"
    )
    for seed in "12":
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == plan.digest()


@for_all(SPECS, st.integers(1, 16))
def test_layer_wise_takes_turns(specs, world):
    plan = make_plan(specs, world, strategy="layer_wise")
    for i, placement in enumerate(plan.placements):
        rank = i % world
        assert (placement.a_worker, placement.g_worker) == (rank, rank)
        assert placement.grad_workers == (rank,)


@for_all(cases(["layer_wise", "mem_opt", "hybrid_opt"]))
def test_a_and_g_stay_together_where_not_comm_opt(case):
    assert all(p.a_worker == p.g_worker for p in case.plan.placements)


def test_comm_opt_may_put_a_and_g_on_different_ranks():
    (placement,) = make_plan([LayerSpec("fc", 9, 4)], 2, strategy="comm_opt").placements
    assert (placement.a_worker, placement.g_worker) == (0, 1)
    (placement,) = make_plan([LayerSpec("fc", 4, 9)], 2, strategy="comm_opt").placements
    assert (placement.a_worker, placement.g_worker) == (1, 0)


@for_all(cases(["comm_opt", "mem_opt", "hybrid_opt"]))
def test_the_heaviest_rank_carries_at_most_the_average_and_one_item(case):
    plan = case.plan
    load = [0.0] * case.world
    for op in of_kind(plan, Decompose):
        load[op.ranks[0]] += op.layer.dim(op.factor) ** 3
    items = [[spec.dim(f) ** 3 for f in FACTORS] for spec in case.specs]
    largest = max(max(i) if plan.strategy == "comm_opt" else sum(i) for i in items)
    assert max(load) <= sum(load) / case.world + largest


def test_largest_first_beats_given_order():
    """Two small ones, then a large one: the large one goes first, and alone."""
    dims = [10, 10, 20]
    specs = [LayerSpec(f"layer{i}", n, 1) for i, n in enumerate(dims)]
    plan = make_plan(specs, 2, strategy="mem_opt")
    assert [p.a_worker for p in plan.placements] == [1, 1, 0]


@for_all(SPECS, st.integers(2, 16))
def test_ties_go_to_the_lower_rank_and_the_cost_decides(specs, world):
    same = [LayerSpec(f"layer{i:02}", 5, 5) for i in range(len(specs))]
    plan = make_plan(same, world, strategy="mem_opt")
    assert [p.a_worker for p in plan.placements] == [i % world for i in range(len(same))]
    by_count = make_plan(specs, world, strategy="mem_opt", cost=lambda n: 1.0)
    layers = Counter(p.a_worker for p in by_count.placements)
    assert max(layers.values()) - min(layers[r] for r in range(world)) <= 1


def test_sizes_of_what_is_sent():
    assert [packed_numel(n) for n in (1, 2, 3, 10)] == [1, 3, 6, 55]
    assert decomposition_numel(3, "eigen") == 12
    assert decomposition_numel(3, "inverse") == 6
    assert cubic_cost(4) == 64.0


@pytest.mark.parametrize(
    ("world", "fraction", "workers"), [(6, 4 / 6, 4), (3, 0.5, 2), (16, 3 / 16, 3)]
)
def test_an_uneven_grid_is_refused_with_advice(world, fraction, workers):
    specs = [LayerSpec("fc", 2, 2)]
    with pytest.raises(ValueError, match="do not divide the ranks") as error:
        make_plan(specs, world, strategy="hybrid_opt", grad_worker_fraction=fraction)
    assert f"grad_worker_fraction={fraction:g} of {world} ranks" in str(error.value)
    assert f"is {workers} gradient workers" in str(error.value)
    assert f"choose k/{world} with k a divisor" in str(error.value)


@pytest.mark.parametrize("fraction", [1.5, -0.5])
def test_a_fraction_out_of_range_is_refused(fraction):
    specs = [LayerSpec("fc", 2, 2)]
    with pytest.raises(ValueError, match=f"grad_worker_fraction={fraction}"):
        make_plan(specs, 4, strategy="hybrid_opt", grad_worker_fraction=fraction)


@pytest.mark.parametrize("strategy", ["comm_opt", "layer_wise", "mem_opt"])
def test_the_fraction_is_read_by_hybrid_opt_alone(strategy):
    specs = [LayerSpec("fc", 2, 2)]
    plain = make_plan(specs, 6, strategy=strategy)
    assert make_plan(specs, 6, strategy=strategy, grad_worker_fraction=0.7) == plain


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="choose one of comm_opt, layer_wise, mem_opt, hybrid_opt"):
        make_plan([], strategy="fastest")
    with pytest.raises(ValueError, match="choose one of eigen, inverse"):
        make_plan([], method="lu")


def test_a_world_of_one_sends_nothing():
    specs = [LayerSpec("fc", 4, 2)]
    for strategy in STRATEGIES:
        plan = make_plan(specs, 1, strategy=strategy, grad_worker_fraction=1.0)
        assert of_kind(plan, Message) == []


def test_plan_and_estimate_import_no_torch():
    code = (
        "import sys, kfac_bench.core.plan, kfac_bench.core.estimate\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
