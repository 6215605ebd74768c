"""``kfac-plan``: its numbers equal what running ranks hold and send; its text and its errors."""

import json
import re
from collections import Counter, defaultdict
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from kfac_bench import cli
from kfac_bench.core.distributed.collective import SingleProcess, TorchCollective
from kfac_bench.core.planning.estimate import flops, rank_costs
from kfac_bench.core.planning.plan import STRATEGIES, Stage
from kfac_bench.core.planning.planner import make_plan
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.backends.ddp import DDP
from kfac_bench.distributed.ranks import Ranks
from tests.benchmark.own_problem.problem_text import written
from tests.support import ROOT
from tests.support.distributed import run_ranks
from tests.support.quick import quick_if
from tests.support.runs import CPU, trainer_of
from tests.support.training import make_kfac, my_part, sgd, train_step

# ---- what a rank holds and sends ----


class Done:
    """A message that has arrived and that keeps its bucket until a caller waits for it."""

    def __init__(self, bucket):
        self.bucket = bucket

    def wait(self):
        self.bucket = None


class Measuring(TorchCollective):
    """A collective that records, at each message, which buckets and statistics are alive.

    It sends a copy of each bucket. So only the executor decides how long a bucket lives.
    """

    def __init__(self):
        super().__init__()
        self.kfac = None
        self.sent = defaultdict(Counter)  # by stage and kind: times each message was sent
        self.bytes = {}
        self.buckets = Counter()  # by stage, the most that was alive and not kept in the store
        self.statistics = 0
        self._alive, self._moments = [], []

    def _send(self, x, name, send):
        if self.kfac is not None and not name.startswith("check/"):
            self._look(x.untyped_storage(), name)
        copy = x.clone()
        send(copy).wait()
        x.copy_(copy)
        return Done(x)

    def _look(self, storage, name):
        executor = self.kfac._executor
        stage = next(s for s in Stage for op in executor.plan.ops(s) if name == _name(op))
        self.sent[stage.value][name] += 1
        self.bytes[name] = storage.nbytes()
        self._alive = [a for a in self._alive if not a[0].expired()]
        self._alive.append((StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))
        # Second moments are carried from the old bases at the end of a stage.
        old = [[basis] for basis in executor.store._old_bases.values()]
        kept = storages(x.tensors for x in executor.store.decompositions.values()) | storages(old)
        in_flight = sum(size for _, pointer, size in self._alive if pointer not in kept)
        self.buckets[stage.value] = max(self.buckets[stage.value], in_flight)
        statistics = executor.batch_statistics
        fresh = [*statistics.factors.values(), *statistics.second_moments.values()]
        moments = [[moment] for moment, _ in fresh]
        self.statistics = max(self.statistics, sum(storages(moments).values()))
        self._moments += [StorageWeakRef(m.untyped_storage()) for (m,) in moments]
        if stage is not Stage.FACTORS:
            assert all(m.expired() for m in self._moments), "this rank's own are still there"

    def all_reduce(self, x, ranks, name):
        return self._send(x, name, lambda y: super(Measuring, self).all_reduce(y, ranks, name))

    def reduce(self, x, root, ranks, name):
        return self._send(x, name, lambda y: super(Measuring, self).reduce(y, root, ranks, name))

    def broadcast(self, x, root, ranks, name):
        return self._send(x, name, lambda y: super(Measuring, self).broadcast(y, root, ranks, name))


def _name(op):
    return getattr(op, "name", None)


def storages(parts):
    """Return the bytes of each storage by address. A view keeps the whole storage alive."""
    found = [x.untyped_storage() for tensors in parts for x in tensors]
    return {s.data_ptr(): s.nbytes() for s in found}


def measured(kfac):
    """Return the memory and the traffic of this rank, with the keys of the JSON file."""
    store, collective = kfac._executor.store, kfac.collective
    factors = [x.tensors for x in store.factors.values()]
    factors += [(x,) for x in store.second_moments.values()]
    memory = {
        "factors": sum(storages(factors).values()),
        "decompositions": sum(storages(x.tensors for x in store.decompositions.values()).values()),
    }
    gradients = kfac._executor.gradients
    held = gradients.whole | gradients.preconditioned
    assert not held, "gradients of the last step are still there"
    if collective.world_size == 1:
        return memory, {stage.value: {} for stage in Stage}
    if kfac.plan.factors_on == "all":  # else some are gone before somebody looks at them
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
    """Compare one rank of the JSON file with what was measured."""
    assert {k: rank["memory_bytes"][k] for k in memory} == memory
    assert {
        stage: {kind: {k: t[k] for k in ("messages", "payload_bytes")} for kind, t in kinds.items()}
        for stage, kinds in rank["traffic"].items()
    } == traffic


