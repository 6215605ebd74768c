"""The rows of the papers: their files are complete and all their cells are valid."""

import itertools
import json
import math
import os
import resource

import pytest

from kfac_bench.benchmark import (
    computed,
    computed_numbers,
    grid,
    run_end,
    schema,
    slurm_jobs,
    suite,
)
from kfac_bench.benchmark.result import axes_of, key_of
from kfac_bench.benchmark.result import published_values as published
from kfac_bench.cli import plan_command
from kfac_bench.cli.bench_command import build_parser
from kfac_bench.config import compose
from kfac_bench.config.conf_files import PROFILES
from kfac_bench.errors import UsageError
from kfac_bench.record.events import EVENTS_FILE
from kfac_bench.record.runs import load
from kfac_bench.simulate import simulate_options
from tests.support.configs import quick_load
from tests.support.quick import quick_if

ROWS = list(suite.ORDER)
PAPER = [
    (
        "table1_cifar_inv_vs_eigen",
        "accuracy",
        {"optimizer": "K-FAC inverse", "batch": "1024"},
        91.71,
    ),
    ("table2_fig4_cifar_correctness", "accuracy", {"optimizer": "K-FAC", "gpus": "1"}, 92.93),
    ("fig5a_resnet50_convergence", "epochs to target", {"optimizer": "K-FAC"}, 43),
    ("fig5bc_maskrcnn_convergence", "segm mAP", {"optimizer": "K-FAC"}, 0.35),
    ("table3_bert_lamb", "F1", {"steps": "1400"}, 89.94),
    ("table4a_bert_kfac_phase2", "F1", {"steps": "1000"}, 90.12),
    ("table4b_bert_kfac_phase1", "F1", {"steps": "1200"}, 90.52),
    ("table4c_bert_kfac_both", "F1", {"steps": "1563"}, 90.15),
    (
        "table5_fig6_update_interval",
        "minutes",
        {"model": "ResNet-152", "optimizer": "K-FAC every 100"},
        369,
    ),
    ("sec634_bert_interval", "more than every 50", {"optimizer": "K-FAC every 100"}, -1750),
    ("sec634_bert_interval", "seconds of both phases", {"optimizer": "LAMB"}, 111059),
    ("fig7_step_profile", "share, against layer_wise", {"strategy": "comm_opt"}, 3.4),
    (
        "fig8_resnet_scaling",
        "efficiency",
        {"model": "ResNet-50", "optimizer": "comm_opt", "ranks": "128"},
        71.8,
    ),
    ("table6_fig9a_maskrcnn_scaling", "steps", {"optimizer": "SGD", "gpus": "128"}, 7320),
    (
        "fig9bc_bert_scaling",
        "efficiency",
        {"phase": "2", "optimizer": "K-FAC", "ranks": "128"},
        78.3,
    ),
    ("kaisa_unet_lgg", "less time", {"optimizer": "K-FAC"}, (18.1, 36.3)),
    ("kaisa_fixed_memory_resnet50", "less time", {}, 32.5),
    ("kaisa_fixed_memory_bert", "less time", {}, 41.6),
]


def test_run_all_includes_every_row_with_profiles():
    there = set(compose.options_of("benchmark"))
    assert there >= set(ROWS)
    with_profiles = {name for name in there if schema.load(name).profiles}
    assert with_profiles == {*ROWS, *suite.CLAIMS}, "a row that run all leaves out"
    assert suite.names("all", None) == suite.names("all", "smoke") == ROWS
    assert suite.names("all", "cpu") == list(suite.CLAIMS)


@pytest.mark.parametrize("name", ROWS)
def test_the_file_of_a_row_is_complete_and_consistent(name):
    row = schema.load(name)
    assert row.source.startswith(("TPDS 2022, ", "KAISA (SC21)"))
    assert [*row.profiles] == list(PROFILES)
    assert row.notes, "no paper is without a gap"
    assert row.profiles["smoke"].ran or not row.axes, "a smoke row says what ran"
    suite.check(row, name)
    for quantity in row.quantities.values():
        assert bool(quantity.measure) != bool(quantity.of)
        assert bool(quantity.how) == bool(quantity.of)
    # A published number without a quantity of ours has no line on the pages.
    assert {entry.quantity for entry in row.published} <= {*row.quantities}
    axes = axes_of(row)
    for of in published(row).values():
        for key, (value, source) in of.items():
            assert source
            assert all(point in axes[axis] for axis, point in key), key
            low, high = value if isinstance(value, tuple) else (value, value)
            assert low <= high
    for known in (known for part in row.computed for known in part.known):
        assert known.quantity in row.quantities
        assert known.how in ("fitted", "given", "chosen afterwards")
        assert all(set(values) <= set(axes[axis]) for axis, values in known.only.items())


