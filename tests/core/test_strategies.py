"""Every strategy on real gloo ranks: equal to one process, on all ranks, and to its own plan."""

import copy
import dataclasses
import io
import os
import warnings
from collections import Counter, defaultdict
from itertools import chain
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_bench.core import KFAC
from kfac_bench.core.distributed.collective import SingleProcess, TorchCollective
from kfac_bench.core.planning.estimate import memory_bytes, payload_bytes
from kfac_bench.core.planning.layer_spec import FACTORS
from kfac_bench.core.planning.plan import (
    METHODS,
    STRATEGIES,
    Decompose,
    Message,
    Precondition,
    ReduceFactors,
    ReduceSecondMoments,
    Stage,
)
from kfac_bench.core.planning.planner import make_plan
from kfac_bench.core.schedule import Schedules
from tests.support import oracle
from tests.support.distributed import RankFailed, run_ranks
from tests.support.quick import quick_if, slow
from tests.support.training import (
    OPTIONS,
    STEPS,
    DeadUnits,
    Mixed,
    adaptive,
    after_step,
    assert_close,
    batch,
    held_bytes,
    is_clipped,
    loss_of,
    make_kfac,
    my_part,
    one_process,
    optimizer_of,
    owners_alone,
    raw_bytes,
    sentences,
    sgd,
    sha256,
    tiny_model,
    train_step,
    weights_of,
)

pytestmark = pytest.mark.ranks
torch.set_num_threads(1)

RUNS = {Stage.FACTORS: 5, Stage.DECOMPOSE: 3, Stage.PRECONDITION: 5}  # of STEPS
SLICES = {False: [[0, 2, 4]], True: [[0, 2, 4], [0, 1, 3]]}  # spread: when each slice is due
SMALL = {"bucket_numel": 30}  # many messages
LARGE = {"bucket_numel": 1 << 22}  # one of each root and slice
CHOICES = [(s, m) for s in STRATEGIES for m in METHODS if m != "ekfac" or s == "comm_opt"]
OF_EIGEN_ADAM = [("comm_opt", "eigen_adam"), ("mem_opt", "eigen_adam")]
# On two ranks, hybrid_opt is mem_opt.
CASES = [(2, s, m, p) for s, m in CHOICES if s != "hybrid_opt" for p in (SMALL, LARGE)]
CASES += [(4, s, m, SMALL) for s, m in CHOICES]
CASES += [(4, "hybrid_opt", m, LARGE) for m in ("eigen", "inverse", "eigen_adam")]


def is_quick(case):
    world, strategy, method, plan_options = case
    is_chosen = method != "eigen_adam" or (strategy, method) in OF_EIGEN_ADAM
    return world == 2 and plan_options is SMALL and is_chosen


def dumps(x):
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def loads(data):
    return torch.load(io.BytesIO(data))


def planned(**options):
    """Within it, KFAC's plan is made with these options, whatever KFAC says."""
    return mock.patch(
        "kfac_bench.core.layer_plan.make_plan",
        lambda *args, **others: make_plan(*args, **others | options),
    )


def has_batches(plan):
    """Of decompositions and of gradients, or none of either."""
    decompose, precondition = (
        any(isinstance(op, kind) and len(op.members) > 1 for op in plan.ops())
        for kind in (Decompose, Precondition)
    )
    assert decompose == precondition
    return decompose


class Counting(TorchCollective):
    """Notes the step and the bytes of each message by its name."""

    def __init__(self):
        super().__init__()
        self.step, self.steps, self.bytes = -1, defaultdict(list), Counter()
        self.to_root = {}  # of what was reduced

    def _count(self, x, name):
        self.steps[name].append(self.step)
        self.bytes[name] += x.numel() * x.element_size()

    def all_reduce(self, x, ranks, name):
        self._count(x, name)
        return super().all_reduce(x, ranks, name)

    def reduce(self, x, root, ranks, name):
        self.to_root[name] = root
        self._count(x, name)
        return super().reduce(x, root, ranks, name)

    def broadcast(self, x, root, ranks, name):
        self._count(x, name)
        return super().broadcast(x, root, ranks, name)


@dataclasses.dataclass
class Trained:
    """What the ranks are compared by."""

    digests: list
    after: list
    plan: object
    steps: dict
    bytes: dict