# ---- runs of the harness against the JSON file of the command ----


class MeasuredRanks(DDP):
    """A backend whose K-FAC measures its messages."""

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
    """Run the command and return the JSON that it writes."""
    with pytest.raises(SystemExit) as caught:
        cli.plan([*overrides, f"--out={path}"])
    assert caught.value.code == 0
    assert f"every rank: {path}" in capsys.readouterr().out
    return json.loads(path.read_text())


BASE = (
    "logger=none",
    "trainer.max_steps=3",
    "trainer.batch_size=64",
    "trainer.threads=1",
    "trainer.eval_freq=100",
    "kfac.update_freq=2",
    "kfac.factor_update_freq=1",
    "optimizer.lr=0.001",
)
AUTOENCODER = ("model=autoencoder", "task=reconstruction", "model.hidden=[24,5]")
FORMS = [  # of the state: each method, in each precision
    (f"kfac.method={method}", f"kfac.state_dtype={dtype}")
    for method in ("eigen", "inverse")
    for dtype in ("fp32", "bf16")
]
RESNET = ("model=resnet8", "trainer.max_steps=2")
CASES = [
    *((2, *AUTOENCODER, *form) for form in FORMS),
    (4, *AUTOENCODER, *FORMS[3]),
    *((2 if s in ("layer_wise", "local_factors") else 4, *RESNET, f"kfac={s}") for s in STRATEGIES),
    (1, "model=resnet20", "kfac.method=inverse", "trainer.max_steps=1"),
    (1, *AUTOENCODER, "kfac.method=ekfac"),
    (2, *AUTOENCODER, "kfac.method=ekfac"),
    (4, *AUTOENCODER, "kfac.spread=true", "kfac.update_freq=1"),
    (2, *AUTOENCODER, "kfac=layer_wise", "kfac.max_dim=30", "trainer.accumulate=2"),
    (2, *AUTOENCODER, "kfac.block_size=10"),
]
QUICK = [*CASES[:4], *CASES[-5:]]
QUICK += [case for case in CASES if case[3:] in (("kfac=layer_wise",), ("kfac=local_factors",))]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
    ids=lambda case: " ".join(map(str, case)),
)
def test_a_run_holds_and_sends_what_the_plan_states(tmp_path, capsys, case):
    world, overrides = case[0], (*BASE, *case[1:])
    plan = planned(capsys, tmp_path / "plan.json", *overrides, f"--world-size={world}")
    if world == 1:
        results = [run_here(tmp_path, overrides, Backend(Ranks(CPU)))]
    else:
        results = run_ranks(world, run_on_rank, tmp_path, overrides)
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(world))
    for rank, (memory, traffic) in zip(plan["ranks"], results, strict=True):
        assert_equal_to(rank, memory, traffic)
        assert bool(traffic["factors"]) == (world > 1 and "kfac=local_factors" not in case)


# ---- models that the harness does not have yet ----


class Transformer(nn.Module):
    """A model with attention, normalization groups, and diagonal factors of tokens and head."""

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
    """Run on a rank and return what was measured and what the rank's plan states."""
    collective = SingleProcess() if world == 1 else Measuring()
    model = Transformer()
    wrapped = model if world == 1 else DistributedDataParallel(model)
    optimizer = sgd(model)
    with mock.patch(
        "kfac_bench.core.layer_plan.make_plan",
        lambda *args, **others: make_plan(*args, **others | plan_options),
    ):
        kfac = make_kfac(wrapped, optimizer, options, collective=collective)
    collective.kfac = kfac
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):  # in the last one nothing is decomposed
        x, y = torch.randint(50, (2, 8, 6), generator=generator)
        train_step(wrapped, kfac, optimizer, *(my_part(x, y) if world > 1 else (x, y)))
    return measured(kfac), kfac.plan


