"""The measuring commands run and compute correctly. No test depends on speed."""

import io
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import (
    anatomy,
    background,
    checks,
    defaults,
    gpu,
    gpu_training,
    guards,
    intervals,
    measure,
    memory,
    models,
    overhead,
    speed,
    tables,
)
from benchmarks.floor import floor_flops
from benchmarks.measure import Case, Cycle, Timing, Variant
from benchmarks.models import Size
from kfac_bench.core import KFAC
from kfac_bench.core.execution.background import Background
from kfac_bench.errors import UsageError
from tests.support import ROOT, forks

QUICK = Size(quick=True)
TINY = Case("encoder", QUICK)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_script(name, *arguments):
    """Run a file of benchmarks/ as a user does, from the root of the repository."""
    command = [sys.executable, f"benchmarks/{name}", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def run_forked(path, *arguments):
    """Run a file as a script in a fork, which needs no imports."""
    return subprocess.CompletedProcess([], *forks.call(script_in_fork, path, arguments))


def script_in_fork(path, arguments):
    """Run the file, in whose processes memory is measured in forks too."""
    memory.subprocess = SimpleNamespace(run=lambda command, **_: run_forked(*command[1:]))
    sys.argv = [path, *arguments]
    code = 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
    return code or 0, out.getvalue(), errors.getvalue()


# ---- an interval from its kinds of steps ----


def kind_of(step, factor_freq, update_freq):
    if step % update_freq == 0:
        return "decompose"
    return "factors" if step % factor_freq == 0 else "plain"


@pytest.mark.parametrize("setting", [(1, 10), (10, 100), (50, 500), (2, 4), (3, 3)])
def test_the_mean_step_is_the_mean_of_an_interval(setting):
    seconds = {"plain": 1.25, "factors": 3.5, "decompose": 17.0}
    steps = [seconds[kind_of(step, *setting)] for step in range(setting[1])]
    assert intervals.mean_step(seconds, *setting) == pytest.approx(statistics.fmean(steps))


def test_a_setting_with_unmeasured_steps_is_refused():
    with pytest.raises(UsageError, match="multiple"):
        intervals.mean_step({"plain": 1, "factors": 2, "decompose": 3}, 10, 15)


def test_combine_returns_medians_and_the_range_of_rounds():
    kinds = {"plain": [2.0, 4.0, 9.0], "factors": [3.0, 5.0, 9.0], "decompose": [8.0, 9.0, 29.0]}
    timing = Timing("", 1, sgd_s=[1.0, 2.0, 3.0], methods={"eigen": kinds})
    found = intervals.combine(timing, "eigen", 1, 2)
    assert found["setting"] == [1, 2]
    assert found["mean_s"] == pytest.approx((5 + 9) / 2)
    assert found["ratio"] == pytest.approx((5 + 9) / 2 / 2)
    assert found["per_round"] == pytest.approx([11 / 2, 14 / 2 / 2, 38 / 2 / 3])
    assert (found["low"], found["high"]) == pytest.approx((3.5, 38 / 6))


def test_summarize_leaves_the_first_step_out_of_the_mean():
    found = intervals.summarize([9.0, 1.0, 2.0, 2.0, 5.0])
    assert found == {
        "mean_s": 2.5,
        "median_s": 2.0,
        "slowest_s": 5.0,
        "slowest_over_median": 2.5,
        "first_s": 9.0,
    }


# ---- timing ----


@pytest.mark.parametrize("block_steps", [1, 2])
def test_kfac_follows_the_cycle_in_each_step(block_steps):
    cycle = Cycle(block_steps)
    length = len(cycle.start) + 2 * len(cycle.cycle)
    kinds = [cycle.kind(step) for step in range(length)]
    assert kinds[:3] == ["decompose", "plain", "factors"]
    timed = [kind for kind, n in cycle.blocks for _ in range(n)]
    assert kinds[3 + cycle.warm : 3 + len(cycle.cycle)] == timed
    factors, decompose = cycle.every("factors", "decompose"), cycle.every("decompose")
    variant = Variant(TINY, "eigen", factors, decompose, spread=False)
    done = []
    for _ in range(length):
        variant.step()
        stages = variant.kfac.statistics()["stage_s"]
        if stages.get("Decompose", 0) > 0:
            done.append("decompose")
        else:
            done.append("factors" if stages.get("ComputeFactor", 0) > 0 else "plain")
    assert done == kinds


def test_timed_steps_do_not_spread_decompositions(monkeypatch):
    seen = []

    def spreading(model, optimizer, *, skip=("^layers.0.q$",), spread=True, **keywords):
        seen.append((spread, skip))
        return KFAC(model, optimizer, skip=skip, **keywords)

    monkeypatch.setattr(measure, "KFAC", spreading)
    measure.time_kinds(TINY, ["inverse"], 1)
    measure.run_intervals(TINY, ["inverse"], 1, 2, intervals=1)
    skip = ("^layers.0.q$", "^embedding$", "^head$")  # KFAC's own default, and the model's
    assert seen == [(False, skip), (True, skip)]


def test_rounds_are_interleaved_and_rotate(monkeypatch):
    order = []

    def block(self, steps):
        order.append((self.kfac.plan.method if self.kfac else "sgd", steps))
        return 0.5  # seconds per step: blocks of two steps

    monkeypatch.setattr(Variant, "block", block)
    monkeypatch.setattr(measure, "matmul_rate", lambda case: 1e9)
    timing = measure.time_kinds(TINY, ["eigen", "inverse"], 2)
    del order[: order.index(("inverse", 2)) + 1]  # warming up ends with the start of inverse
    kinds = [2, 2, 1]
    turn = {"sgd": [("sgd", 2)]} | {m: [(m, n) for n in kinds] for m in ("eigen", "inverse")}
    first, second = ["sgd", "eigen", "inverse"], ["eigen", "inverse", "sgd"]
    assert order == [step for name in first + second for step in turn[name]]
    assert timing.block_steps == 2
    assert timing.sgd_s == [0.5, 0.5]
    assert timing.methods["inverse"] == {kind: [0.5, 0.5] for kind in measure.KINDS}


def test_a_used_up_budget_ends_after_a_whole_round():
    done = []
    timing = measure.time_kinds(
        TINY, ["eigen"], 5, budget_s=0.0, on_round=lambda n, seconds: done.append(n)
    )
    assert done == [1]
    assert {len(x) for x in timing.methods["eigen"].values()} == {1}


def test_whole_intervals_record_every_step(monkeypatch):
    made = {}

    def init(self, case, method, *schedules, **options):
        make(self, case, method, *schedules, **options)
        made[method or "sgd"] = self, schedules

    make = Variant.__init__
    monkeypatch.setattr(Variant, "__init__", init)
    seconds = measure.run_intervals(TINY, ["inverse"], 2, 4, intervals=3)
    assert {name: len(x) for name, x in seconds.items()} == {"sgd": 13, "inverse": 13}
    variant, schedules = made["inverse"]
    assert variant.kfac.steps == 13
    assert schedules == (2, 4)  # of factors, of decompositions


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_a_case_reads_its_clock(clock, monkeypatch):
    monkeypatch.setattr(measure.time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(measure.time, "process_time", lambda: 8.0)
    assert Case("encoder", clock=clock).now() == {"wall": 7.0, "cpu": 8.0}[clock]


@pytest.mark.parametrize(("share", "crowded"), [(0.5, True), (0.97, False)])
def test_a_core_that_other_programs_used_is_reported(share, crowded):
    results = speed.header("cpu", False)
    results["machine"]["hardware"]["threads"] = 1
    entry = {"precision": "fp32", "gemm_flop_s": [1e9], "cpu_share": share}
    text = tables.render(results | {"models": [entry]}, body=False)
    assert ("this process had 50 % of it" in text) == crowded
    text = tables.render(results | {"models": [entry], "clock": "cpu"}, body=False)
    assert "other programs used" not in text
    assert "seconds are of CPU time" in text


# ---- floors ----


class Loop:
    """The part of a workload that floor_flops needs."""

    def __init__(self, model, x):
        self.model, self.loss = model, lambda: model(x).sum()


def kfac_of(model, method):
    return KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), method=method)