@pytest.mark.parametrize(("name", "quantity", "point", "value"), PAPER)
def test_published_numbers_equal_the_paper(name, quantity, point, value):
    assert published(schema.load(name))[quantity][key_of(point)][0] == value


QUICK_ROWS = (
    "table1_cifar_inv_vs_eigen",
    "table4a_bert_kfac_phase2",
    "table5_fig6_update_interval",
    "fig5bc_maskrcnn_convergence",
    "fig8_resnet_scaling",
    "kaisa_unet_lgg",
)


@pytest.mark.parametrize(
    ("name", "profile"),
    quick_if(
        lambda case: case[0] in QUICK_ROWS and case[1] == "smoke",
        itertools.product(ROWS, PROFILES),
    ),
)
def test_cells_of_all_profiles_are_valid_runs(name, profile):
    """One cell for each value of each axis: all cells would take minutes."""
    cells, seen = grid.cells(schema.load(name), "runs/x", None, profile), set()
    for cell in cells:
        own = set(cell.point.items())
        if (own <= seen and seen) or cell.seed != cells[0].seed:
            continue
        seen |= own
        for each in (*cell.before, cell):
            config = quick_load(each.overrides)
            if profile == "smoke":
                assert config.data.name == "digits" or config.data.root == "demo"
                assert not config.logger.wandb
                assert each.ranks <= 2


def test_smoke_cells_replace_those_of_the_paper():
    row = schema.load("table5_fig6_update_interval")
    paper, smoke = (grid.cells(row, "r", [0], p) for p in ("paper", "smoke"))
    assert [(c.ranks, c.seed) for c in paper[:2]] == [(64, 0), (64, 0)]
    assert "kfac.update_freq=500" in paper[3].overrides
    assert smoke[2].config().kfac.update_freq == 20
    assert len(smoke) == 4
    assert "run_id=" in smoke[0].rank_command()[-1]
    assert paper[0].command()[2:4] == ["kfac_bench.benchmark.local_runs", "64"]


def test_earlier_phases_run_first_and_are_shared():
    row = schema.load("table4a_bert_kfac_phase2")
    cells = grid.cells(row, "runs/x", None, "smoke")
    first, second = cells[0].before
    assert str(first.path()) == "runs/shared/bert-smoke-1lamb-s0"
    assert {f"resume={first.path()}", "new_phase=true"} <= {*second.overrides}
    assert f"model.weights={second.path()}/checkpoints/step-00000050" in cells[1].overrides
    waves = slurm_jobs.waves(suite.row("table4a_bert_kfac_phase2", "smoke"))
    assert [len(wave) for wave in waves] == [2, 2, 4]
    lamb = grid.cells(schema.load("table3_bert_lamb"), "runs/y", [0], "smoke")
    assert lamb[0].before[0].overrides == first.overrides, "phase 1 would be trained twice"


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("table4")])
def test_phases_that_are_compared_are_runs_of_this_row_or_of_table_3(name, profile):
    row = schema.load(name)

    def run_ids(benchmark):
        sized = benchmark.profiles[profile]
        return {each.run_id for each in sized.before or benchmark.before}

    less = row.quantities["less time of both phases"]
    assert set(less.phases) == run_ids(row)
    assert set(less.than) == run_ids(schema.load("table3_bert_lamb"))


def test_bert_scaling_has_the_parts_of_the_paper():
    for cell in grid.cells(schema.load("fig9bc_bert_scaling"), "r", [0], "paper"):
        batch, part = {"1": (65536, 60), "2": (32768, 12)}[cell.point["phase"]]
        said = [text for text in cell.overrides if text.startswith("trainer.accumulate=")]
        assert int(said[-1].partition("=")[2]) == math.ceil(batch / cell.ranks / part)


# ---- computed cells ----


def test_plan_cells_have_the_numbers_of_kfac_plan():
    words = {"model": "resnet18", "data": "imagefolder", "ranks": "8", "examples": "2"}
    few, many = (
        computed_numbers.plan_numbers(words | {"strategy": "hybrid_opt", "fraction": f})
        for f in ("0.125", "1")
    )
    with pytest.raises(UsageError, match="strategy=sgd has no plan"):
        computed_numbers.plan_numbers(words | {"strategy": "sgd"})
    all_ranks = computed_numbers.plan_numbers(words | {"strategy": "comm_opt"})
    assert many["state_mb"] == all_ranks["state_mb"] > few["state_mb"]
    assert many["wire_mb_per_step"] < few["wire_mb_per_step"]