MANY, BATCHES = {"bucket_numel": 700}, {"batch_numel": 1 << 20}  # messages; as on a GPU
LEAST = {"comm_opt": 1, "hybrid_opt": 4}
"""Ranks from which a strategy has a plan of its own; the others from 2."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "world", "plan_options", "method", "dtype"),
    quick_if(
        lambda case: case[0] == "hybrid_opt" or case[1] < 4,
        [
            (strategy, *case)
            for strategy in STRATEGIES
            for case in (
                (1, BATCHES, "eigen", torch.float32),
                (2, MANY, "inverse", torch.float32),
                (2, BATCHES, "eigen", torch.bfloat16),
                (4, MANY, "eigen", torch.bfloat16),
                (4, BATCHES, "inverse", torch.float32),
            )
            if case[0] >= LEAST.get(strategy, 2)
        ],
    ),
    ids=str,
)
def test_a_transformer_holds_and_sends_what_its_plan_states(
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


# ---- the command ----


def plan_here(capsys, *arguments):
    """Return the exit code, stdout and stderr of the command."""
    with pytest.raises(SystemExit) as caught:
        cli.plan(arguments)
    return caught.value.code, *capsys.readouterr()


@pytest.mark.slow
def test_the_page_shows_what_its_command_prints(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "how-to" / "read_the_plan.md").read_text()
    (command,) = re.findall(r"```bash\nkfac-plan (.*)\n```", page)
    (shown,) = re.findall(r"```text\n([^`]*)```", page)
    monkeypatch.chdir(tmp_path)
    code, printed, said = plan_here(capsys, *command.split())
    assert (code, said) == (0, "")
    rows = re.escape(shown).replace(re.escape("  ...\n"), "(  .*\n)+")
    assert re.fullmatch(f"recipe.*\n{rows}", printed), printed


@pytest.mark.slow
def test_resnet50_on_64_ranks_is_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, printed, said = plan_here(capsys, "model=resnet50", "--world-size=64", "kfac=hybrid_opt")
    assert (code, said) == (0, "")
    for words in (
        "resnet50 on digits [1, 8, 8]",
        "batch 128 over 64 ranks",
        "K-FAC covers 54 layers",
        "strategy hybrid_opt, method inverse, 64 rank(s), 32 gradient worker(s) per layer",
        "on the heaviest ranks",
    ):
        assert words in printed
    (path,) = tmp_path.rglob("*.json")
    assert printed.endswith(f"every rank: {path.relative_to(tmp_path)}\n")
    plan = json.loads(path.read_text())
    assert (plan["world_size"], plan["examples_per_rank"], len(plan["ranks"])) == (64, 2, 64)
    assert (plan["plan"]["layers"], plan["plan"]["gradient_workers"]) == (54, 32)
    assert plan["options"]["kfac"]["strategy"] == "hybrid_opt"
    assert plan["every"] == {"factors": 10, "decompose": 100, "precondition": 1}
    rank = plan["ranks"][63]
    assert rank["per_step"]["flops"] == pytest.approx(
        sum(rank["flops"][stage] / every for stage, every in plan["every"].items())
    )
    for what in ("messages", "payload_bytes", "wire_bytes"):
        assert rank["per_step"][what] == pytest.approx(
            sum(
                kind[what] / plan["every"][stage]
                for stage, kinds in rank["traffic"].items()
                for kind in kinds.values()
            )
        )
    memory = rank["memory_bytes"]
    factors = memory["statistics"] + memory["buckets"]["factors"]
    assert memory["peak"] == memory["factors"] + memory["decompositions"] + max(
        factors, *memory["buckets"].values()
    )


def row(text, label, part):
    """Return the columns of a line of the table: interval, least, mean, heaviest, rank."""
    table = text.partition(f"\n{part}\n")[2]
    found = re.search(rf"^  {label} {{2,}}(.*)$", table, re.MULTILINE)
    return re.split(r" {2,}", found[1].strip())


def test_the_table_shows_least_mean_and_heaviest_rank(capsys):
    """64-2-64: the A of the first layer has 65 rows, the second's 3; G 2 and 64."""
    overrides = ("model=autoencoder", "task=reconstruction", "model.hidden=[2]", "kfac=mem_opt")
    words = (*overrides, "kfac.method=eigen", "--world-size=2", "--out=null")
    code, text, _ = plan_here(capsys, *words)
    assert code == 0
    sizes = [4 * (n * n + n) for n in (65, 2, 3, 64)]
    x, y = sum(sizes[:2]), sum(sizes[2:])
    assert row(text, "decompositions", "memory") == [
        *(f"{n / 1e3:.2f} kB" for n in (y, (x + y) / 2, x)),
        "0",
    ]
    assert row(text, "factors", "messages") == ["10", "1", "1", "1", "all"]
    assert row(text, "average step", "messages") == ["1", "2.1", "2.1", "2.1", "all"]
    gradients = 4 * (2 * 65 + 64 * 3)
    assert row(text, "precondition", "payload")[3:] == [f"{gradients / 1e3:.2f} kB", "all"]
    assert row(text, "precondition", "wire")[3:] == [f"{gradients / 2e3:.2f} kB", "all"]
    assert row(text, "decompose", "payload") == ["100", "none", "none", "none", "all"]