def train_on_rank(make_model, make_batch, plan_options, strategy, options, placing):
    """Compare with one process here."""
    collective, model = Counting(), DistributedDataParallel(make_model())
    optimizer = optimizer_of(model, options)
    with planned(**plan_options):
        kfac = make_kfac(
            model, optimizer, options, strategy=strategy, collective=collective, **placing
        )
    digests, after = [], []
    if kfac.plan.factors_on == "local":
        owners = tuple((p.layer.name, p.a_worker) for p in kfac.plan.placements)
        alone = (*options.items(), ("world", collective.world_size))
        wanted = owners_alone(make_model, make_batch, alone, owners)
    else:
        wanted = one_process(make_model, make_batch, tuple(options.items()))
    for step, (want_grads, want_weights, want_after) in enumerate(wanted):
        collective.step = step
        grads = train_step(model, kfac, optimizer, *my_part(*make_batch(step)))
        assert_close(grads, want_grads)
        assert_close(weights_of(model), want_weights)
        after.append(after_step(kfac))
        assert after[-1] == pytest.approx(want_after, rel=1e-3)
        assert kfac.failed_decompositions == kfac.dropped_statistics == 0
        digests.append((sha256(grads), sha256(weights_of(model))))
    assert held_bytes(kfac) == memory_bytes(kfac.plan, collective.rank)
    reduced = [op for op in kfac.plan.factors if isinstance(op, ReduceFactors)]
    assert collective.to_root == {op.name: op.root for op in reduced if op.root is not None}
    return Trained(digests, after, kfac.plan, dict(collective.steps), collective.bytes)


def train_on_ranks(world, *args, **placing):
    """Of rank 0, which no rank differs from by a bit; by rank, what was sent."""
    results = run_ranks(world, train_on_rank, *args, placing)
    for rank, other in enumerate(results):
        assert other.digests == results[0].digests, f"rank {rank} has other bits than rank 0"
        assert other.after == results[0].after
        assert other.plan == results[0].plan
    method = results[0].plan.method
    assert all(is_clipped(method, after) for after in results[0].after), "the clip is not at work"
    return results[0], results


def steps_of_messages(plan):
    """By name, the steps a message is due at."""
    schedules = {
        k: v for k, v in OPTIONS.items() if k in vars(Schedules(0, 0, 0, 1, 1, early_updates=False))
    }
    wanted, schedules = defaultdict(list), Schedules(factor_decay=0.95, **schedules)
    for step in range(STEPS):
        due = [plan.factors] if schedules.factors_due(step) else []
        due += [plan.slices[i] for i in schedules.slices_due(step, len(plan.slices))]
        for op in chain(*due, plan.precondition):
            if isinstance(op, Message):
                wanted[op.name].append(step)
    return wanted


@pytest.mark.supports("ddp", "{strategy}")
@pytest.mark.parametrize(
    ("world", "strategy", "method", "plan_options"), quick_if(is_quick, CASES), ids=str
)
def test_a_strategy_equals_one_process_and_its_own_plan(world, strategy, method, plan_options):
    spread = plan_options is SMALL
    options = {"method": method, "spread": spread}
    results = train_and_compare_with_the_plan(world, plan_options, strategy, options)
    plan = results[0].plan
    wanted = steps_of_messages(plan)
    assert len(plan.slices) == len(SLICES[spread])
    for part, due in zip(plan.slices, SLICES[spread], strict=True):
        assert all(wanted[op.name] == due for op in part if isinstance(op, Message))
    for kind in (ReduceFactors, ReduceSecondMoments)[: 2 if method == "ekfac" else 1]:
        count = sum(isinstance(op, kind) for op in plan.ops())
        if plan.factors_on == "local":
            assert count == 0
        elif plan_options is LARGE:  # one, or one of each owner
            owners = {p.worker(f) for p in plan.placements for f in FACTORS}
            assert count == (len(owners) if plan.factors_on == "owner" else 1)
        else:
            assert count == (5 if kind is ReduceFactors else 4)


SPLIT = {"colocate_factors": False}
TOGETHER = {"colocate_factors": True, "balance": "memory"}


@pytest.mark.parametrize(
    ("strategy", "method", "fraction", "more"),
    [
        slow("comm_opt", "inverse", None, TOGETHER),
        ("hybrid_opt", "eigen", 0.25, SPLIT),
        slow("owner_reduce", "eigen", 0.5, SPLIT),
        ("owner_reduce", "inverse", 0.5, TOGETHER),
        slow("owner_reduce", "inverse", 1.0, SPLIT),
        ("owner_reduce", "ekfac", 1.0, {"colocate_factors": None}),
        ("local_factors", "eigen", 0.5, {"balance": "memory"}),
        slow("local_factors", "inverse", 1.0, {}),
    ],
)
def test_another_placement_equals_one_process_and_its_own_plan(strategy, method, fraction, more):
    more = more | {"grad_worker_fraction": fraction}
    options = {"method": method}
    results = train_and_compare_with_the_plan(4, SMALL, strategy, options, **more)
    plan = results[0].plan
    if fraction is not None:
        assert {len(p.grad_workers) for p in plan.placements} == {int(4 * fraction)}
    together = {p.a_worker == p.workers[-1] for p in plan.placements}
    assert (False in together) == (more.get("colocate_factors") is False and fraction != 0.25)