def test_plan_cells_on_a_named_machine_also_have_the_time_of_a_step():
    words = {"model": "resnet18", "data": "imagefolder", "ranks": "8", "examples": "2"}
    all_ranks = {"strategy": "comm_opt"}
    assert "ms_per_step" not in computed_numbers.plan_numbers(words | all_ranks)
    words["hardware"] = "longhorn_v100"
    few, many, same = (
        computed_numbers.plan_numbers(words | each)["ms_per_step"]
        for each in (
            {"strategy": "hybrid_opt", "fraction": "0.125"},
            {"strategy": "hybrid_opt", "fraction": "1"},
            all_ranks,
        )
    )
    assert 0 < few != many > 0
    assert same > 0


def test_simulated_cells_have_the_numbers_of_kfac_plan_simulate():
    own = {"model": "resnet18", "hardware": "longhorn_v100", "ranks": "32", "examples": "16"}
    kfac = {"strategy": "comm_opt", "factors": "20", "decompose": "200", "at": "64"}
    found = computed_numbers.step_numbers(own | kfac)
    options = plan_command.simulate_parser().parse_args(
        [
            "model=resnet18",
            "--hardware=longhorn_v100",
            "--world-size=32",
            "--per-rank-batch=16",
            "--strategies=comm_opt",
            "kfac.method=eigen",
            "--update-freq-at=64",
            "kfac.update_freq=200",
            "kfac.factor_update_freq=20",
            "--out=-",
        ]
    )
    said = simulate_options.simulate(options)
    (cell,) = json.loads("\n".join(said))["cells"]
    assert found["ms_per_step"] == pytest.approx(1e3 * cell["step_s"])
    assert found["stage Decompose"] == pytest.approx(1e3 * cell["kinds_s"]["Decompose"])
    assert found["examples_per_s_per_rank"] == pytest.approx(cell["examples_per_s"] / 32)


def test_phases_are_compared_with_those_of_lamb():
    common = {"hardware": "theta_a100", "ranks": "16", "factors": "5", "decompose": "50"}
    lamb = {"phase1": "sgd", "steps1": "7038", "part1": "96"}
    lamb |= {"phase2": "sgd", "steps2": "1563", "part2": "16"}
    whole = computed_numbers.phases_numbers(common | lamb)
    seconds = whole.pop("both_phases_s")
    assert set(whole.values()) == {0.0}
    found = computed_numbers.phases_numbers(common | lamb | {"steps2": "1000"})
    fewer = 100 * (1 - 1000 / 1563)
    assert found["fewer_phase2_steps"] == found["less_phase2_time"] == pytest.approx(fewer)
    assert 0 < found["less_time"] < fewer
    kfac = computed_numbers.phases_numbers(
        common | lamb | {"steps2": "1000", "phase2": "hybrid_opt@1/2"}
    )
    assert kfac["less_phase2_time"] < found["less_phase2_time"]
    # The words name the whole, and LAMB with smaller parts takes longer.
    assert found["both_phases_s"] == pytest.approx(seconds * (1 - found["less_time"] / 100))
    small = computed_numbers.phases_numbers(
        common | lamb | {"lamb_part1": "60", "lamb_part2": "12"}
    )
    assert small["both_phases_s"] == seconds
    assert small["less_time"] > 0


def test_autograd_keeps_each_activation_once():
    """The outputs of tanh are the inputs of the next layer. Parameters are not counted."""
    config = compose.load(["model=autoencoder", "model.hidden=[16,6]"])
    assert computed_numbers.saved_bytes(config, 10) == 10 * 4 * (64 + 16 + 6 + 16)


def test_the_largest_batch_uses_the_whole_budget():
    words = {"experiment": "kaisa_fixed_memory_resnet50", "profile": "smoke", "ranks": "2"}
    sgd = computed_numbers.fit_numbers(words | {"budget_gb": "0.06", "strategy": "sgd"})
    half, one = (
        computed_numbers.fit_numbers(
            words | {"budget_gb": "0.06", "strategy": "hybrid_opt", "fraction": f}
        )
        for f in ("0.5", "1")
    )
    for found in (sgd, half, one):
        room = 60 - found["kfac_mb"] - found["weights_mb"]
        assert found["batch"] == math.floor(room / found["activations_mb_per_example"])
    with pytest.raises(compose.UsageError, match="not even one example"):
        computed_numbers.fit_numbers(
            words | {"budget_gb": "0.02", "strategy": "hybrid_opt", "fraction": "1"}
        )
    row = schema.load("kaisa_fixed_memory_resnet50")
    cells = grid.cells(row, "r", [0], "smoke")
    batches = [c.config().trainer.batch_size for c in cells]
    assert batches == [2 * int(found["batch"]) for found in (sgd, half, one)], "stale in the file"