def test_one_rank_has_one_column_and_no_messages(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, _ = plan_here(capsys, "--out=null")
    assert (code, list(tmp_path.iterdir())) == (0, [])
    assert not {"messages", "heaviest", "wire"}.intersection(text.split())
    assert re.search(r"^  factors +\d\.\d\d MB$", text, re.MULTILINE)
    beside = plan_here(capsys, "kfac.background=true", "--out=null")[1]
    assert ["jobs of the thread" in x for x in (text, beside)] == [False, True]
    assert "conv1 " not in text
    assert "stages.0.0.conv1 " in plan_here(capsys, "--out=null", "--layers")[1]


def test_out_dash_prints_json_alone(capsys):
    code, text, _ = plan_here(capsys, "--world-size=2", "--out=-")
    assert (code, json.loads(text)["world_size"]) == (0, 2)
    code, text, _ = plan_here(capsys, "--world-size=2", "--out=-", "kfac=none")
    plan = json.loads(text)
    assert (plan["plan"], plan["ranks"], plan["every"], plan["messages"]) == (None, [], {}, {})
    assert plan["step_flops"] > plan["forward_flops"] > 0


def test_without_kfac_the_text_says_off(capsys):
    assert "K-FAC: off" in plan_here(capsys, "--world-size=2", "--out=null", "kfac=none")[1]


def test_a_problem_is_named_after_its_file(capsys):
    file = ROOT / "examples" / "problems" / "digits.py"
    text = plan_here(capsys, f"problem={file}", "--out=null")[1]
    assert ": the problem digits [1, 8, 8], optimizer sgd, batch 128, fp32\n" in text


EMBEDDINGS = """\
class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.columns = nn.Embedding(7, 4), nn.Embedding(7, 4)

    def forward(self, x):
        return self.rows(x[:, 0]) * self.columns(x[:, 1])


def accuracy("""


def test_a_model_of_embeddings_alone_has_a_plan(tmp_path, capsys):
    """Its forward and backward have no products, so K-FAC's share of their FLOPs is no number."""
    file = written(
        tmp_path,
        ("x = torch.randn(900, 8, generator=generator)", "x = torch.randint(7, (900, 2))"),
        ("y = (x @ torch.randn(8, 3, generator=generator)).argmax(1)", "y = x.sum(1) % 3"),
        ("def accuracy(", EMBEDDINGS),
        ("model=network", "model=Embeddings"),
    )
    code, text, _ = plan_here(capsys, f"problem={file}", "--out=null", "kfac.skip=[]")
    assert code == 0
    assert re.match(r"K-FAC adds [0-9.]+ kFLOP per step on average and [0-9.]+ kB\n", text)


def test_help_prints_the_usage(capsys):
    code, text, _ = plan_here(capsys, "--help")
    assert code == 0
    for said in ("--world-size N", "--out FILE.json", "--layers", "kfac-plan model=resnet50"):
        assert said in text


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--world-size=0"], "--world-size 0: expected a whole number of at least 1"),
        (["--world-size=two"], "--world-size two"),
        (["--world-size="], "--world-size : expected"),
        (["world_size=2"], "world_size=2: write --world-size 2"),
        (["out=-"], "out=-: write --out -"),
        (["--world-size=257"], "leaves some of 257 ranks without an example"),
        (["--world-size=256"], "batch norm"),
        (["--world-size=64", "trainer.accumulate=8"], "the 4 examples of a rank"),
        (["kfac=hybrid_optt"], "did you mean hybrid_opt?"),
        (["kfac=hybrid_opt", "kfac.grad_worker_fraction=0.4", "--world-size=8"], "k/8 with k"),
        (["world_sizes=2"], "world_sizes"),
        (["--layer"], "--layer"),
        (["--config-dir", "/nowhere"], "--config-dir /nowhere: no such folder"),
        (["--out=/proc/nowhere/plan.json"], "--out /proc/nowhere/plan.json: cannot be written"),
    ],
    ids=str,
)
def test_wrong_words_give_a_one_line_error(capsys, arguments, fragment):
    code, printed, said = plan_here(capsys, *arguments)
    assert printed == ""
    assert (code, len(said.splitlines())) == (2, 1), said
    assert said.startswith("kfac-plan: ")
    assert fragment in said


def test_the_report_says_which_options_change(capsys):
    changes = ("kfac.damping=0.1", "kfac.damping_decay_epochs=[40]")
    changes += ("kfac.interval_growth_epochs=[5,9]", "kfac.update_freq=20")
    with pytest.raises(SystemExit) as caught:
        cli.plan(["model=autoencoder", *changes, "--out=null"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "damping 0.1, times 0.5 after epoch 40" in lines
    assert "intervals 10 and 20 steps, times 10 after each of the epochs 5, 9" in lines