def train_and_compare_with_the_plan(world, plan_options, strategy, options, **placing):
    """Results by rank."""
    first, results = train_on_ranks(
        world, tiny_model, batch, plan_options, strategy, options, **placing
    )
    plan = first.plan

    # What the plan says is sent, by whom and when, is what was sent
    sent, wanted = Counter(), steps_of_messages(plan)
    steps = [dict(r.steps) for r in results]
    for stage, runs in RUNS.items():
        for op in plan.ops(stage):
            if isinstance(op, Message):
                took_part = tuple(r for r in range(world) if op.name in steps[r])
                assert took_part == op.ranks
                for rank in op.ranks:
                    assert steps[rank].pop(op.name) == wanted[op.name]
                    assert results[rank].bytes[op.name] == runs * op.numel * 4
                sent[type(op).__name__] += results[op.ranks[0]].bytes[op.name]
    checks = {"check/digest", "check/statistics"}
    assert all(set(s) == checks for s in steps)
    want = Counter()
    for stage, runs in RUNS.items():
        want.update({kind: runs * n for kind, n in payload_bytes(plan, stage).items()})
    assert sent == want
    return results


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_one_process_all_strategies_are_the_same(strategy):
    model = tiny_model()
    optimizer = sgd(model)
    kfac = make_kfac(model, optimizer, {}, strategy=strategy, collective=SingleProcess())
    for step, (want, _, _) in enumerate(one_process(tiny_model, batch, ())):
        assert sha256(train_step(model, kfac, optimizer, *batch(step))) == sha256(want)


COVER_ALL = {"skip": (), "max_dim": 10}


@pytest.mark.parametrize(
    ("strategy", "method", "batch_numel", "factored"),
    quick_if(
        (
            *(("comm_opt", "ekfac", 1 << 20, True), ("comm_opt", "inverse", 1 << 20, True)),
            *(("mem_opt", "eigen_adam", 1 << 20, False), ("owner_reduce", "eigen", 1 << 20, True)),
        ).__contains__,
        [
            (s, m, batch_numel, factored)
            for s, m in CHOICES
            if s in ("comm_opt", "mem_opt", "owner_reduce")
            for batch_numel, factored in ((0, False), (1 << 20, False), (1 << 20, True))
            if m != "eigen_adam" or not factored
        ],
    ),
)
def test_groups_diagonals_and_batches_equal_one_process(strategy, method, batch_numel, factored):
    """The one process decomposes and preconditions one by one."""
    options = COVER_ALL | {"method": method, "factored_damping": factored}
    plan_options = LARGE | {"batch_numel": batch_numel}
    placing = {"grad_worker_fraction": 1.0, "colocate_factors": True}  # diagonals are sent
    placing = placing if strategy == "owner_reduce" else {}
    first, _ = train_on_ranks(2, Mixed, sentences, plan_options, strategy, options, **placing)
    specs = {p.layer.name: p.layer for p in first.plan.placements}
    assert (specs["tokens"].a_diagonal, specs["head"].g_diagonal) == (True, True)
    assert [specs[n].groups for n in ("convs.0", "norm", "head")] == [2, 4, 1]
    assert len(specs) == 8
    assert has_batches(first.plan) == bool(batch_numel)


@pytest.mark.parametrize(
    ("strategy", "method"), [("comm_opt", "eigen"), ("mem_opt", "inverse"), ("comm_opt", "ekfac")]
)
def test_rows_of_zeros_equal_one_process(strategy, method):
    """Decompositions are sent whole, with the rows that were left out."""
    plan_options, options = LARGE | {"batch_numel": 1 << 20}, {"method": method}
    train_on_ranks(2, DeadUnits, batch, plan_options, strategy, options)


MODELS = [(Mixed, sentences), (DeadUnits, batch)]


@pytest.mark.parametrize("batch_numel", [0, 1 << 20])
@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize(("make_model", "make_batch"), MODELS, ids=["mixed", "dead units"])
def test_groups_diagonals_and_batches_are_the_dense_solution(
    make_model, make_batch, method, factored, batch_numel
):
    model = make_model()
    options = {"method": method, "factored_damping": factored, "kl_clip": None, "grafting": False}
    options |= COVER_ALL
    with planned(batch_numel=batch_numel):
        kfac = make_kfac(model, sgd(model), options, collective=SingleProcess())
    assert has_batches(kfac.plan) == bool(batch_numel)
    loss_of(model, *make_batch(0))[1].backward()
    modules = {n: m for n, m in model.named_modules() if hasattr(m, "weight") and n != "norm"}
    grads = {n: oracle.layer_gradient(m) for n, m in modules.items()}
    kfac.step()
    for name, entries in kfac.state_dict()["layers"].items():
        if name in modules:
            a, g = (entries[f]["factor"] for f in FACTORS)
            want = oracle.solve(grads.pop(name), a, g, OPTIONS["damping"], method, factored)
            assert_close([oracle.layer_gradient(modules[name])], [want])
    assert not grads


