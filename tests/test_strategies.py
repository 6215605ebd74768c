"""Every strategy on real gloo ranks: equal to one process, on all ranks, and to its own plan."""

import copy
import functools
import hashlib
import io
import os
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_bench.core import KFAC
from kfac_bench.core.collective import SingleProcess, TorchCollective
from kfac_bench.core.estimate import payload_bytes
from kfac_bench.core.plan import (
    FACTORS,
    METHODS,
    STRATEGIES,
    Message,
    ReduceFactors,
    Stage,
    make_plan,
)
from tests import oracle
from tests.distributed import RankFailed, run_ranks

pytestmark = pytest.mark.ranks
torch.set_num_threads(1)

OPTIONS = {"damping": 0.03, "kl_clip": 1e-3, "update_freq": 2, "factor_update_freq": 1}
STEPS, LR = 5, 0.1
RUNS = {Stage.FACTORS: 5, Stage.DECOMPOSE: 3, Stage.PRECONDITION: 5}  # of STEPS
BUCKETS = (30, 1 << 22)  # many messages, and one of each root


def tiny_model():
    """Shapes at which BLAS gives other bits for a transposed layout are among them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(2, 3, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.Tanh(),
        nn.Linear(4, 7),
        nn.ReLU(inplace=True),
        nn.Linear(7, 3, bias=False),
    )


def batch(step, n=8):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(n, 1, 6, 6, generator=generator), torch.randint(3, (n,), generator=generator)


def my_part(*tensors):
    world, rank = dist.get_world_size(), dist.get_rank()
    return [t.chunk(world)[rank] for t in tensors]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def train_step(model, kfac, optimizer, x, y):
    """The preconditioned gradients of the step; the weights after it are the model's."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return grads


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def sha256(tensors):
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def assert_close(got, want, tolerance=2e-4):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def dumps(x):
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def loads(data):
    return torch.load(io.BytesIO(data))


@functools.cache
def one_process(method):
    """(preconditioned gradients, weights, nu) after each step on the whole batch."""
    model, out = tiny_model(), []
    optimizer = sgd(model)
    kfac = KFAC(model, optimizer, method=method, collective=SingleProcess(), **OPTIONS)
    for step in range(STEPS):
        grads = train_step(model, kfac, optimizer, *batch(step))
        out.append((grads, weights_of(model), kfac.statistics()["nu"]))
    return out


