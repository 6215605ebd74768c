"""``kfac-plan``: what it says is what ranks that run hold and send; and how it says it."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from kfac_bench import cli
from kfac_bench.backends.backend import Backend
from kfac_bench.backends.ddp import DDP
from kfac_bench.core.collective import SingleProcess, TorchCollective
from kfac_bench.core.estimate import flops, rank_costs
from kfac_bench.core.plan import STRATEGIES, Stage
from kfac_bench.core.planner import make_plan
from kfac_bench.ranks import Ranks
from tests.distributed import run_ranks
from tests.runs import CPU, trainer_of
from tests.training import make_kfac, my_part, sgd, train_step

# ---- what a rank holds and sends ----


class Done:
    """A message that has arrived."""

    def wait(self):
        """At once."""


class Measuring(TorchCollective):
    """Sends a copy of each bucket, so that nobody but the executor decides how long one lives.

    At each message it looks at what is alive.
    """

    def __init__(self):
        super().__init__()
        self.kfac = None
        self.sent = defaultdict(Counter)  # by stage and kind: times each message was sent
        self.bytes = {}
        self.buckets = Counter()  # by stage, the most that was alive and not kept in the store
        self.statistics = 0
        self._alive = []

    def _send(self, x, name, send):
        if self.kfac is not None:
            self._look(x.untyped_storage(), name)
        copy = x.clone()
        send(copy).wait()
        x.copy_(copy)
        return Done()

    def _look(self, storage, name):
        executor = self.kfac._executor
        stage = next(s for s in Stage for op in executor.plan.ops(s) if name == _name(op))
        self.sent[stage.value][name] += 1
        self.bytes[name] = storage.nbytes()
        self._alive = [a for a in self._alive if not a[0].expired()]
        self._alive.append((StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))
        kept = storages(executor.store.decompositions.values())
        in_flight = sum(size for _, pointer, size in self._alive if pointer not in kept)
        self.buckets[stage.value] = max(self.buckets[stage.value], in_flight)
        fresh = [*executor.fresh.factors.values(), *executor.fresh.second_moments.values()]
        self.statistics = max(
            self.statistics, sum(storages([moment] for moment, _ in fresh).values())
        )

    def all_reduce(self, x, ranks, name):
        return self._send(x, name, lambda y: super(Measuring, self).all_reduce(y, ranks, name))

    def reduce(self, x, root, ranks, name):
        return self._send(x, name, lambda y: super(Measuring, self).reduce(y, root, ranks, name))

    def broadcast(self, x, root, ranks, name):
        return self._send(x, name, lambda y: super(Measuring, self).broadcast(y, root, ranks, name))


def _name(op):
    return getattr(op, "name", None)


def storages(parts):
    """Bytes by address: a view keeps all of what it is a view of."""
    found = [x.untyped_storage() for tensors in parts for x in tensors]
    return {s.data_ptr(): s.nbytes() for s in found}


def measured(kfac):
    """Of this rank, in the words of the JSON file."""
    store, collective = kfac._executor.store, kfac.collective
    second_moments = [[x] for x in store.second_moments.values()]
    memory = {
        "factors": sum(storages([*store.factors.values(), *second_moments]).values()),
        "decompositions": sum(storages(store.decompositions.values()).values()),
    }
    assert not kfac._executor._preconditioned, "gradients of the last step are still there"
    if collective.world_size == 1:
        return memory, {stage.value: {} for stage in Stage}
    memory["statistics"] = collective.statistics
    memory["buckets"] = {stage.value: collective.buckets[stage.value] for stage in Stage}
    traffic = {}
    for stage in Stage:
        times = collective.sent[stage.value]
        assert len(set(times.values())) <= 1, "each is sent when its stage runs"
        kinds = traffic[stage.value] = {}
        for name in times:
            kind = kinds.setdefault(name.partition("/")[0], Counter())
            kind["messages"] += 1
            kind["payload_bytes"] += collective.bytes[name]
    return memory, traffic


def assert_equal_to(rank, memory, traffic):
    """An estimate of one rank, as the JSON file has it, to what was measured."""
    assert {k: rank["memory_bytes"][k] for k in memory} == memory
    assert {
        stage: {kind: {k: t[k] for k in ("messages", "payload_bytes")} for kind, t in kinds.items()}
        for stage, kinds in rank["traffic"].items()
    } == traffic


# ---- runs of the harness against the JSON file of the command ----


class MeasuredRanks(DDP):
    """Its K-FAC measures its messages."""

    def collective(self):
        return Measuring()


def run_on_rank(folder, overrides):
    backend = MeasuredRanks(Ranks(CPU, TorchCollective()))
    return run_here(folder, overrides, backend)


def run_here(folder, overrides, backend):
    trainer = trainer_of(folder, *overrides, base=(), backend=backend)
    trainer.kfac.collective.kfac = trainer.kfac
    assert trainer.fit() == "finished"
    return measured(trainer.kfac)


def planned(capsys, path, *overrides):
    """The JSON file that the command writes."""
    with pytest.raises(SystemExit) as caught:
        cli.plan([*overrides, f"out={path}"])
    assert caught.value.code == 0
    assert f"every rank: {path}" in capsys.readouterr().out
    return json.loads(path.read_text())


BASE = (
    *("logger=none", "trainer.max_steps=3", "trainer.batch_size=64", "trainer.threads=1"),
    *("trainer.eval_freq=100", "kfac.update_freq=2", "kfac.factor_update_freq=1"),
    "optimizer.lr=0.001",
)
AUTOENCODER = ("model=autoencoder", "task=reconstruction", "model.hidden=[24,5]")
METHODS = ("kfac.method=eigen", "kfac.method=inverse")
STATES = ("kfac.state_dtype=fp32", "kfac.state_dtype=bf16")
CASES = [
    *((*AUTOENCODER, f"kfac={s}", m, d) for s in STRATEGIES for m in METHODS for d in STATES),
    *(("model=resnet8", f"kfac={s}", METHODS[i % 2]) for i, s in enumerate(STRATEGIES)),
    ("model=resnet20", "kfac=hybrid_opt", "kfac.state_dtype=bf16", "trainer.max_steps=1"),
    (*AUTOENCODER, "kfac.method=ekfac"),
    (*AUTOENCODER, "kfac.spread=true", "kfac.update_freq=1"),
    (*AUTOENCODER, "kfac=layer_wise", "kfac.max_dim=30", "trainer.accumulate=2"),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=" ".join)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_run_holds_and_sends_what_the_plan_says(tmp_path, capsys, world, case):
    overrides = (*BASE, *case)
    plan = planned(capsys, tmp_path / "plan.json", *overrides, f"world_size={world}")
    if world == 1:
        results = [run_here(tmp_path, overrides, Backend(Ranks(CPU)))]
    else:
        results = run_ranks(world, run_on_rank, tmp_path, overrides)
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(world))
    for rank, (memory, traffic) in zip(plan["ranks"], results, strict=True):
        assert_equal_to(rank, memory, traffic)
    assert any(r["traffic"]["factors"] for r in plan["ranks"]) == (world > 1)


# ---- models that the harness does not have yet ----


class Transformer(nn.Module):
    """Attention, norms in groups, tokens and a head that are diagonals."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(50, 16)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(16, 50)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x)))