FISHERS = {"empirical": (Mixed, sentences), "type2": (tiny_model, batch)}
"""Type2 of several positions in a sample draws signs."""


@pytest.mark.parametrize("damping", [slow(0.03), adaptive], ids=["constant", "adaptive"])
@pytest.mark.parametrize(
    ("strategy", "method", "fisher"),
    [
        ("comm_opt", "ekfac", "empirical"),
        slow("comm_opt", "ekfac", "type2"),
        slow("mem_opt", "inverse", "empirical"),
        ("mem_opt", "inverse", "type2"),
        ("owner_reduce", "eigen", "empirical"),
        slow("owner_reduce", "eigen", "type2"),
    ],
)
def test_fisher_and_adaptive_damping_equal_one_process(strategy, method, fisher, damping):
    options = COVER_ALL | {"method": method, "damping": damping, "fisher": fisher}
    first, _ = train_on_ranks(2, *FISHERS[fisher], LARGE, strategy, options)
    assert len({damping for _, damping, _ in first.after}) == (1 if damping == 0.03 else STEPS)


def train_with_a_static_graph(options):
    """The first backward from the output of the wrapper is that of K-FAC's labels."""
    model = DistributedDataParallel(tiny_model(), static_graph=True)
    optimizer = sgd(model)
    kfac = make_kfac(model, optimizer, options)
    for step, (want_grads, *_) in enumerate(one_process(tiny_model, batch, (*options.items(),))):
        assert_close(train_step(model, kfac, optimizer, *my_part(*batch(step))), want_grads)


def test_labels_of_the_model_leave_the_average_of_a_static_graph_to_the_loss():
    run_ranks(2, train_with_a_static_graph, {"fisher": "type2"})


def refused_on_rank(strategy):
    model = tiny_model()
    with pytest.raises(ValueError, match=f"ekfac .* strategy={strategy} .* choose comm_opt"):
        KFAC(model, sgd(model), strategy=strategy, **OPTIONS | {"method": "ekfac"})
    apart = {"strategy": "owner_reduce", "grad_worker_fraction": 1.0, "colocate_factors": False}
    with pytest.raises(ValueError, match=r"factored_damping needs both .*colocate_factors=True"):
        make_kfac(model, sgd(model), apart, method="inverse", factored_damping=True)
    with pytest.raises(ValueError, match="an adaptive damping needs both"):
        make_kfac(model, sgd(model), apart, damping=adaptive)
    make_kfac(model, sgd(model), apart, method="eigen", factored_damping=True)
    double = tiny_model().double()
    with pytest.raises(ValueError, match=r"float64 weights: on several ranks .* model\.float\(\)"):
        make_kfac(double, sgd(double), {})
    return True


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "comm_opt"])
def test_what_several_ranks_cannot_do_is_refused_on_every_rank(strategy):
    assert run_ranks(4, refused_on_rank, strategy) == [True] * 4


def collected_on_rank():
    model = DistributedDataParallel(tiny_model())
    kfac = make_kfac(model, sgd(model), {}, strategy="local_factors")
    loss_of(model, *my_part(*batch(0)))[1].backward()
    own = {p.layer.name for p in kfac.plan.placements if p.a_worker == dist.get_rank()}
    assert 0 < len(own) < len(kfac.plan.placements)
    assert set(kfac._capture.pop()) == own
    few = nn.Sequential(nn.Linear(36, 3))  # one rank has no layer at all
    kfac = make_kfac(few, sgd(few), {}, strategy="local_factors", fisher="mc")
    output, loss = loss_of(few, *(t.flatten(1) if t.ndim > 1 else t for t in batch(0)))
    kfac.fisher_backward(output)
    loss.backward()
    kfac.step()
    return few[0].weight.grad


def test_with_local_factors_a_rank_computes_the_moments_of_its_own_layers_only():
    first, second = run_ranks(2, collected_on_rank)
    assert torch.equal(first, second)


# A rank that differs


def build_on_rank(odd, change):
    """What KFAC raises on this rank, whose peer ``odd`` differs; the group works on."""
    model, options = tiny_model(), dict(OPTIONS)
    if dist.get_rank() == odd:
        if change == "width":
            model[7], model[9] = nn.Linear(4, 8), nn.Linear(8, 3, bias=False)
        elif change == "depth":
            model.append(nn.Linear(3, 3))
        else:
            options |= change
    try:
        KFAC(model, sgd(model), **options)
    except RuntimeError as error:
        message = str(error)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return message, int(ones)