class Counting(TorchCollective):
    """Counts calls and bytes by message name."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def _count(self, x, name):
        self.calls[name] += 1
        self.bytes[name] += x.numel() * x.element_size()

    def all_reduce(self, x, ranks, name):
        self._count(x, name)
        return super().all_reduce(x, ranks, name)

    def broadcast(self, x, root, ranks, name):
        self._count(x, name)
        return super().broadcast(x, root, ranks, name)


def small_buckets(numel):
    return mock.patch(
        "kfac_bench.core.preconditioner.make_plan", functools.partial(make_plan, bucket_numel=numel)
    )


def train_on_rank(strategy, method, bucket_numel):
    """Compare with one process here; return what the ranks are compared by."""
    collective, model = Counting(), DistributedDataParallel(tiny_model())
    optimizer = sgd(model)
    with small_buckets(bucket_numel):
        kfac = KFAC(
            model, optimizer, strategy=strategy, method=method, collective=collective, **OPTIONS
        )
    digests = []
    for step, (want_grads, want_weights, want_nu) in enumerate(one_process(method)):
        grads = train_step(model, kfac, optimizer, *my_part(*batch(step)))
        assert_close(grads, want_grads)
        assert_close(weights_of(model), want_weights)
        assert kfac.statistics()["nu"] == pytest.approx(want_nu, rel=1e-4)
        digests.append((sha256(grads), sha256(weights_of(model))))
    return digests, kfac.plan, collective.calls, collective.bytes


@pytest.mark.parametrize("bucket_numel", BUCKETS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 4])
def test_a_strategy_equals_one_process_and_its_own_plan(world, strategy, method, bucket_numel):
    nus = [nu for _, _, nu in one_process(method)]
    assert all(0 < nu < 0.9 for nu in nus), "the clip is not at work"
    results = run_ranks(world, train_on_rank, strategy, method, bucket_numel)

    digests, plan, _, _ = results[0]
    for rank, (others, others_plan, _, _) in enumerate(results):
        assert others == digests, f"rank {rank} has other bits than rank 0"
        assert others_plan == plan

    # What the plan says is sent, by whom and how often, is what was sent
    sent = Counter()
    calls = [Counter(c) for _, _, c, _ in results]
    for stage, runs in RUNS.items():
        for op in plan.ops(stage):
            if isinstance(op, Message):
                took_part = tuple(r for r in range(world) if op.name in calls[r])
                assert took_part == op.ranks
                for rank in op.ranks:
                    assert calls[rank].pop(op.name) == runs
                    assert results[rank][3][op.name] == runs * op.numel * 4
                sent[type(op).__name__] += results[op.ranks[0]][3][op.name]
    assert all(set(c) == {"check/digest", "check/differ"} for c in calls)
    want = Counter()
    for stage, runs in RUNS.items():
        want.update({kind: runs * n for kind, n in payload_bytes(plan, stage).items()})
    assert sent == want
    reductions = sum(isinstance(op, ReduceFactors) for op in plan.ops())
    assert reductions == (5 if bucket_numel == 30 else 1)


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
    ["width", "depth", {"strategy": "mem_opt"}, {"method": "inverse"}, {"skip": ["Conv"]}],
    ids=str,
)
def test_a_rank_with_another_model_is_an_error_on_every_rank(change):
    for odd, named in ((0, r"\[1, 2, 3\]"), (2, r"\[2\]")):
        for message, ranks in run_ranks(4, build_on_rank, odd, change):
            assert ranks == 4
            with pytest.raises(RuntimeError, match=f"ranks {named} made another K-FAC plan"):
                raise RuntimeError(message)


# State

SAVED = 3  # steps; the next one uses the decompositions of step 2, made from other factors


def train_and_save(strategy, method):
    """(shard, whole state, weights) after SAVED steps; weights at the end of STEPS."""
    model = DistributedDataParallel(tiny_model())
    optimizer = sgd(model)
    kfac = KFAC(model, optimizer, strategy=strategy, method=method, **OPTIONS)
    for step in range(STEPS):
        if step == SAVED:
            saved = dumps(kfac.state_dict(shard=True)), dumps(kfac.state_dict())
            weights = dumps(weights_of(model))
        train_step(model, kfac, optimizer, *my_part(*batch(step)))
    return *saved, weights, dumps(weights_of(model)), kfac.plan.placements


def go_on(strategy, method, states, weights, distributed=True):
    """Weights at the end of STEPS of a run that starts from what was saved."""
    model = tiny_model()
    with torch.no_grad():
        for p, w in zip(model.parameters(), loads(weights), strict=True):
            p.copy_(w)
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = sgd(model)
    collective = None if distributed else SingleProcess()
    kfac = KFAC(
        model, optimizer, strategy=strategy, method=method, collective=collective, **OPTIONS
    )
    kfac.load_state_dict(*[loads(s) for s in states])
    assert kfac.steps == SAVED
    for step in range(SAVED, STEPS):
        data = batch(step)
        train_step(model, kfac, optimizer, *(my_part(*data) if distributed else data))
    return dumps(weights_of(model))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt"])
def test_shards_go_on_on_any_world_with_any_strategy(strategy, method):
    results = run_ranks(2, train_and_save, strategy, method)
    shards, _, weights, ends, (placements, _) = zip(*results, strict=True)
    want = loads(ends[0])
    assert sha256(want) == sha256(loads(ends[1]))

    for rank, shard in enumerate(map(loads, shards)):  # each holds what its rank decomposes
        for p in placements:
            entries = shard["layers"][p.layer.name]
            assert set(entries) == {f for f in FACTORS if p.worker(f) == rank}
            assert all({"factor", "weight", method} == set(e) for e in entries.values())

    assert run_ranks(2, go_on, strategy, method, shards, weights[0]) == list(ends), "not bit-exact"
    assert_close(loads(go_on("comm_opt", method, shards, weights[0], distributed=False)), want)
    other = "mem_opt" if strategy == "comm_opt" else "comm_opt"
    for world, another in ((2, other), (4, other), (4, "hybrid_opt"), (4, "layer_wise")):
        got = [loads(w) for w in run_ranks(world, go_on, another, method, shards, weights[0])]
        assert_close(got[0], want)
        assert len({sha256(w) for w in got}) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt"])
def test_the_state_of_rank_0_alone_loads_and_trains(strategy, method):
    _, states, weights, ends, _ = zip(*run_ranks(2, train_and_save, strategy, method), strict=True)
    got = run_ranks(2, go_on, strategy, method, states[:1], weights[0])
    want = loads(ends[0])
    if strategy == "comm_opt":  # rank 0 held all decompositions
        assert got == list(ends)
        return
    anew = loads(go_on("comm_opt", method, states[:1], weights[0], distributed=False))
    assert_close(loads(got[0]), anew)
    assert sha256(loads(got[0])) == sha256(loads(got[1]))
    assert any(not torch.allclose(a, w, rtol=1e-3) for a, w in zip(anew, want, strict=True))


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
    recorder = oracle.Recorder([module])
    F.cross_entropy(model(x, use) if isinstance(model, Branched) else model(x), y).backward()
    return oracle.factors(module, *recorder.calls[module][0])


def use_a_layer_on_one_rank_only(strategy):
    inner, rank = Branched(), dist.get_rank()
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    optimizer, decay = sgd(model), 0.8
    kfac = KFAC(model, optimizer, strategy=strategy, **(OPTIONS | {"factor_decay": decay}))
    averages, weight, digests = {}, 0.0, []
    for step, user in enumerate([None, 0, 1, None, 0]):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 5, generator=generator), torch.arange(8) % 3
        if user is not None:
            alone = factors_alone(inner, x.chunk(2)[user], y.chunk(2)[user], "sometimes")
            weight = decay * weight + 1
            for f, fresh in zip(FACTORS, alone, strict=True):
                old = averages.get(f, torch.zeros_like(fresh))
                averages[f] = old + (fresh - old) / weight
        optimizer.zero_grad()
        parts = my_part(x, y)
        F.cross_entropy(model(parts[0], user == rank), parts[1]).backward()
        kfac.step()
        assert (inner.sometimes.weight.grad is None) == (user is None)
        optimizer.step()
        entry = kfac.state_dict()["layers"]["sometimes"]
        for f in FACTORS:
            want = averages.get(f, torch.zeros_like(entry[f]["factor"]).double())
            torch.testing.assert_close(entry[f]["factor"].double(), want, rtol=1e-5, atol=1e-7)
            assert entry[f]["weight"].item() == pytest.approx(weight)
        digests.append(sha256(weights_of(inner)))
    return digests


@pytest.mark.parametrize("strategy", ["comm_opt", "layer_wise"])
def test_a_layer_unused_on_one_rank_counts_the_other_ranks_samples(strategy):
    first, second = run_ranks(2, use_a_layer_on_one_rank_only, strategy)
    assert first == second


def train_with_unequal_batches(sizes, convention):
    """Gradients are averaged by hand with the samples as weights, as factors must be."""
    rank, total = dist.get_rank(), sum(sizes)
    options = OPTIONS | {"factor_convention": convention}
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


@pytest.mark.parametrize("convention", ["kfc", "sc20"])
@pytest.mark.parametrize("sizes", [(2, 7), (1, 6, 3, 2)], ids=str)
def test_unequal_local_batches_weigh_factors_by_samples(sizes, convention):
    run_ranks(len(sizes), train_with_unequal_batches, sizes, convention)


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
        got = kfac.state_dict()["layers"]["0"][f]["factor"]
        torch.testing.assert_close(got.double(), factor, rtol=1e-5, atol=1e-6)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_an_overflow_on_one_rank_is_left_out():
    run_ranks(2, overflow_on_one_rank)


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


def differing_options():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    update_freq = 2 if dist.get_rank() == 1 else 1
    try:
        KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), update_freq=update_freq,
             factor_update_freq=1)  # fmt: skip
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_options_get_an_error_not_a_hang():
    for said in run_ranks(2, differing_options):
        assert "ranks [1] made another K-FAC plan" in said