@pytest.mark.parametrize(("method", "cube", "products"), [("eigen", 14 / 3, 4), ("inverse", 1, 2)])
def test_the_floor_of_a_linear_layer(method, cube, products):
    model = nn.Sequential(nn.Linear(3, 5))
    found = floor_flops(kfac_of(model, method), Loop(model, torch.randn(6, 7, 3)))
    assert found == pytest.approx(
        {
            "ComputeFactor": 6 * 7 * (4**2 + 5**2),  # one triangle: half of 2 n d^2
            "Decompose": cube * (4**3 + 5**3),
            "Precondition": products * 4 * 5 * (4 + 5),
        }
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_the_floor_of_a_convolution(stride):
    """With stride 1, A needs 13 offsets of the autocorrelation, 2 n C^2 each, and no patches."""
    model = nn.Sequential(nn.Conv2d(4, 5, 3, stride=stride, padding=1))
    loop = Loop(model, torch.randn(6, 4, 8, 8))
    found = floor_flops(kfac_of(model, "eigen"), loop)["ComputeFactor"]
    rows = 6 * (8 // stride) ** 2
    a = 26 * 4**2 if stride == 1 else 37**2
    assert found == pytest.approx(rows * (a + 5**2))


# ---- models ----


@pytest.mark.parametrize("name", models.NAMES)
def test_a_workload_is_the_same_each_time(name):
    one, two = (models.build(name, QUICK) for _ in range(2))
    for p, q in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert one.model.training
    torch.manual_seed(1)
    loss = one.loss()
    torch.manual_seed(1)  # dropout
    assert loss.item() == two.loss().item() > 0


def covered(name, size):
    return {layer.name for layer in Variant(Case(name, size), "inverse").kfac.report().layers}


def test_kfac_covers_all_layers_but_embedding_and_head():
    encoder = covered("encoder", Size())
    linear = {f"layers.{i}.{x}" for i in range(4) for x in ("q", "k", "v", "o", "up", "down")}
    assert linear <= encoder
    assert not {"embedding", "head"} & encoder
    bert = covered("bert_base", QUICK)
    assert any(name.endswith("attention.self.query") for name in bert)
    assert not [name for name in bert if name.startswith("cls") or "embeddings" in name]


# ---- memory ----


@pytest.mark.slow
def test_peak_memory_includes_kfac_but_not_the_parent_process():
    """A process inherits ru_maxrss from its parent, so the parent's ballast must not count."""
    ballast = torch.ones(300, 1 << 20)
    case = Case("resnet32", QUICK)
    found = memory.peaks(case, ["eigen"], steps=1)
    del ballast
    kfac = Variant(case, "eigen").kfac
    kept = sum(2 * 4 * x.spec.dim(f) ** 2 for x in kfac.report().layers for f in ("A", "G"))
    assert found["eigen"] - found["sgd"] > kept / 2 > 1e6
    assert found["eigen"] < 100e6


def test_a_failed_memory_process_is_one_line():
    with pytest.raises(UsageError, match=r"^memory of lenet, sgd: unknown model 'lenet'"):
        memory.peaks(Case("lenet", QUICK), ["eigen"])


# ---- speed.py ----


@pytest.fixture(scope="module")
def speed_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("speed") / "new" / "speed.json"
    arguments = ["--quick", "--models", "encoder", "--methods", "eigen", "--real", "--clock", "cpu"]
    arguments += ["--no-memory", "--kfac", "damping=0.1"]
    done = run_script("speed.py", *arguments, "--out", out)
    assert done.returncode == 0, done.stderr
    return done, json.loads(out.read_text())


@pytest.mark.slow
def test_speed_writes_all_results(speed_run):
    _, results = speed_run
    assert results["machine"]["hardware"]["threads"] == 1
    assert results["machine"]["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert {"date", "device", "kfac"} <= results.keys()
    assert results["kfac"] == {"damping": 0.1}
    assert results["clock"] == "cpu"
    assert [e["name"] for e in results["models"]] == ["encoder"]
    for entry in results["models"]:
        assert 0 < entry["cpu_share"] < 1.2
        assert len(entry["sgd_s"]) == len(entry["gemm_flop_s"]) == 2
        rounds = {k: len(x) for k, x in entry["methods"]["eigen"].items()}
        assert rounds == dict.fromkeys(measure.KINDS, 2)
        assert entry["stage_s"]["eigen"]["decompose"]["Decompose"][0] > 0
        assert entry["floor_flop"]["eigen"]["Precondition"] > 0
        assert entry["memory_bytes"] == {}
        assert [len(i["seconds"]["eigen"]) for i in entry["intervals"]] == [5, 9]


@pytest.mark.slow
def test_speed_combines_its_medians_correctly(speed_run):
    _, results = speed_run
    for entry in results["models"]:
        medians = {k: statistics.median(x) for k, x in entry["methods"]["eigen"].items()}
        for found, (f, d) in zip(entry["settings"]["eigen"], ((1, 2), (2, 4)), strict=True):
            steps = [medians[kind_of(step, f, d)] for step in range(d)]
            assert found["mean_s"] == pytest.approx(statistics.fmean(steps))
            ratio = found["mean_s"] / statistics.median(entry["sgd_s"])
            assert found["ratio"] == pytest.approx(ratio)


@pytest.mark.slow
def test_speed_prints_the_tables_of_its_results(speed_run):
    done, results = speed_run
    assert done.stdout.strip() == tables.render(results).strip()
    assert "encoder fp32: 2 rounds of" in done.stderr  # the estimate of the remaining time
    rows = [line for line in done.stdout.splitlines() if line.startswith("| encoder")]
    assert len(rows) == 2 + 3 + 4  # settings, stages, intervals of two variants
    for title in ("Mean step time", "Stages", "Whole intervals"):
        assert f"### {title}" in done.stdout


def test_stages_are_differences_of_steps_and_host_seconds():
    kinds = {"plain": [3.0], "factors": [5.0], "decompose": [11.0]}
    own = {
        "plain": {"ComputeFactor": [0.0], "Precondition": [1.0]},
        "factors": {"ComputeFactor": [1.5], "Precondition": [1.1]},
        "decompose": {"ComputeFactor": [1.6], "Decompose": [5.0], "Precondition": [1.2]},
    }
    flop = {"ComputeFactor": 10.0, "Decompose": 30.0, "Precondition": 5.0}
    entry = {
        "sgd_s": [2.0], "gemm_flop_s": [10.0], "methods": {"m": kinds}, "stage_s": {"m": own},
        "floor_flop": {"m": flop},
    }  # fmt: skip
    differences = [
        ("factors - plain", 2.0, 1.0),
        ("decompose - factors", 6.0, 3.0),
        ("plain - SGD", 1.0, 0.5),
    ]
    assert list(tables.stages(entry, "m", host=False)) == differences
    assert list(tables.stages(entry, "m", host=True)) == [
        *differences,
        ("ComputeFactor", 1.5, 1.0),
        ("Decompose", 5.0, 3.0),
        ("Precondition", 1.0, 0.5),
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--models", "resnet33"], "unknown model 'resnet33': choose from resnet32, encoder"),
        (["--rounds", "0"], "'0' is not a whole number from 1"),
        (["--batch", "-1"], "'-1' is not a whole number from 1"),
        (["--threads", "two"], "'two' is not a whole number from 1"),
        (["--device", "cuda"], "no CUDA device"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--out", "/dev/null/speed.json"], "cannot write /dev/null/speed.json"),
        (["--kfac", "damping"], "--kfac damping: not KEY=VALUE"),
        (["--kfac", "damping=[1"], "--kfac damping=[1: the value is not YAML"),
        (["--kfac", "dampnig=1"], "KFAC of encoder: "),
        (["--kfac", "damping=-1"], "damping=-1"),
        (["--methods", "newton"], "newton"),
        (["--methods", ""], "--methods names nothing"),
        (["--models", ","], "--models names nothing"),
        (["--clock", "cpu", "--threads", "2"], "--clock cpu is for one thread on the CPU"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_input_of_speed_is_one_line_and_exit_code_2(
    arguments, reason, tmp_path, monkeypatch, capsys
):
    """Bad input fails before anything is measured."""
    monkeypatch.setattr(speed, "measure_case", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    common = ["--quick", "--models", "encoder", "--no-memory", "--out", str(tmp_path / "x.json")]
    assert speed.main([*common, *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("speed.py: ")
    assert reason in lines[0]


# ---- gpu.py ----


@pytest.fixture(scope="module")
def gpu_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu")
    paths = ["--out", str(path / "gpu.json"), "--page", str(path / "docs" / "gpu.md")]
    script = str(ROOT / "benchmarks" / "gpu.py")
    done = run_forked(script, "--quick", "--device", "cpu", *paths)
    assert done.returncode == 0, done.stderr
    return json.loads((path / "gpu.json").read_text()), (path / "docs" / "gpu.md").read_text()


@pytest.mark.slow
def test_gpu_checks_and_measures_one_configuration_of_each_model(gpu_run):
    results, _ = gpu_run
    assert [e["name"] for e in results["models"]] == ["resnet50", "bert_base", "resnet32"]
    assert [e["precision"] for e in results["models"]] == ["bf16", "bf16", "tf32"]
    right = [c for c in results["checks"] if "gradient_error" in c]
    assert [c["passed"] for c in right] == [True, True]
    assert all(0 < c["gradient_error"] < 1e-3 and 0 < c["factor_error"] < 1e-3 for c in right)
    assert [c["passed"] for c in results["checks"] if c not in right] == [None] * 6
    assert results["left_out"] == []
    assert results["models"][0]["memory_bytes"].keys() == {"sgd", "eigen", "inverse"}


@pytest.mark.slow
def test_gpu_page_shows_the_goal_and_the_machine(gpu_run):
    results, page = gpu_run
    assert "| Horovod | tested | not tried |" in page
    assert "### Peak memory" in page
    assert [g["what"].rpartition(" ")[2] for g in results["goal"]] == ["eigen", "inverse"]
    for goal in results["goal"]:
        verdict = "reached" if goal["reached"] else "missed"
        assert f"| {goal['what']} | {100 * (goal['ratio'] - 1):+.1f} % | {verdict} |" in page
    assert results["date"] in page
    assert f"torch {results['machine']['versions']['torch']}" in page
    assert "Left out" not in page


def test_the_goal_covers_resnet50_at_one_setting():
    def entry(name, *ratios):
        settings = [{"setting": [10 * 5**i, 100 * 5**i], "ratio": r} for i, r in enumerate(ratios)]
        return {"name": name, "shape": "x", "precision": "tf32", "settings": {"eigen": settings}}

    entries = [entry("resnet50", 1.2, 1.05), entry("resnet50", 1.0, 1.06), entry("resnet32", 1, 1)]
    found = list(gpu.goal(entries))
    assert [(g["ratio"], g["reached"]) for g in found] == [(1.05, True), (1.06, False)]
    assert found[0]["what"] == "resnet50 (x, tf32), eigen"


def test_the_page_of_the_gpu_is_that_of_its_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())
    assert gpu.page(results) == (ROOT / "docs" / "lab" / "gpu.md").read_text()


def test_the_table_of_training_has_the_runs_that_were_alone():
    def run(rate, alone, *curve):
        return gpu_training.Trained("AdamW", rate, 0, alone, list(curve))

    curve = (50, 2.0, 0.8), (100, 4.0, 0.9), (150, 6.0, 0.89)
    runs = [run(0.1, False, *curve), run(0.2, False, *curve), run(0.2, True, *curve)]
    *_, row, _, missing = gpu_training.table(runs).splitlines()
    assert row == "| AdamW | 0.2 (2) | 100 | 4.0 | 0.8900 | 6.0 |"
    assert missing.startswith("Not run yet: SGD with momentum, SGD with K-FAC, AdamW with K-FAC, ")
    *_, row, _, _ = gpu_training.table(runs, 0.95).splitlines()
    assert row == "| AdamW | 0.2 (2) | never | never | 0.8900 | 6.0 |"


@pytest.fixture
def gpu_options(tmp_path, monkeypatch):
    """Return the options of a run whose checks and measurements are faked."""
    monkeypatch.setattr(checks, "run_all", lambda *arguments: [])
    paths = ["--out", str(tmp_path / "x.json"), "--page", str(tmp_path / "x.md")]
    return gpu.parse(["--device", "cpu", *paths])


def test_configurations_that_do_not_fit_the_time_are_listed(gpu_options, monkeypatch):
    clock = [0.0]
    shares = []

    def measured(case, share_s, progress):
        shares.append(share_s)
        clock[0] += 100
        entry = {"name": case.name, "shape": "x", "precision": case.precision, "sgd_s": [1.0]}
        entry |= {"cpu_share": 1.0, "gemm_flop_s": [1.0], "methods": {}, "settings": {}}
        return entry | {"intervals": [], "memory_bytes": {}, "least_s": 90.0}

    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(gpu, "measure_case", measured)
    results = gpu.run(gpu_options)
    # 470 s hold four configurations of 100 s. The fifth needs 90 s, but only 70 s are left.
    names = [(e["name"], e["precision"]) for e in results["models"]]
    assert names == [(name, precision) for name, _, _, precision in gpu.ALL[:4]]
    assert shares[0] == pytest.approx(2 * 470 / 8)
    assert shares[1] == pytest.approx(2 * 370 / 7)
    assert len(results["left_out"]) == 7 - 4
    assert results["left_out"][0] == {
        "configuration": "resnet50 (batch 256, bf16)",
        "reason": "70 s left, needs 90 s",
    }
    assert "* bert_base (batch 8, 512 tokens, bf16): 70 s left" in gpu_options.page.read_text()


def test_models_that_nothing_was_measured_of_are_listed_when_the_time_is_over(gpu_options):
    gpu_options.minutes = 0.01
    results = gpu.run(gpu_options)
    assert [x["reason"] for x in results["left_out"]] == ["no time left"] * 7
    assert "* bert_base (batch 8, 512 tokens, bf16): no time left" in gpu_options.page.read_text()


def test_a_failed_configuration_does_not_end_the_others(gpu_options, monkeypatch):
    seen = []

    def measured(case, share_s, progress):
        seen.append(case.name)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nmore")

    monkeypatch.setattr(gpu, "measure_case", measured)
    results = gpu.run(gpu_options)
    assert len(seen) == len(results["left_out"]) == 7
    assert results["left_out"][3]["reason"] == "CUDA out of memory. Tried"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no CUDA device: torch sees none"),
        (["--device", "cpu", "--minutes", "0"], "--minutes 0: must be above 0"),
        (["--device", "cpu", "--minutes", "nan"], "must be above 0"),
        (["--device", "cpu", "--minutes", "soon"], "invalid float value: 'soon'"),
        (["--device", "cpu", "--page", "/dev/null/gpu.md"], "cannot write /dev/null/gpu.md"),
    ],
)
def test_bad_input_of_gpu_is_one_line_and_exit_code_2(
    arguments, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    paths = ["--out", str(tmp_path / "x.json"), "--page", str(tmp_path / "x.md")]
    assert gpu.main([*paths, *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("gpu.py: ")
    assert reason in error


# ---- checks ----


def test_a_wrong_step_fails_its_check(monkeypatch):
    step = KFAC.step

    def wrong(self, **options):
        step(self, **options)
        weight = self._layers[0].weight
        if weight.dtype == torch.float32:
            weight.grad *= 1.01

    assert checks.check_step("cpu", "eigen")["passed"]
    monkeypatch.setattr(KFAC, "step", wrong)
    found = checks.check_step("cpu", "eigen")
    assert not found["passed"]
    assert found["gradient_error"] > 1e-3


def test_a_missing_tensor_counts_as_an_infinite_error():
    one = {"a": torch.ones(2)}
    assert checks._worst(one, one) == 0
    assert checks._worst(one, one | {"b": torch.ones(2)}) == float("inf")
    assert checks._worst({}, {}) == float("inf")


def test_two_rows_of_diverged_runs_are_not_compared():
    good, bad = (defaults.Curve([0], [0.0], [metric]) for metric in (0.5, math.inf))
    rows = [
        defaults.Comparison("t", "sgd", 0.1, [a], [b]) for a in (good, bad) for b in (good, bad)
    ]
    assert [row.verdict for row in rows] == [
        "worse, within the range",
        "**WORSE**",
        "**better**",
        "both diverge",
    ]


def test_a_tensor_with_nan_fails_the_check(monkeypatch):
    good, bad = torch.ones(2), torch.full((2,), math.nan)
    assert math.isnan(checks._worst({"a": good, "b": bad}, {"a": good, "b": good}))
    on_device = {"x": ({"a": good}, {"f": bad}), "cpu": ({"a": good}, {"f": good})}
    monkeypatch.setattr(checks, "_train", lambda device, *_: on_device[device])
    assert not checks.check_step("x", "eigen")["passed"]


@pytest.fixture
def modes(monkeypatch):
    """Record the modes that torch receives, without a GPU."""
    seen = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", seen.append)
    return seen


def test_a_forbidden_wait_fails_the_check(modes):
    def step():
        raise RuntimeError("called a synchronizing CUDA operation\nat")

    found = checks.watch(step, allowed=False)
    assert found == {"passed": False, "message": "called a synchronizing CUDA operation"}
    assert modes == ["error", "default"]


def test_allowed_waits_are_counted(modes):
    def step():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("does not yet detect all synchronizing operations", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert checks.watch(step, allowed=True) == {"passed": True, "waits": 3}
    assert modes == ["warn", "default"]


# ---- guards ----


def test_guards_warn_of_wrong_scripts_and_of_no_others(capsys):
    guards.main(["--steps", "2", "--tasks", "digits MLP"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == len(guards.SCRIPTS)
    for name, kind, warned, missed in rows:
        assert warned.strip() == ("0 of 2" if kind.strip() == "right" else "2 of 2"), name
        assert not missed.strip()


# ---- other commands ----


def test_a_model_or_task_that_is_not_measured_is_refused(capsys):
    assert anatomy.main(["--tasks", "pydoc GRU"]) == 2
    with pytest.raises(SystemExit, match="2"):
        overhead.main(["--models", "maskrcnn"])
    for said in capsys.readouterr():
        assert "unknown" in said


# ---- work beside training ----


def test_background_prints_a_row_for_each_variant(capsys, monkeypatch):
    monkeypatch.setattr(background, "core_share", lambda: 0.5)
    monkeypatch.setattr(speed, "SETTINGS", ((1, 2), (2, 4)))
    assert background.main(["--quick", "--models", "encoder", "--methods", "inverse"]) == 0
    head, _, *rows, _, note = capsys.readouterr().out.splitlines()
    assert head.startswith("| model | method |")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[2:4] for row in cells] == [
        [setting, variant] for setting in ("1, 2", "2, 4") for variant in background.VARIANTS
    ]
    assert {row[5] for row in cells if row[3] == "SGD"} == {"1.00"}
    assert "one had 50 % left" in note


@pytest.mark.slow
def test_the_thread_has_ended_when_another_variant_has_its_turn(monkeypatch):
    working, block = [], Variant.block

    def look(self, steps):
        working.append([v for v in beside if v is not self and pending(v)])
        if self.kfac is not None and self.kfac._executor.background is not None:
            beside.add(self)
        return block(self, steps)

    def pending(variant):
        results = variant.kfac._executor.background_slices._results.values()
        return any(not result.__self__.future.done() for result in results)

    def slow_run(self, job, ready):
        time.sleep(0.01)
        return run(self, job, ready)

    beside, run = set(), Background._run
    monkeypatch.setattr(Background, "_run", slow_run)
    monkeypatch.setattr(Variant, "block", look)
    found = background.measure(TINY, "eigen", (1, 2), rounds=2)
    assert beside
    assert not any(working)
    assert {len(steps.each_s) for steps in found.values()} == {2 * background.TURN_STEPS}


def test_background_refuses_an_unknown_model(capsys):
    assert background.main(["--models", "none"]) == 2
    assert "unknown model 'none': choose from" in capsys.readouterr().err