@pytest.mark.parametrize(
    "change",
    [
        "width",
        "depth",
        {"strategy": "mem_opt"},
        {"strategy": "owner_reduce"},
        {"strategy": "local_factors"},
        {"colocate_factors": True},
        {"overlap": True},
        {"method": "inverse"},
        {"method": "ekfac"},
        {"skip": ["Conv"]},
        {"max_dim": 6},
        {"fisher": "type2"},
        {"factored_damping": True},
    ],
    ids=str,
)
def test_a_rank_with_another_model_is_an_error_on_every_rank(change):
    for odd, named in ((0, r"\[1, 2, 3\]"), (2, r"\[2\]")):
        for message, ranks in run_ranks(4, build_on_rank, odd, change):
            assert ranks == 4
            with pytest.raises(RuntimeError, match=f"ranks {named} made another K-FAC plan"):
                raise RuntimeError(message)


# State

SAVED = 3  # steps; the next one uses decompositions of earlier steps, made from other factors


def state_options(method):
    """EKFAC: so rarely that all second moments are averages, of steps since step 0."""
    return {"method": method, "update_freq": 6 if method == "ekfac" else 2}


def train_and_save(strategy, options):
    """(shard, whole state, weights) after SAVED steps; weights at the end of STEPS; placements."""
    model = DistributedDataParallel(tiny_model())
    optimizer = optimizer_of(model, options)
    kfac = make_kfac(model, optimizer, options, strategy=strategy)
    assert len(kfac.plan.slices) >= 2
    for step in range(STEPS):
        if step == SAVED:
            saved = dumps(kfac.state_dict(shard=True)), dumps(kfac.state_dict())
            weights = dumps(weights_of(model))
        train_step(model, kfac, optimizer, *my_part(*batch(step)))
    return *saved, weights, dumps(weights_of(model)), kfac.plan.placements


def go_on(strategy, options, states, weights, distributed=True):
    """Weights at the end of STEPS of a run that starts from what was saved."""
    model = tiny_model()
    with torch.no_grad():
        for p, w in zip(model.parameters(), loads(weights), strict=True):
            p.copy_(w)
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = optimizer_of(model, options)
    collective = None if distributed else SingleProcess()
    kfac = make_kfac(model, optimizer, options, strategy=strategy, collective=collective)
    saved = [loads(s) for s in states]
    kfac.load_state_dict(*saved)
    assert kfac.steps == SAVED
    assert second_moments([kfac.state_dict()]) == second_moments(saved), "not bit-exact"
    if len(saved) > 1:  # a rank takes what it keeps, and no more
        assert held_bytes(kfac) == memory_bytes(kfac.plan, kfac.collective.rank)
    for step in range(SAVED, STEPS):
        data = batch(step)
        train_step(model, kfac, optimizer, *(my_part(*data) if distributed else data))
    return dumps(weights_of(model))


def second_moments(states):
    """By layer, as bytes."""
    return {
        name: raw_bytes(entries["second_moment"])
        for state in states
        for name, entries in state["layers"].items()
        if "second_moment" in entries
    }


STATES = [("comm_opt", "eigen"), ("comm_opt", "ekfac"), ("mem_opt", "inverse"),
          ("owner_reduce", "eigen"), ("local_factors", "inverse"), ("comm_opt", "eigen_adam"),
          ("owner_reduce", "eigen_adam")]  # fmt: skip
STATES = quick_if((("comm_opt", "ekfac"), ("mem_opt", "inverse")).__contains__, STATES)


@pytest.mark.parametrize(("strategy", "method"), STATES)
def test_shards_load_on_any_world_size_with_any_strategy(strategy, method):
    options = state_options(method)
    results = run_ranks(2, train_and_save, strategy, options)
    shards, _, weights, ends, (placements, _) = zip(*results, strict=True)
    want = loads(ends[0])
    assert sha256(want) == sha256(loads(ends[1]))

    kind = "inverse" if method == "inverse" else "eigen"
    for rank, shard in enumerate(map(loads, shards)):  # each holds what its rank decomposes
        for p in placements:
            entries = shard["layers"][p.layer.name]
            adam = entries.pop("adam", None)
            assert (adam is not None) == (method == "eigen_adam" and p.a_worker == rank)
            moment = entries.pop("second_moment", None)
            assert (moment is not None) == (method == "ekfac" and p.a_worker == rank)
            assert ("second_moment_weight" in entries) == (moment is not None)
            entries.pop("second_moment_weight", None)
            assert set(entries) == {f for f in FACTORS if p.worker(f) == rank}
            assert all({"factor", "weight", kind} == set(e) for e in entries.values())

    assert run_ranks(2, go_on, strategy, options, shards, weights[0]) == list(ends), "not bit-exact"
    alone = loads(go_on("comm_opt", options, shards, weights[0], distributed=False))
    if strategy == "local_factors":  # from here on, others count all samples
        assert any(not torch.allclose(a, w, rtol=1e-3) for a, w in zip(alone, want, strict=True))
        return
    assert_close(alone, want)
    others = [(2, s) for s in ("comm_opt", "mem_opt", "owner_reduce") if s != strategy]
    others += [(4, s) for s in STRATEGIES if s != "local_factors"]
    for world, another in others:
        if method == "ekfac" and another != "comm_opt":
            continue
        got = [loads(w) for w in run_ranks(world, go_on, another, options, shards, weights[0])]
        assert_close(got[0], want)
        assert len({sha256(w) for w in got}) == 1


