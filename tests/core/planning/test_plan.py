"""Properties of every plan, whatever the layers, the world, the strategy and the bucket size."""

import dataclasses
import hashlib
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest
from hypothesis import assume
from hypothesis import strategies as st

from kfac_bench.core.planning.estimate import (
    decomposition_numel,
    factor_numel,
    has_second_moment,
    kept_bytes,
    memory_bytes,
    moments_bytes,
    packed_numel,
)
from kfac_bench.core.planning.layer_spec import FACTORS, LayerSpec
from kfac_bench.core.planning.plan import (
    BALANCES,
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
    ShareDecompositions,
    ShareGradients,
    Stage,
)
from kfac_bench.core.planning.planner import SECONDS, cubic_cost, make_plan, measured_cost
from tests.support.properties import for_all

DIMS = st.one_of(st.sampled_from([1, 2, 3, 8]), st.integers(1, 60))
SHAPES = st.tuples(
    DIMS,
    DIMS,
    st.sampled_from([1, 1, 1, 2, 5]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([False, False, False, True]),
)
SPECS = st.lists(SHAPES, min_size=1, max_size=12).map(
    lambda shapes: [LayerSpec(f"layer{i}", *shape) for i, shape in enumerate(shapes)]
)
ADJUSTABLE = [name for name, row in STRATEGY_TABLE.items() if row.adjustable]
MESSAGES = (ReduceFactors, ReduceSecondMoments, ShareDecompositions, ShareGradients)


@dataclasses.dataclass
class Case:
    """A plan and the options that it was made with."""

    specs: list
    world: int
    workers: int
    options: dict
    plan: object

    @property
    def bucket_numel(self):
        return self.options["bucket_numel"]


def build(specs, world, workers, strategy, **options):
    fraction = workers / world if strategy in ADJUSTABLE else 0.5
    return make_plan(specs, world, strategy=strategy, grad_worker_fraction=fraction, **options)


@st.composite
def cases(draw, strategies=STRATEGIES, methods=METHODS):
    specs, world, strategy = (
        draw(SPECS),
        draw(st.integers(1, 16)),
        draw(st.sampled_from(strategies)),
    )
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    workers = draw(st.sampled_from(divisors)) if strategy in ADJUSTABLE else 1
    workers = world if strategy == "comm_opt" else workers
    some = workers < world or (strategy == "local_factors" and world > 1)
    possible = [m for m in methods if m != "ekfac" or not some]
    options = {
        "colocate_factors": draw(st.sampled_from([None, None, False, True])),
        "balance": draw(st.sampled_from(BALANCES)),
        "method": draw(st.sampled_from(possible)),
        "bucket_numel": draw(st.sampled_from([1, 50, 400, 2000, 1 << 22])),
        "batch_numel": draw(st.sampled_from([0, 1, 50, 1000, 1 << 22])),
        "spread": draw(st.sampled_from([1, 2, 3, 9, 100])),
    }
    plan = build(specs, world, workers, strategy, **options)
    return Case(specs, world, workers, options, plan)


def of_kind(plan, kind):
    return [op for op in plan.ops() if isinstance(op, kind)]


def is_diagonal(member):
    spec, factor = member
    return spec.a_diagonal if factor == "A" else spec.g_diagonal


def numels(op, method):
    """Elements of each member of a message, from the shapes."""
    if isinstance(op, ShareGradients):
        return [spec.groups * spec.a_dim * spec.g_dim for spec in op.members]
    if isinstance(op, ReduceSecondMoments):
        return [spec.groups * spec.a_dim * spec.g_dim + 1 for spec in op.members]
    sizes = []
    for spec, f in op.members:
        n = spec.a_dim if f == "A" else spec.g_dim
        triangle = n if is_diagonal((spec, f)) else n * (n + 1) // 2
        if isinstance(op, ReduceFactors):
            sizes.append(spec.groups * triangle + 1)
        else:
            inverse = method == "inverse" or is_diagonal((spec, f))
            sizes.append(spec.groups * (triangle if inverse else n + n * n))
    return sizes


@for_all(cases())
def test_the_grid_has_the_number_of_gradient_workers_asked_for(case):
    assert [p.layer for p in case.plan.placements] == case.specs
    columns = {p.grad_workers for p in case.plan.placements}
    for column in columns:
        assert len(set(column)) == len(column) == case.workers
        assert set(column) <= set(range(case.world))
    assert sum(len(c) for c in columns) == len({r for c in columns for r in c}), "columns overlap"


@for_all(cases())
def test_every_factor_is_computed_and_reduced_once_for_those_who_keep_it(case):
    """All ranks compute it, or with local factors its owner; the sum goes to all or the owner."""
    plan, everybody = case.plan, tuple(range(case.world))
    wanted = Counter((spec, f) for spec in case.specs for f in FACTORS)
    owner = {(p.layer, f): p.worker(f) for p in plan.placements for f in FACTORS}
    computed = of_kind(plan, ComputeFactor)
    assert Counter((op.layer, op.factor) for op in computed) == wanted
    reduced = of_kind(plan, ReduceFactors)
    members = Counter(m for op in reduced for m in op.members)
    sent = case.world > 1 and plan.strategy != "local_factors"
    assert members == (wanted if sent else Counter())
    assert all(op.ranks == everybody for op in reduced)
    for op in computed:
        mine = (owner[op.layer, op.factor],)
        assert op.ranks == (mine if plan.strategy == "local_factors" else everybody)
    for op in reduced:
        owners = {owner[m] for m in op.members} if plan.strategy == "owner_reduce" else {None}
        assert owners == {op.root}


@for_all(cases())
def test_ranks_that_get_a_factor_keep_it(case):
    """The rank that decomposes a factor is one of them."""
    plan = case.plan
    has = {(r, op.layer, op.factor) for op in of_kind(plan, ComputeFactor) for r in op.ranks}
    for op in of_kind(plan, ReduceFactors):
        if op.root is not None:
            has -= {(r, *m) for m in op.members for r in op.ranks if r != op.root}
    keeps = {
        (r, p.layer, f)
        for p in plan.placements
        for f in FACTORS
        for r in range(case.world)
        if plan.keeps(r, p, f)
    }
    assert has == keeps
    decomposed = of_kind(plan, Decompose)
    assert {(r, *m) for op in decomposed for m in op.members for r in op.ranks} <= keeps
    both = all(p.a_worker == p.workers[-1] for p in plan.placements)
    assert plan.colocated == (both or plan.factors_on == "all")


@for_all(cases(["comm_opt", "hybrid_opt"]))
def test_second_moments_are_those_of_ekfac_where_no_factor_is_diagonal(case):
    plan, everybody = case.plan, tuple(range(case.world))
    wanted = Counter(
        spec
        for spec in case.specs
        if plan.method == "ekfac" and not spec.a_diagonal and not spec.g_diagonal
    )
    computed = of_kind(plan, ComputeSecondMoment)
    assert Counter(op.layer for op in computed) == wanted
    reduced = of_kind(plan, ReduceSecondMoments)
    members = Counter(m for op in reduced for m in op.members)
    assert members == (wanted if case.world > 1 else Counter())
    assert all(op.ranks == everybody for op in [*computed, *reduced])


@for_all(cases())
def test_each_factor_is_decomposed_once_over_all_slices(case):
    """One gradient worker decomposes a factor; all that have a diagonal decompose it."""
    decomposed = of_kind(case.plan, Decompose)
    assert Counter(m for op in decomposed for m in op.members) == Counter(
        (spec, f) for spec in case.specs for f in FACTORS
    )
    placement = {p.layer: p for p in case.plan.placements}
    for op in decomposed:
        for spec, f in op.members:
            workers = placement[spec].grad_workers
            if is_diagonal((spec, f)) and case.plan.factors_on == "all":
                assert op.ranks == workers
            else:
                assert op.ranks == (placement[spec].worker(f),)
                assert op.ranks[0] in workers


@for_all(cases())
def test_every_gradient_worker_gets_every_decomposition_of_its_layer_once(case):
    got = Counter()
    for op in of_kind(case.plan, Decompose):
        got.update((r, *member) for member in op.members for r in op.ranks)
    for op in of_kind(case.plan, ShareDecompositions):
        assert op.root in op.ranks
        if case.plan.factors_on == "all":
            assert not any(map(is_diagonal, op.members)), "who has a diagonal needs no message"
        got.update((r, *member) for member in op.members for r in op.ranks if r != op.root)
    assert got == Counter(
        (r, p.layer, f) for p in case.plan.placements for r in p.grad_workers for f in FACTORS
    )


# Slices


def work_of(spec, factor):
    if is_diagonal((spec, factor)):
        return 0
    return spec.groups * (spec.a_dim if factor == "A" else spec.g_dim) ** 3


@for_all(cases())
def test_a_slice_sends_only_what_it_decomposed(case):
    """It runs at a step of its own."""
    assert 1 <= len(case.plan.slices) <= case.options["spread"]
    for part in case.plan.slices:
        assert part
        made = {(r, m) for op in part if isinstance(op, Decompose) for r in op.ranks
                for m in op.members}  # fmt: skip
        for op in part:
            assert isinstance(op, Decompose | ShareDecompositions)
            if isinstance(op, ShareDecompositions):
                assert all((op.root, m) in made for m in op.members)
    assert case.plan.decompose == tuple(op for part in case.plan.slices for op in part)


def parts_of(plan):
    """Return the factors that each slice decomposes."""
    return [
        {m for op in part if isinstance(op, Decompose) for m in op.members} for part in plan.slices
    ]


@for_all(cases())
def test_no_slice_is_heavier_than_the_average_and_one_unit(case):
    """A unit is a factor, or with EKFAC A and G of a layer."""
    parts, ekfac = parts_of(case.plan), case.plan.method == "ekfac"
    load = [sum(work_of(*m) for m in part) for part in parts]
    works = [[work_of(spec, f) for f in FACTORS] for spec in case.specs]
    largest = max(sum(w) if ekfac else max(w) for w in works)
    assert max(load) <= sum(load) / len(load) + largest
    # as many as make the longest step shorter, and no more
    most = -(-sum(load) // largest) if largest else 1
    assert len(parts) == min(case.options["spread"], most)


@for_all(cases(["comm_opt"], ["ekfac"]))
def test_ekfac_decomposes_a_and_g_of_a_layer_in_one_slice(case):
    for part in parts_of(case.plan):
        assert {(spec, "A") for spec, _ in part} | {(spec, "G") for spec, _ in part} == part


@for_all(cases())
def test_slices_are_the_same_on_any_world_with_any_strategy(case):
    """Several ranks therefore take the same steps as one process."""
    options = {k: case.options[k] for k in ("method", "spread")}
    assert parts_of(case.plan) == parts_of(make_plan(case.specs, 1, **options))


def test_slices_by_hand():
    """27 + 27 + 8 + 8 + 1 + 1 = 72 of work on one rank; 72 / 27 is 3 slices at most."""
    specs = [LayerSpec("x", 3, 3), LayerSpec("y", 2, 2), LayerSpec("z", 1, 1)]

    def parts(spread, method="eigen"):
        plan = make_plan(specs, method=method, spread=spread)
        return [{f"{spec.name}{f}" for spec, f in part} for part in parts_of(plan)]

    assert parts(1) == [{"xA", "xG", "yA", "yG", "zA", "zG"}]
    assert parts(2) == [{"xA", "yA", "zA"}, {"xG", "yG", "zG"}]
    assert parts(3) == parts(99) == [{"xA"}, {"xG"}, {"yA", "yG", "zA", "zG"}]
    assert parts(99, "ekfac") == [{"xA", "xG"}, {"yA", "yG", "zA", "zG"}]


def test_slices_follow_the_cost_and_diagonals_weigh_nothing():
    specs = [LayerSpec("x", 9, 2), LayerSpec("y", 50, 2, a_diagonal=True)]
    assert len(make_plan(specs, spread=9).slices) == 2  # 729 + 8 + 8
    assert len(make_plan(specs, spread=9, cost=lambda n: 1.0).slices) == 3
    only = [LayerSpec("x", 9, 2, a_diagonal=True, g_diagonal=True)]
    assert len(make_plan(only, spread=9).slices) == 1


# Batches


@for_all(cases())
def test_batches_hold_equal_shapes_of_the_same_ranks_and_respect_their_size(case):
    most, placement = case.options["batch_numel"], {p.layer: p for p in case.plan.placements}
    for op in of_kind(case.plan, Decompose):
        assert len({s.factor_shape(f) for s, f in op.members}) == 1
        assert len({placement[s].grad_workers for s, _ in op.members}) == 1
        numel = sum(s.groups * s.dim(f) ** (2 - is_diagonal((s, f))) for s, f in op.members)
        assert len(op.members) == 1 or numel <= most
    for op in of_kind(case.plan, Precondition):
        assert len({(s.groups, s.a_dim, s.g_dim, s.a_diagonal, s.g_diagonal)
                    for s in op.members}) == 1  # fmt: skip
        numel = sum(s.groups * s.a_dim * s.g_dim for s in op.members)
        assert len(op.members) == 1 or numel <= most


@for_all(cases())
def test_no_two_batches_of_a_kind_could_be_one(case):
    """Among the batches of a slice and its ranks, only the last has room."""
    most = case.options["batch_numel"]
    for ops in (*case.plan.slices, case.plan.precondition):
        room = set()
        for op in ops:
            if isinstance(op, Message):
                continue
            if isinstance(op, Decompose):
                spec, f = op.members[0]
                workers = next(p.grad_workers for p in case.plan.placements if p.layer == spec)
                key = op.ranks, workers, spec.factor_shape(f)
                numel = factor_numel(spec, f)
            else:
                spec = op.members[0]
                key = op.ranks, spec.factor_shape("A"), spec.factor_shape("G")
                numel = spec.grad_numel
            assert key not in room, "an earlier batch had room"
            if (len(op.members) + 1) * numel <= most:
                room.add(key)


def test_batches_by_hand():
    """Three 2 x 2 factors of each kind: two fit into 8 elements."""
    specs = [LayerSpec(f"layer{i}", 2, 2) for i in range(3)] + [LayerSpec("odd", 3, 2)]

    def sizes(kind, batch_numel):
        plan = make_plan(specs, batch_numel=batch_numel)
        return sorted(len(op.members) for op in of_kind(plan, kind))

    assert sizes(Decompose, 0) == sizes(Decompose, 7) == [1] * 8
    assert sizes(Decompose, 8) == [1, 1, 2, 2, 2]  # seven of 2 x 2, one of 3 x 3
    assert sizes(Decompose, 28) == [1, 7]
    assert sizes(Precondition, 0) == [1] * 4
    assert sizes(Precondition, 8) == [1, 1, 2]
    assert sizes(Precondition, 12) == [1, 3]


def test_layers_with_other_rules_are_other_batches():
    """An update of a hidden layer is orthogonalized, and the clip counts the inputs of a layer."""
    plain = LayerSpec("plain", 3, 2)
    hidden = dataclasses.replace(plain, name="hidden", orthogonal_steps=3)
    lookup = dataclasses.replace(plain, name="lookup", is_lookup=True)
    plan = make_plan([plain, hidden, lookup], method="eigen_adam", batch_numel=1 << 20)
    assert [len(op.members) for op in of_kind(plan, Precondition)] == [1, 1, 1]


@for_all(cases())
def test_batches_and_slices_change_nothing_else(case):
    options = case.options | {"batch_numel": 0, "spread": 1}
    plain = build(case.specs, case.world, case.workers, case.plan.strategy, **options)
    assert plain.placements == case.plan.placements
    assert plain.factors == case.plan.factors
    assert len(plain.slices) == 1
    for kind in (Decompose, Precondition, ShareDecompositions, ShareGradients):
        each = [
            Counter((op.ranks, getattr(op, "root", None), m) for op in of_kind(p, kind)
                    for m in op.members)
            for p in (plain, case.plan)
        ]  # fmt: skip
        assert each[0] == each[1]
    assert all(
        len(op.members) == 1 for op in plain.ops() if isinstance(op, Decompose | Precondition)
    )


# Gradients


@for_all(cases())
def test_every_rank_gets_every_preconditioned_gradient_once(case):
    got = Counter()
    for op in of_kind(case.plan, Precondition):
        got.update((r, spec) for spec in op.members for r in op.ranks)
    for op in of_kind(case.plan, ShareGradients):
        assert op.root in op.ranks
        got.update((r, spec) for spec in op.members for r in op.ranks if r != op.root)
    assert got == Counter((r, spec) for spec in case.specs for r in range(case.world))


@for_all(cases())
def test_gradient_workers_precondition(case):
    workers = {p.layer: p.grad_workers for p in case.plan.placements}
    ops = of_kind(case.plan, Precondition)
    assert {spec: op.ranks for op in ops for spec in op.members} == workers


# Messages


def deadlocks(ops, world):
    """Return whether ranks that block in each message, in order, get stuck."""
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
    for kind in MESSAGES:
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
        if isinstance(op, ReduceFactors) and case.plan.colocated:  # A and G travel together
            assert [m[0] for m in op.members[::2]] == [m[0] for m in op.members[1::2]]
            last = 2
        elif isinstance(op, ReduceFactors) and op.members[-1][0] == op.members[-2:][0][0]:
            last = len(op.members[-2:])
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
    """This holds in each part that runs at a step of its own."""
    for ops in (case.plan.factors, *case.plan.slices, case.plan.precondition):
        below = [
            (type(op), op.ranks, getattr(op, "root", None))
            for op in ops
            if isinstance(op, Message) and op.numel < case.bucket_numel
        ]
        assert len(below) == len(set(below))


@for_all(cases())
def test_the_root_makes_what_a_message_carries_before_it_is_sent(case):
    made = {
        ReduceFactors: ComputeFactor,
        ReduceSecondMoments: ComputeSecondMoment,
        ShareDecompositions: Decompose,
        ShareGradients: Precondition,
    }
    done = set()  # (kind of op, rank, member)
    for op in case.plan.ops():
        match op:
            case ComputeFactor():
                done |= {(type(op), r, (op.layer, op.factor)) for r in op.ranks}
            case ComputeSecondMoment():
                done |= {(type(op), r, op.layer) for r in op.ranks}
            case Decompose() | Precondition():
                done |= {(type(op), r, m) for m in op.members for r in op.ranks}
            case Message():
                made_on = [op.root] if hasattr(op, "root") else op.ranks
                roots = op.ranks if isinstance(op, ReduceFactors) else made_on
                assert all((made[type(op)], r, m) in done for r in roots for m in op.members)


@for_all(cases())
def test_stages_hold_their_own_kinds_in_order(case):
    plan = case.plan
    kinds = {
        Stage.FACTORS: (
            ComputeFactor,
            ReduceFactors,
            ComputeSecondMoment,
            ReduceSecondMoments,
        ),
        Stage.DECOMPOSE: (Decompose, ShareDecompositions),
        Stage.PRECONDITION: (Precondition, ShareGradients),
    }
    for stage in Stage:
        assert all(isinstance(op, kinds[stage]) for op in plan.ops(stage))
    assert list(plan.ops()) == [op for stage in Stage for op in plan.ops(stage)]


@for_all(cases(), st.data())
def test_digests_are_equal_only_for_equal_plans(case, data):
    plan, options = case.plan, case.options
    asked = (case.world, case.workers, plan.strategy)
    again = [dataclasses.replace(s) for s in case.specs]
    assert build(again, *asked, **options) == plan
    assert build(again, *asked, **options).digest() == plan.digest()

    at = data.draw(st.integers(0, len(again) - 1))
    old = again[at]
    for changes in (
        {"name": "another"},
        {"a_dim": old.a_dim + 1},
        {"g_dim": old.g_dim + 1},
        {"groups": old.groups + 1},
        {"a_diagonal": not old.a_diagonal},
        {"g_diagonal": not old.g_diagonal},
    ):
        changed = list(again)
        changed[at] = dataclasses.replace(old, **changes)
        assert build(changed, *asked, **options).digest() != plan.digest()
    assert build(again[1:], *asked, **options).digest() != plan.digest()
    for strategy in set(STRATEGIES) - {plan.strategy}:
        workers = case.world if plan.method == "ekfac" else 1
        refused = strategy not in ("comm_opt", "hybrid_opt", "owner_reduce")
        if plan.method == "ekfac" and refused and case.world > 1:
            continue
        other = build(again, case.world, workers, strategy, **options)
        assert other.digest() != plan.digest()
    for method in set(METHODS) - {plan.method}:
        some = case.workers < case.world or (plan.factors_on == "local" and case.world > 1)
        if method != "ekfac" or not some:
            other = build(again, *asked, **options | {"method": method})
            assert other.digest() != plan.digest()


@for_all(cases())
def test_digests_differ_for_other_slices_batches_and_buckets(case):
    asked = (case.specs, case.world, case.workers, case.plan.strategy)
    for changes in ({"spread": 1}, {"batch_numel": 0}, {"bucket_numel": 1}):
        other = build(*asked, **case.options | changes)
        tables = [(p.factors, p.slices, p.precondition) for p in (other, case.plan)]
        assert (other.digest() == case.plan.digest()) == (tables[0] == tables[1])
    assume(len(case.plan.slices) > 1)
    assert build(*asked, **case.options | {"spread": 1}).digest() != case.plan.digest()


def test_the_digest_is_the_same_in_another_process():
    """The order of a hash table must not enter the digest: ranks are processes."""
    specs = [LayerSpec(f"layer{i}", 3 + i % 4, 2 + i, 1 + i % 2) for i in range(9)]
    plan = make_plan(specs, 6, strategy="hybrid_opt", spread=4, batch_numel=999)
    code = (
        "from kfac_bench.core.planning.planner import *\n"
        "specs = [LayerSpec(f'layer{i}', 3 + i % 4, 2 + i, 1 + i % 2) for i in range(9)]\n"
        "options = {'strategy': 'hybrid_opt', 'spread': 4, 'batch_numel': 999}\n"
        "print(make_plan(specs, 6, **options).digest())"
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


def test_plans_are_those_of_earlier_versions():
    """One hash stands for 248 plans. If a plan changes on purpose, put the new hash here."""
    shapes = [(5, 3), (8, 8), (3, 5, 2), (40, 2, 1, True), (8, 8), (2, 9, 1, False, True), (27, 16)]
    specs = [LayerSpec(f"layer{i}", *shape) for i, shape in enumerate(shapes)]
    sizes = {"bucket_numel": 100, "batch_numel": 200, "spread": 3}
    digests = []
    for world, strategy, method, itemsize, sharded in product(
        (1, 2, 6), STRATEGIES, METHODS, (4, 2), (False, True)
    ):
        if method != "ekfac" or world == 1 or strategy == "comm_opt":
            options = {"strategy": strategy, "method": method, "itemsize": itemsize, **sizes}
            digests.append(make_plan(specs, world, sharded=sharded, **options).digest())
    assert len(digests) == 248
    assert hashlib.sha256("".join(digests).encode()).hexdigest()[:16] == "82c5da180c88ca45"


@for_all(SPECS, st.integers(1, 16))
def test_layer_wise_takes_turns(specs, world):
    plan = make_plan(specs, world, strategy="layer_wise")
    for i, placement in enumerate(plan.placements):
        rank = i % world
        assert (placement.a_worker, placement.workers[-1]) == (rank, rank)
        assert placement.grad_workers == (rank,)


@for_all(cases())
def test_a_and_g_share_a_rank_unless_comm_opt_or_the_option_parts_them(case):
    asked = case.options["colocate_factors"]
    if asked or (asked is None and case.plan.strategy != "comm_opt") or case.workers == 1:
        assert all(p.a_worker == p.workers[-1] for p in case.plan.placements)


@pytest.mark.parametrize("strategy", ["comm_opt", *ADJUSTABLE])
def test_colocate_factors_decides_whether_a_and_g_share_a_rank(strategy):
    specs = [LayerSpec("fc", 9, 4)]
    options = {"strategy": strategy, "grad_worker_fraction": 1.0}
    for colocate in (False, True):
        (placement,) = make_plan(specs, 2, colocate_factors=colocate, **options).placements
        assert (placement.a_worker, placement.workers[-1]) == (0, int(not colocate))


def test_comm_opt_may_put_a_and_g_on_different_ranks():
    (placement,) = make_plan([LayerSpec("fc", 9, 4)], 2, strategy="comm_opt").placements
    assert (placement.a_worker, placement.workers[-1]) == (0, 1)
    (placement,) = make_plan([LayerSpec("fc", 4, 9)], 2, strategy="comm_opt").placements
    assert (placement.a_worker, placement.workers[-1]) == (1, 0)


@for_all(cases(["comm_opt", "mem_opt", "hybrid_opt", "owner_reduce", "local_factors"]))
def test_the_heaviest_rank_carries_at_most_the_average_and_one_item(case):
    plan = case.plan
    assume(case.options["balance"] == "compute")
    load = [0.0] * case.world
    for op in of_kind(plan, Decompose):
        load[op.ranks[0]] += sum(work_of(*m) for m in op.members)
    items = [[work_of(spec, f) for f in FACTORS] for spec in case.specs]
    split = case.options["colocate_factors"] is False or (
        case.options["colocate_factors"] is None and plan.strategy == "comm_opt"
    )
    # a column gets a layer, a worker in it an item
    largest = max(map(sum, items)) / case.workers if case.workers < case.world else 0
    largest += max(max(i) if split else sum(i) for i in items)
    assert max(load) <= sum(load) / case.world + largest


@for_all(cases(["mem_opt", "hybrid_opt", "owner_reduce", "local_factors"]))
def test_the_fullest_rank_keeps_at_most_the_average_and_one_layer(case):
    """Memory is balanced over columns first, and then over the workers of a column."""
    plan = case.plan
    assume(case.options["balance"] == "memory" and plan.method != "ekfac")
    kept = [sum(memory_bytes(plan, r).values()) for r in range(case.world)]
    if plan.factors_on == "all":
        everywhere = memory_bytes(plan, 0)["factors"]
        kept = [k - everywhere for k in kept]
    layers = [
        moments_bytes(s, plan.method) + sum(sum(kept_bytes(s, f, plan.method, 4)) for f in FACTORS)
        for s in case.specs
    ]
    assert max(kept) <= sum(kept) / case.world + 2 * max(layers)


def test_memory_and_compute_balance_by_hand():
    """20^3 is more than twelve times 8^3, but its decomposition takes less than twelve of 8."""
    specs = [LayerSpec("large", 20, 1), *(LayerSpec(f"small{i:02}", 8, 1) for i in range(12))]

    def layers_of_the_large_ones_rank(balance, cost=cubic_cost):
        plan = make_plan(specs, 2, strategy="mem_opt", balance=balance, cost=cost)
        rank = plan.placements[0].a_worker
        return sum(p.a_worker == rank for p in plan.placements)

    assert layers_of_the_large_ones_rank("compute") == 1
    # 420 + 2 and 72 + 2 elements each: 422 + 3 * 74 against 9 * 74
    assert layers_of_the_large_ones_rank("memory") == 4
    with pytest.raises(ValueError, match="balance='luck': choose one of compute, memory"):
        make_plan(specs, 2, balance="luck")


def test_two_workers_of_a_column_share_the_memory_of_a_factor():
    """A large layer keeps 160 elements of A on each of two workers, a small one keeps 8.

    That is n^2 + n for the decomposition and n^2 / 2 for the factor, whose owner is one of the two.
    G is 1 x 1 and takes 2.5 elements: 162.5 is more than 15 times 10.5 and less than 16 times. So
    the 17th small layer joins the large one. If factors counted fully, 213 and 13, it would not.
    """
    specs = [LayerSpec("large", 10, 1), *(LayerSpec(f"small{i:02}", 2, 1) for i in range(17))]
    options = {"strategy": "owner_reduce", "grad_worker_fraction": 0.5, "balance": "memory"}
    placements = make_plan(specs, 4, **options).placements
    column = placements[0].grad_workers
    assert len(column) == 2
    assert [p.layer.name for p in placements if p.grad_workers == column] == ["large", "small16"]


def test_the_measured_cost_passes_through_its_table_and_grows():
    for method in METHODS:
        cost, table = measured_cost(method), SECONDS["inverse" if method == "inverse" else "eigen"]
        for n, seconds in table.items():
            assert cost(n) == pytest.approx(1e9 * seconds, rel=1e-6)
        each = [cost(n) for n in range(1, 20_000, 7)]
        assert each == sorted(each)
        assert all(c == int(c) > 0 for c in each)
        low, between, high = cost(512), cost(724), cost(1024)  # 724 is between them: sqrt(2)
        assert between == pytest.approx((low * high) ** 0.5, rel=2e-3)
        assert cost(9216) > 5 * cost(4608)  # prolonged


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
    dense = [LayerSpec(s.name, s.a_dim, s.g_dim) for s in specs]
    by_count = make_plan(dense, world, strategy="mem_opt", cost=lambda n: 1.0)
    layers = Counter(p.a_worker for p in by_count.placements)
    assert max(layers.values()) - min(layers[r] for r in range(world)) <= 1


def test_placement_weighs_groups_but_no_diagonals():
    """27, and twice 4^3; 900 rows of a diagonal are no work."""
    specs = [
        LayerSpec("x", 4, 1),
        LayerSpec("y", 3, 1, groups=3),
        LayerSpec("z", 900, 1, a_diagonal=True),
    ]
    plan = make_plan(specs, 2, strategy="mem_opt")
    assert [p.a_worker for p in plan.placements] == [1, 0, 1]  # 65; 84; 1 to the lighter


def test_sizes_of_what_is_kept_and_sent():
    specs = [LayerSpec("fc", n, 1) for n in (1, 2, 3, 10)]
    assert [packed_numel(s, "A") for s in specs] == [1, 3, 6, 55]
    assert [factor_numel(s, "A") for s in specs] == [1, 4, 9, 100]
    assert decomposition_numel(specs[2], "A", "eigen") == 12
    assert decomposition_numel(specs[2], "A", "ekfac") == 12
    assert decomposition_numel(specs[2], "A", "inverse") == 6
    grouped = LayerSpec("conv", 3, 5, groups=4, g_diagonal=True)
    assert [packed_numel(grouped, f) for f in FACTORS] == [24, 20]
    assert [factor_numel(grouped, f) for f in FACTORS] == [36, 20]
    assert [grouped.factor_shape(f) for f in FACTORS] == [(4, 3, 3), (4, 5)]
    assert [decomposition_numel(grouped, "A", m) for m in METHODS] == [48, 24, 48, 48]
    assert [decomposition_numel(grouped, "G", m) for m in METHODS] == [20] * 4
    assert [decomposition_numel(grouped, "G", m, 2) for m in METHODS] == [40] * 4
    assert kept_bytes(grouped, "A", "eigen", 2) == (2 * 36 + 4 * 4, 2 * 36 + 4 * 12)
    assert kept_bytes(grouped, "G", "eigen", 2) == (80, 80)
    assert (grouped.grad_shape, grouped.grad_numel) == ((4, 5, 3), 60)
    assert cubic_cost(4) == 64.0


def test_where_ekfac_has_second_moments():
    dense, diagonal = LayerSpec("fc", 3, 2), LayerSpec("head", 3, 2, g_diagonal=True)
    assert [has_second_moment(dense, m) for m in METHODS] == [False, False, True, False]
    assert not has_second_moment(diagonal, "ekfac")
    assert not has_second_moment(LayerSpec("embedding", 3, 2, a_diagonal=True), "ekfac")


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "comm_opt"])
def test_ekfac_is_refused_where_ranks_lack_eigenvectors(strategy):
    specs = [LayerSpec("fc", 2, 2)]
    with pytest.raises(ValueError, match=f"method=ekfac .*strategy={strategy} .*choose comm_opt"):
        make_plan(specs, 4, strategy=strategy, method="ekfac")
    make_plan(specs, 1, strategy=strategy, method="ekfac")  # one rank has all there is
    options = {"grad_worker_fraction": 1.0, "method": "ekfac"}
    make_plan(specs, 4, strategy="hybrid_opt", **options)
    make_plan(specs, 4, strategy="owner_reduce", **options)
    with pytest.raises(ValueError, match=r"method=ekfac .*choose comm_opt"):
        make_plan(specs, 4, strategy="local_factors", **options)


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


def test_an_odd_number_of_ranks_has_no_half():
    with pytest.raises(ValueError, match="hybrid_opt needs an even number of ranks, not 3"):
        make_plan([LayerSpec("fc", 2, 2)], 3, strategy="hybrid_opt")


@pytest.mark.parametrize("fraction", [1.5, 0, -0.5])
def test_a_fraction_out_of_range_is_refused(fraction):
    specs = [LayerSpec("fc", 2, 2)]
    with pytest.raises(ValueError, match=f"grad_worker_fraction={fraction}"):
        make_plan(specs, 4, strategy="hybrid_opt", grad_worker_fraction=fraction)


@pytest.mark.parametrize("strategy", ["comm_opt", "layer_wise", "mem_opt"])
def test_strategies_with_a_fixed_fraction_ignore_the_option(strategy):
    specs = [LayerSpec("fc", 2, 2)]
    plain = make_plan(specs, 6, strategy=strategy)
    assert make_plan(specs, 6, strategy=strategy, grad_worker_fraction=0.7) == plain


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="choose one of comm_opt, layer_wise, mem_opt, hybrid_opt"):
        make_plan([], strategy="fastest")
    with pytest.raises(ValueError, match="choose one of eigen, inverse, ekfac"):
        make_plan([], method="lu")


def test_a_world_of_one_sends_nothing():
    specs = [LayerSpec("fc", 4, 2)]
    for strategy in STRATEGIES:
        plan = make_plan(specs, 1, strategy=strategy, grad_worker_fraction=1.0)
        assert of_kind(plan, Message) == []


def test_plan_and_estimate_import_no_torch():
    code = (
        "import sys; from kfac_bench.core.planning import estimate, plan, planner\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_no_layers_make_an_empty_plan():
    assert list(make_plan([], 2, spread=3).ops()) == []