def train_transformer(world, plan_options, options):
    """On a rank: what was measured, and what its own plan says."""
    collective = SingleProcess() if world == 1 else Measuring()
    model = Transformer()
    wrapped = model if world == 1 else DistributedDataParallel(model)
    optimizer = sgd(model)
    with mock.patch(
        "kfac_bench.core.preconditioner.make_plan",
        lambda *args, **others: make_plan(*args, **others | plan_options),
    ):
        kfac = make_kfac(wrapped, optimizer, options, collective=collective)
    collective.kfac = kfac
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):  # in the last one nothing is decomposed
        x, y = torch.randint(50, (2, 8, 6), generator=generator)
        train_step(wrapped, kfac, optimizer, *(my_part(x, y) if world > 1 else (x, y)))
    return measured(kfac), kfac.plan


@pytest.mark.ranks
@pytest.mark.parametrize("plan_options", [{"bucket_numel": 700}, {"batch_numel": 1 << 20}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_transformer_holds_and_sends_what_its_plan_says(
    world, strategy, method, dtype, plan_options
):
    options = {"strategy": strategy, "method": method, "state_dtype": dtype, "spread": False}
    arguments = (world, plan_options, options | {"skip": (), "max_dim": 40})
    if world == 1:
        results = [train_transformer(*arguments)]
    else:
        results = run_ranks(world, train_transformer, *arguments)
    plan = results[0][1]
    assert len(plan.placements) == 18
    rows = dict.fromkeys((p.layer.name for p in plan.placements), 1)
    costs = rank_costs(plan, lambda op: flops(op, plan.method, rows))
    for cost, ((memory, traffic), _) in zip(costs, results, strict=True):
        said = {
            "memory_bytes": cost.memory_bytes
            | {"statistics": cost.statistics_bytes}
            | {"buckets": {stage.value: n for stage, n in cost.bucket_bytes.items()}},
            "traffic": {
                stage.value: {
                    kind: {"messages": t.messages, "payload_bytes": t.payload_bytes}
                    for kind, t in kinds.items()
                }
                for stage, kinds in cost.traffic.items()
            },
        }
        assert_equal_to(said, memory, traffic)