def are_products(layers):
    """Of each layer, whether its second moments are products of eigenvalues."""
    assert len(layers) == 5
    out = set()
    for entries in layers.values():
        a, g = (entries[f]["eigen"][0] for f in FACTORS)
        product = g.unsqueeze(-1) * a.unsqueeze(-2)
        out.add(torch.allclose(entries["second_moment"], product, rtol=0.01))
    return out


def test_saved_second_moments_are_more_than_products_of_eigenvalues():
    """Missing second moments would start again from these products."""
    shards, *_ = zip(*run_ranks(2, train_and_save, "comm_opt", state_options("ekfac")), strict=True)
    layers = defaultdict(dict)
    for shard in map(loads, shards):
        for name, entries in shard["layers"].items():
            layers[name] |= entries
    assert are_products(layers) == {False}


@pytest.mark.parametrize(("strategy", "method"), STATES)
def test_the_state_of_rank_0_alone_loads_and_trains(strategy, method):
    options = state_options(method)
    results = run_ranks(2, train_and_save, strategy, options)
    _, states, weights, ends, _ = zip(*results, strict=True)
    want = loads(ends[0])
    if strategy in ("owner_reduce", "local_factors"):
        with pytest.raises(ValueError, match="found nothing; pass the state of every rank"):
            go_on("comm_opt", options, states[:1], weights[0], distributed=False)
        return
    got = run_ranks(2, go_on, strategy, options, states[:1], weights[0])
    if strategy == "comm_opt":  # rank 0 held all decompositions
        assert got == list(ends)
        return
    again = loads(go_on("comm_opt", options, states[:1], weights[0], distributed=False))
    assert_close(loads(got[0]), again)
    assert sha256(loads(got[0])) == sha256(loads(got[1]))
    assert any(not torch.allclose(a, w, rtol=1e-3) for a, w in zip(again, want, strict=True))


# Ranks whose data differ


class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, use):
        x = self.always(x).tanh()
        return self.last(self.sometimes(x).tanh() if use else x)


def factors_alone(model, x, y, name, use=True):
    """A and G of one layer from one rank's data, by the oracle."""
    model = copy.deepcopy(model)
    module = model.get_submodule(name)
    recorder = oracle.Calls([module])
    F.cross_entropy(model(x, use) if isinstance(model, Branched) else model(x), y).backward()
    return oracle.factors(module, *recorder.calls[module][0])


def use_a_layer_on_one_rank_only(strategy, factor_init):
    inner, rank = Branched(), dist.get_rank()
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    optimizer, decay = sgd(model), 0.8
    options = OPTIONS | {"factor_decay": decay, "factor_init": factor_init}
    kfac = KFAC(model, optimizer, strategy=strategy, **options)
    averages, weight, digests = {}, 0.0, []
    for step, user in enumerate([None, 0, 1, None, 0]):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 5, generator=generator), torch.arange(8) % 3
        if user is not None:
            alone = factors_alone(inner, x.chunk(2)[user], y.chunk(2)[user], "sometimes")
            weight = decay * weight + 1
            for f, fresh in zip(FACTORS, alone, strict=True):
                old = averages.get(f, torch.eye(len(fresh), dtype=fresh.dtype))
                share = 1 / weight if factor_init == "debiased" else 1 - decay
                averages[f] = old + share * (fresh - old)
        optimizer.zero_grad()
        parts = my_part(x, y)
        F.cross_entropy(model(parts[0], user == rank), parts[1]).backward()
        kfac.step()
        assert (inner.sometimes.weight.grad is None) == (user is None)
        optimizer.step()
        entry = kfac.state_dict()["layers"]["sometimes"]
        owner = next(p.a_worker for p in kfac.plan.placements if p.layer.name == "sometimes")
        assert set(entry) == set(FACTORS if strategy != "owner_reduce" or owner == rank else ())
        for f in entry:
            (factor,) = entry[f]["factor"].double()
            want = averages.get(f, torch.eye(len(factor), dtype=factor.dtype))
            torch.testing.assert_close(factor, want, rtol=1e-5, atol=1e-7)
            assert entry[f]["weight"].item() == pytest.approx(weight)
        digests.append(sha256(weights_of(inner)))
    return digests