def test_a_computed_cell_is_computed_once(tmp_path, monkeypatch):
    row = schema.load("fig7_step_profile")
    first, other = computed.cells(row, str(tmp_path))
    calls = []

    def numbers(words):
        calls.append(words)
        if words["strategy"] == "comm_opt":
            raise compose.UsageError("no such machine")
        return {"ms_per_step": 2.5}

    monkeypatch.setattr(computed_numbers, "step_numbers", numbers)
    assert first.run() == (True, "computed")
    assert first.run() == (True, "computed (before)")
    assert other.run() == (False, "failed: no such machine")
    assert len(calls) == 2
    assert run_end.failure(other.path()).reason == "no such machine"
    assert first.path() != other.path()
    assert list(first.path().iterdir()) == [first.path() / "events.jsonl"]


def test_a_computed_cell_that_cannot_be_written_is_computed_again(tmp_path, monkeypatch):
    """A full disk must leave no file that looks like a finished cell."""
    (cell, _) = computed.cells(schema.load("fig7_step_profile"), str(tmp_path))
    monkeypatch.setattr(computed_numbers, "step_numbers", lambda words: {"ms_per_step": 2.5})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses longer files.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(compose.UsageError, match=r"cannot be written \(File too large\)"):
            cell.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not (cell.path() / EVENTS_FILE).exists()
    assert cell.run() == (True, "computed")
    assert load(cell.path()).started.metric == "ms_per_step"


def test_cells_with_too_many_ranks_are_not_started(tmp_path):
    cells = grid.cells(schema.load("fig7_step_profile"), str(tmp_path), [0], "paper")
    good, said = grid.run_cell(cells[0])
    assert (good, "--launcher slurm" in said) == (False, True)


def test_a_recipe_is_refused_because_it_changes_with_the_ranks():
    benchmark = schema.load("demo")
    with pytest.raises(compose.UsageError, match="recipe=digits_resnet: a recipe changes with"):
        grid.cells(benchmark, "runs", [0], more=["recipe=digits_resnet"])


def test_a_refused_job_leaves_no_other_job_in_the_queue(tmp_path, monkeypatch):
    """Cells with different ranks are submitted one after the other."""
    cancelled = tmp_path / "cancelled"
    programs = {
        "sbatch": "for w; do case $w in --ntasks=2) echo too many >&2; exit 1;; esac; done; echo 7",
        "scancel": f'echo "$@" >> {cancelled}',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    each = {"size": {"small": [], "big": ["ranks=2"]}}
    tree = schema.Benchmark("T", {"size": ["small", "big"]}, ["model=resnet8"], each=each)
    monkeypatch.setattr(schema, "load", lambda name: tree)
    row = suite.row("t", None, runs_dir=str(tmp_path / "r"))
    line = r"--launcher slurm: too many\. The jobs submitted before \(7 7\) are cancelled"
    with pytest.raises(compose.UsageError, match=line):
        slurm_jobs.submit_wave(row, [], 0, [])
    assert cancelled.read_text() == "7 7\n"


def test_kfac_bench_accepts_the_command_of_the_next_wave(tmp_path, monkeypatch):
    behind, sent = [], []

    def submit(commands, after, *_, **__):
        sent.extend(commands)
        behind.append(after)
        return ["1"]

    monkeypatch.setattr(slurm_jobs, "submit", submit)
    row = suite.row("table3_bert_lamb", "smoke", (), str(tmp_path / "r"), [0])
    words = ["--profile=smoke", "--runs-dir", str(tmp_path / "r"), "--seeds", "0"]
    slurm_jobs.submit_wave(row, words, 0, ["--partition=debug"])
    (command,) = {tuple(after) for after in behind if after != ["true"]}
    options = build_parser().parse_args(command[1 + len(slurm_jobs.KFAC_BENCH) :])
    assert (options.command, options.wave, options.sbatch) == ("run", 1, "--partition=debug")
    assert (options.profile, options.seeds, options.retry) == ("smoke", [0], False)
    before = [*sent]
    for cell in slurm_jobs.waves(row)[0]:
        run_end.record_failure(cell.path(), cell.label, "it broke")
    sent.clear()
    slurm_jobs.submit_wave(row, words, 0, [])
    assert sent == []
    behind.clear()
    slurm_jobs.submit_wave(row, words, 0, [], retry=True)
    assert sent == before
    assert build_parser().parse_args(behind[-1][1 + len(slurm_jobs.KFAC_BENCH) :]).retry