@pytest.mark.parametrize(
    ("strategy", "factor_init"),
    [
        ("comm_opt", "debiased"),
        ("layer_wise", "debiased"),
        ("owner_reduce", "debiased"),
        ("comm_opt", "identity"),
        ("owner_reduce", "identity"),
    ],
)
def test_a_layer_unused_on_one_rank_counts_the_other_ranks_samples(strategy, factor_init):
    first, second = run_ranks(2, use_a_layer_on_one_rank_only, strategy, factor_init)
    assert first == second


def train_with_unequal_batches(sizes, convention, method):
    """Gradients are averaged by hand with the samples as weights, as factors must be."""
    rank, total = dist.get_rank(), sum(sizes)
    options = OPTIONS | state_options(method) | {"factor_convention": convention}
    alone, model = tiny_model(), tiny_model()
    optimizers = sgd(alone), sgd(model)
    kfac_alone = KFAC(alone, optimizers[0], collective=SingleProcess(), **options)
    kfac = KFAC(model, optimizers[1], **options)
    for step in range(3):
        x, y = batch(step, total)
        want = train_step(alone, kfac_alone, optimizers[0], x, y)
        optimizers[1].zero_grad()
        F.cross_entropy(model(x.split(sizes)[rank]), y.split(sizes)[rank]).backward()
        for p in model.parameters():
            p.grad *= sizes[rank] / total
            dist.all_reduce(p.grad)
        kfac.step()
        assert_close([p.grad for p in model.parameters()], want)
        optimizers[1].step()
    wanted, got = kfac_alone.state_dict()["layers"], kfac.state_dict()["layers"]
    for name in wanted:
        for f in FACTORS:
            assert_close([got[name][f]["factor"]], [wanted[name][f]["factor"]])
        if method == "ekfac":
            assert_close([got[name]["second_moment"]], [wanted[name]["second_moment"]])


@pytest.mark.parametrize(
    ("sizes", "convention", "method"),
    [
        slow((5, 27), "kfc", "eigen"),
        ((5, 27), "sc20", "eigen"),
        ((5, 27), "kfc", "ekfac"),
        ((3, 15, 9, 5), "kfc", "eigen"),
        slow((3, 15, 9, 5), "sc20", "eigen"),
        slow((3, 15, 9, 5), "kfc", "ekfac"),
    ],
    ids=str,
)
def test_unequal_local_batches_weigh_statistics_by_samples(sizes, convention, method):
    run_ranks(len(sizes), train_with_unequal_batches, sizes, convention, method)


def train_with_unequal_lengths():
    """A is a mean over rows: two micro-batches of one process and two ranks have the same A."""
    sequences = [torch.randn(6, t, 4, generator=torch.Generator().manual_seed(t)) for t in (5, 2)]
    alone, model = (nn.Sequential(nn.Linear(4, 3)) for _ in range(2))
    kfac_alone = KFAC(alone, sgd(alone), collective=SingleProcess(), **OPTIONS)
    kfac = KFAC(model, sgd(model), **OPTIONS)
    for x in sequences:
        (alone(x).square().sum((1, 2)).mean() / 2).backward()
    model(sequences[dist.get_rank()]).square().sum((1, 2)).mean().backward()
    kfac_alone.step()
    kfac.step()
    wanted, got = (k.state_dict()["layers"]["0"]["A"]["factor"] for k in (kfac_alone, kfac))
    assert_close([got], [wanted])


def test_unequal_lengths_weigh_statistics_by_rows():
    run_ranks(2, train_with_unequal_lengths)


def train_where_a_rank_owns_no_factor():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer, placing = sgd(model), {"strategy": "owner_reduce", "grad_worker_fraction": 1.0}
    kfac = KFAC(model, optimizer, **(OPTIONS | {"method": "ekfac"} | placing))
    for step in range(3):
        x, y = my_part(*batch(step, 96))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        kfac.step()
        mine = torch.cat([p.grad.flatten() for p in model.parameters()])
        first = mine.clone()
        dist.broadcast(first, 0)
        assert_close([mine], [first])
        optimizer.step()


def test_a_rank_that_owns_no_factor_has_the_second_moments_of_the_others():
    run_ranks(3, train_where_a_rank_owns_no_factor)


def overflow_on_one_rank():
    """What overflows on rank 1 is left out: the factors are those of rank 0's samples."""
    model, (x, y) = tiny_model(), batch(0)
    kfac = KFAC(model, sgd(model), **OPTIONS)
    want = factors_alone(model, x.chunk(2)[0], y.chunk(2)[0], "0")
    x, y = my_part(x, y)
    if dist.get_rank() == 1:
        x = x.clone()
        x[0, 0, 2, 2] = float("inf")
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    kfac.step()
    for f, factor in zip(FACTORS, want, strict=True):
        (got,) = kfac.state_dict()["layers"]["0"][f]["factor"]
        torch.testing.assert_close(got.double(), factor, rtol=1e-5, atol=1e-6)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_an_overflow_on_one_rank_is_left_out():
    run_ranks(2, overflow_on_one_rank)


# Batches


class Some(nn.Module):
    """Three layers of one shape, of which the last is not always used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, count):
        for layer in self.layers[:count]:
            x = layer(x).tanh()
        return x


def train_some(batch_numel):
    model = Some()
    optimizer = sgd(model)
    with planned(batch_numel=batch_numel):
        kfac = KFAC(model, optimizer, **OPTIONS | {"update_freq": 9, "spread": False})
    assert has_batches(kfac.plan) == bool(batch_numel)
    for step, count in enumerate([3, 2, 3, 1, 2, 3]):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x, count).square().mean().backward()
        kfac.step()
        optimizer.step()
    return weights_of(model)


def test_a_backward_that_reaches_only_some_layers():
    assert_close(train_some(1 << 20), train_some(0))


# The helper itself


def rank_and_world():
    return dist.get_rank(), dist.get_world_size()


def fail_on_rank_1(how):
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(0)
        raise ValueError("on purpose")
    if how == "raises":
        dist.barrier()  # hangs: the failure must not wait for this rank


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", ["rank 1:", "fail_on_rank_1", "ValueError: on purpose"]),
        ("dies", ["rank 1:", "the process died"]),
    ],
)
def test_a_failing_rank_fails_the_test_and_the_pool_works_again(how, words):
    with pytest.raises(RankFailed) as error:
        run_ranks(2, fail_on_rank_1, how)
    assert all(w in str(error.value) for w in words)
    if how == "dies":
        assert run_ranks(2, rank_and_world) == [(0, 2), (1, 2)]


def differing_options(values):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    options = {"factor_update_freq": 1} | values[dist.get_rank()]
    try:
        KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "values",
    [({"update_freq": 1}, {"update_freq": 2}), ({}, {"early_updates": False})],
    ids=str,
)
def test_ranks_with_other_options_get_an_error_not_a_hang(values):
    for said in run_ranks(2, differing_options, values):
        assert "ranks [1] made another K-FAC plan" in said


def train_in_join(is_first):
    bare = tiny_model()
    optimizer = sgd(bare)
    kfac = KFAC(bare, optimizer).attach() if is_first else None
    model = DistributedDataParallel(bare)
    kfac = kfac or KFAC(model, optimizer).attach()
    with model.join(enable=False):
        loss_of(model, *my_part(*batch(0)))[1].backward()
        optimizer.step()
    with model.join():
        loss_of(model, *my_part(*batch(1)))[1].backward()
        with pytest.raises(RuntimeError, match=r"K-FAC cannot run inside join\(\)"):
            optimizer.step()
    kfac.detach()


def train_with_an_early_kfac():
    model = DistributedDataParallel(bare := tiny_model())
    optimizer = sgd(bare)
    kfac = KFAC(bare, optimizer, collective=SingleProcess()).attach()
    loss_of(model, *my_part(*batch(0)))[1].backward()
    with pytest.raises(RuntimeError, match=r"built before init_process_group\(\)"):
        optimizer.step()
    kfac.detach()


def test_a_kfac_of_one_rank_below_ddp_is_refused():
    """The ranks would drift apart without a word."""
    run_ranks(2, train_with_an_early_kfac)


def train_with_a_collective_of_some_ranks():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(tiny_model())
    kfac = KFAC(model, sgd(model), collective=TorchCollective(groups[dist.get_rank() // 2]))
    loss_of(model, *my_part(*batch(0)))[1].backward()
    with pytest.raises(RuntimeError, match=r"over 4 ranks.*its collective has 2 ranks"):
        kfac.step()
    kfac.detach()


def test_a_kfac_of_some_ranks_of_ddp_is_refused():
    run_ranks(4, train_with_a_collective_of_some_ranks)


def train_with_groups_that_kfac_does_not_know():
    """K-FAC gets the bare model, and DDP a group of its own on each rank."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    optimizer = sgd(bare := tiny_model())
    kfac = KFAC(bare, optimizer).attach()
    model = DistributedDataParallel(bare, process_group=groups[dist.get_rank()])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(2):
            loss_of(model, *my_part(*batch(step)))[1].backward()
            optimizer.step()
    kfac.detach()
    return [str(warning.message) for warning in seen]


def test_a_kfac_of_more_ranks_than_ddp_warns_once():
    """It would mix two models without a word."""
    first, second = run_ranks(2, train_with_groups_that_kfac_does_not_know)
    assert len(first) == 1
    assert (
        "was built for 2 ranks, but DistributedDataParallel averages gradients over 1" in first[0]
    )
    assert second == []


@pytest.mark.parametrize("is_first", [False, True])  # K-FAC before DistributedDataParallel
def test_unequal_numbers_of_batches_under_join_are_refused(is_first):
    run_ranks(2, train_in_join, is_first)
