"""``kfac-bench scaling``: its runs, the measured steps, the tables and the figure."""

import math
import os
import re
from dataclasses import replace

import pytest

from kfac_bench import cli
from kfac_bench.benchmark import local_runs
from kfac_bench.benchmark.scaling import scaling_options, scaling_report
from kfac_bench.benchmark.scaling.measured import (
    STAGES,
    efficiency,
    efficiency_finding,
    measure,
    over_first_order,
    step_finding,
)
from kfac_bench.benchmark.scaling.scaling_report import scaling_table, stage_table, tables
from kfac_bench.cli.bench_command import build_parser
from kfac_bench.config import check, compose
from kfac_bench.core.planning.estimate import payload_bytes
from kfac_bench.core.planning.plan import Stage
from kfac_bench.errors import UsageError
from kfac_bench.record.event_log import EventLog, JsonlSink
from kfac_bench.record.events import EVENTS_FILE, Resumed, RunEnded, RunStarted, Trained, read
from kfac_bench.record.runs import load
from kfac_bench.training import dry_run
from tests.reliability.faults import launch

WORDS = ("model=autoencoder", "model.hidden=[16,6]", "kfac.update_freq=4")
WORDS += ("kfac.factor_update_freq=2", "trainer.batch_size=64")


def request(words):
    """Return what a command line asks for."""
    options = build_parser().parse_args(["scaling", *words])
    return scaling_options._request(options, words)


def parse(*words):
    return request([*WORDS, *words])


def call(*words):
    with pytest.raises(SystemExit) as stop:
        cli.bench(["scaling", *map(str, words)])
    return stop.value.code


# ---- cells ----


def test_runs_are_all_strategies_on_all_ranks_in_rounds():
    asked = parse("--world-size=1,2", "--strategy=comm_opt,hybrid_opt@1/2", "--rounds=2")
    assert [c.label for c in asked.cells[:6]] == [
        "sgd 1 rank round 1",
        "comm_opt 1 rank round 1",
        "hybrid_opt@1/2 1 rank round 1",
        "sgd 2 ranks round 1",
        "comm_opt 2 ranks round 1",
        "hybrid_opt@1/2 2 ranks round 1",
    ]
    assert len(asked.cells) == 12
    assert len({c.path() for c in asked.cells}) == 12
    configs = [compose.load(c.overrides) for c in asked.cells]
    assert [c.kfac.enabled for c in configs[:3]] == [False, True, True]
    assert [c.kfac.strategy for c in configs[1:3]] == ["comm_opt", "hybrid_opt"]
    assert [c.kfac.grad_worker_fraction for c in configs[1:3]] == [None, 0.5]
    assert [c.trainer.batch_size for c in configs[:6:3]] == [64, 128]
    assert [c.seed for c in configs[::6]] == [0, 1]
    for cell, config in zip(asked.cells, configs, strict=True):
        check(config)
        assert (config.trainer.max_steps, config.trainer.log_freq) == (16, 4)
        assert (config.trainer.pin, config.trainer.threads) == (True, 1)
        assert str(cell.path().parent) == config.runs_dir == "runs/scaling"


def test_strong_scaling_keeps_the_batch_size():
    asked = parse(
        "--mode=strong", "--world-size=1,2,4", "--strategy=mem_opt", "--rounds=1", "--steps=10"
    )
    configs = [compose.load(c.overrides) for c in asked.cells]
    assert {c.trainer.batch_size for c in configs} == {64}
    assert {c.trainer.max_steps for c in configs} == {40}


def test_an_experiment_cannot_choose_the_strategy_or_stop_the_run():
    words = ["experiment=digits/autoencoder_kfac", "--world-size=2", "--strategy=layer_wise"]
    for cell in request(words).cells:
        config = compose.load(cell.overrides)
        assert config.kfac.enabled == (not cell.label.startswith("sgd"))
        assert config.kfac.strategy == "layer_wise" or not config.kfac.enabled
        assert (config.trainer.target, config.trainer.max_epochs) == (None, None)


def test_commands_start_the_right_number_of_ranks():
    one, *_, two = parse("--world-size=1,2", "--rounds=1", "--strategy=comm_opt").cells
    assert one.command()[1:3] == ["-m", "kfac_bench"]
    assert two.command()[1:4] == ["-m", "kfac_bench.benchmark.local_runs", "2"]
    # kfac-train must choose no recipe: the runs would not be those that were composed.
    assert two.command()[4:] == ["recipe=none", *two.overrides, f"run_id={two.path().name}"]
    assert two.rank_command()[1:] == ["-m", "kfac_bench", *two.command()[4:]]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--mode=both", "argument --mode: invalid choice: 'both'"),
        ("--launcher=mpi", "argument --launcher: invalid choice: 'mpi'"),
        ("--world-size=0", "expected a whole number of at least 1 and at most 4096"),
        ("--world-size=1,x", "expected a whole number of at least 1"),
        ("--strategy=best", "choose one of sgd, comm_opt"),
        ("--strategy=comm_opt@1/2", "takes no fraction"),
        ("kfac=mem_opt", "set --strategy instead"),
        ("++kfac=mem_opt", "set --strategy instead"),
        ("recipe=digits_resnet", "a recipe changes with the number of ranks"),
        ("world_size=2", "world_size=2: write --world-size 2"),
        ("runs_dir=x", "runs_dir=x: write --runs-dir x"),
        ("seed=1", "each run has its own seed"),
        ("trainer.max_steps=3", "kfac-bench scaling sets trainer.max_steps itself"),
        ("--sbatch=--gpus=4", "--launcher is local: add --launcher slurm"),
        ("from=runs/a/config.yaml", "from=runs/a/config.yaml: kfac-bench scaling reads no file"),
        ("trainer.batch_sise=1", "did you mean trainer.batch_size"),
        ("--rounds=", "--rounds : expected"),
        ("--hardware=none", "--hardware none: choose one of h100_ndr"),
    ],
)
def test_wrong_words_give_a_one_line_error(word, says, capsys):
    assert call(*WORDS, word) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


def test_ranks_without_an_example_are_refused():
    with pytest.raises(UsageError, match="leaves some of 128 ranks without an example"):
        parse("--mode=strong", "--world-size=128")


# ---- what event files say ----


def write(path, *, ranks=1, kfac="", step_s=0.1, batch=32, stages=None, threads=1, cpus=8, n=3):
    """Write a run with windows of 10 steps. The first window takes ten times as long."""
    path.mkdir(parents=True)
    config = {
        "model": {"name": "m"},
        "data": {"name": "d"},
        "optimizer": {"name": "sgd"},
        "kfac": {
            "enabled": bool(kfac),
            "strategy": kfac or "comm_opt",
            "grad_worker_fraction": None,
            "update_freq": 10,
            "factor_update_freq": 5,
        },
        "trainer": {"batch_size": batch},
        "seed": 0,
    }
    about = {"world_size": ranks, "device": "cpu"}
    about["hardware"] = {"threads": threads, "cpu_count": cpus}
    sent = {"factors": {"ReduceFactors": 500}, "decompose": {"ShareDecompositions": 1000}}
    sent["precondition"] = {"ShareGradients": 30, "ReduceProducts": 3}
    log = EventLog([JsonlSink(path / EVENTS_FILE)])
    log.emit(RunStarted(0, 0.0, path.name, "accuracy", True, config, about, sent if kfac else {}))
    seconds = 0.0
    for i in range(n):
        slow = 10 if i == 0 else 1
        seconds += 10 * step_s * slow
        means = {kind: s * slow for kind, s in (stages or {}).items()}
        more = {"stage_mean_s": means}
        log.emit(Trained(10 * i + 10, seconds, 1.0, 1.0, 0.1, batch / step_s, **more))
    log.emit(RunEnded(10 * n, seconds, "finished"))
    log.close()
    return load(path)


def test_efficiency_compares_throughput_per_rank_with_the_fewest_ranks(tmp_path):
    weak = [
        write(tmp_path / "1", ranks=1, step_s=0.1, batch=32),
        write(tmp_path / "2", ranks=2, step_s=0.125, batch=64),
        write(tmp_path / "4", ranks=4, step_s=0.2, batch=128),
    ]
    points = measure(reversed(weak))
    assert [p.world_size for p in points] == [1, 2, 4]
    assert [efficiency(points, p) for p in points] == pytest.approx([1.0, 0.8, 0.5])
    assert [p.examples_per_s for p in points] == pytest.approx([320, 512, 640])
    strong = [
        write(tmp_path / "s2", ranks=2, step_s=0.1, batch=64),
        write(tmp_path / "s4", ranks=4, step_s=0.08, batch=64),
    ]
    points = measure(strong)
    assert [efficiency(points, p) for p in points] == pytest.approx([1.0, 2 * 0.1 / (4 * 0.08)])


def test_the_first_window_is_left_out_and_rounds_give_medians(tmp_path):
    runs = [write(tmp_path / str(i), step_s=s) for i, s in enumerate((0.1, 0.4, 0.2))]
    [point] = measure(runs)
    assert point.step_s == pytest.approx(0.2)
    assert (point.low_s, point.high_s) == pytest.approx((0.1, 0.4))
    assert (point.rounds, point.steps) == (3, 60)


def test_a_run_that_was_continued_warms_up_again(tmp_path):
    run = write(tmp_path / "a")
    started, first, second, third, ended = run.events
    later = [replace(each, train_s=each.train_s + 50) for each in (second, third, ended)]
    [point] = measure([replace(run, events=(started, first, Resumed(10, 10.0, "x"), *later))])
    assert (point.step_s, point.steps) == (pytest.approx(0.1), 10)


def test_a_run_without_two_windows_is_left_out(tmp_path, capsys):
    assert measure([write(tmp_path / "a", n=1)]) == []
    words = (
        "--world-size=1",
        "--strategy=comm_opt",
        "--rounds=1",
        f"--runs-dir={tmp_path / 'runs'}",
    )
    for each in parse(*words).cells:
        write(each.path(), n=1)
    assert call(*WORDS, *words, "--launcher=none") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no run is long enough to measure a step" in line


KINDS = {
    "ComputeFactor": 0.004,
    "ReduceFactors": 0.002,
    "Decompose": 0.003,
    "ShareDecompositions": 0.00068,
    "Precondition": 0.007,
    "WriteBack": 0.001,
}


def test_stages_are_milliseconds_per_run_of_the_stage(tmp_path):
    runs = [
        write(tmp_path / "o", ranks=2, kfac="comm_opt", stages=KINDS, step_s=0.05),
        write(tmp_path / "l", ranks=2, kfac="layer_wise", stages={"ShareGradients": 0.002}),
        write(tmp_path / "s", ranks=2, step_s=0.025),
    ]
    table = stage_table(measure(runs))
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert set(rows) == {"comm_opt", "layer_wise"}
    found = [rows["comm_opt"][stage] for stage in STAGES]
    assert found == pytest.approx([20, 10, 30, 6.8, 7, 0, 1])
    assert rows["comm_opt"]["mean of a step"] == pytest.approx(17.68)
    assert rows["comm_opt"]["steps between"] == "1 / 5 / 10"
    assert rows["layer_wise"]["gradient share"] == pytest.approx(2)
    [ratio] = [note for note in table.notes if "sharing decompositions" in note]
    assert "takes 3.4 times" in ratio
    assert not any("whole intervals" in note for note in table.notes)

    table = scaling_table(measure(runs))
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["comm_opt"]["x without K-FAC"] == pytest.approx(2)
    assert rows["sgd"]["x without K-FAC"] is None
    assert rows["comm_opt"]["payload, MB"] == pytest.approx((100 + 100 + 33) / 1e6)
    assert rows["sgd"]["payload, MB"] is None


def test_tables_without_content_are_left_out(tmp_path):
    sgd = [write(tmp_path / str(n), ranks=n, batch=32 * n) for n in (1, 2)]
    assert tables(sgd[:1]) == []
    assert [t.title for t in tables(sgd)] == ["Scaling, measured: m on d"]
    kfac = write(tmp_path / "k", kfac="comm_opt", stages=KINDS)
    assert [t.title for t in tables([kfac])] == ["Stages of a K-FAC step, measured: m on d"]
    assert len(tables([*sgd, kfac])) == 2


def test_notes_state_the_limits_of_the_numbers(tmp_path):
    short = [write(tmp_path / "a", ranks=2, kfac="comm_opt", stages=KINDS, cpus=2, threads=2)]
    assert any("2 ranks share cores" in note for note in scaling_table(measure(short)).notes)
    enough = [write(tmp_path / "b", ranks=2, kfac="comm_opt", stages=KINDS, cpus=4, threads=2)]
    assert not any("share cores" in note for note in scaling_table(measure(enough)).notes)
    odd = replace(measure(enough)[0], steps=25)
    assert any("whole intervals: comm_opt on 2" in note for note in stage_table([odd]).notes)


def test_malformed_event_files_raise_no_error(tmp_path):
    run = write(tmp_path / "a", kfac="comm_opt", stages=KINDS)
    for config in ({}, {"kfac": 3, "model": []}, {"kfac": {"enabled": 1, "strategy": ["x"]}}):
        for about in ({}, {"world_size": "two"}, {"world_size": 2, "hardware": 1}):
            odd = replace(run.started, config=config, environment=about)
            tables([replace(run, started=odd, events=(odd, *run.events[1:]))])


# ---- the figure ----


def test_the_figure_has_every_bar_and_line_and_equal_bytes(tmp_path):
    runs = []
    for name in ("", "comm_opt"):
        for ranks in (1, 2):
            runs.append(
                write(
                    tmp_path / f"{name}{ranks}",
                    ranks=ranks,
                    kfac=name,
                    step_s=0.15 if name and ranks == 2 else 0.1,
                    stages=KINDS if name else {},
                )
            )
    points = measure(runs)
    drawn = scaling_report.svg(points, "weak: m", {"comm_opt": {1: 1.0, 2: 0.9}}, "simulated, x")
    assert drawn == scaling_report.svg(
        points, "weak: m", {"comm_opt": {1: 1.0, 2: 0.9}}, "simulated, x"
    )
    for text in ("weak: m", "all but K-FAC", "their share", "comm_opt", "simulated, x"):
        assert text in drawn
    assert "gradient share" not in drawn  # no rank has any
    ratio = over_first_order(points, points[-1])
    assert step_finding(points).startswith(f"On 2 ranks a step with K-FAC takes {ratio:.2f}x the")
    best, worst = sorted(points[1::2], key=lambda p: -efficiency(points, p))
    assert efficiency_finding(points).startswith(f"On 2 ranks {best.strategy} has an efficiency of")
    assert efficiency_finding(points).split(", ")[-1].startswith(f"{worst.strategy} of ")
    assert efficiency_finding(points[::2]) == step_finding(points[:1]) == ""
    assert math.isclose(points[0].rest_s, points[0].step_s)


# ---- for real ----

TORCHRUN = {"LOCAL_WORLD_SIZE": "2"}
"""A variable of torchrun that lets ranks share the processors."""


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_are_measured_once(tmp_path, capsys, monkeypatch):
    """The first command runs twice on two ranks. The second command runs nothing."""

    def run(command):
        """Start the run in forks. tests/distributed/test_loopback.py starts such a command."""
        assert command == local_runs.local_command(command[5:], 2)
        ended = launch.by_hand(tmp_path, 2, command[4:], environment=TORCHRUN, is_slow=False)
        return max(ended.codes), ended.errors

    monkeypatch.setattr(local_runs, "run_command", run)
    words = (
        *WORDS,
        "--world-size=2",
        "--strategy=layer_wise",
        "--rounds=1",
        f"--runs-dir={tmp_path}",
    )
    assert call(*words, "--launcher=none") == 2
    assert "no run has finished" in capsys.readouterr().err
    assert call(*words, "--hardware=two_cores") == 0
    said = capsys.readouterr().out
    assert "[2/2] layer_wise 2 ranks round 1: finished at step 16, " in said
    runs = {p.parent.name.partition("-")[0]: p for p in tmp_path.glob("*/events.jsonl")}
    started, *_ = read(runs["layer_wise"])
    assert started.environment["world_size"] == 2
    assert started.environment["pinned"] == (len(os.sched_getaffinity(0)) >= 2)
    [cell] = [c for c in request(words).cells if c.label.startswith("layer_wise")]
    assert started.payload_bytes == expected_payload(cell.overrides)
    assert [e.step for e in read(runs["layer_wise"]) if isinstance(e, Trained)] == [4, 8, 12, 16]
    table = stage_table(measure([load(runs["layer_wise"])]))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["their share"] == 0
    assert min(row[s] for s in STAGES if s != "their share") > 0
    written = (tmp_path / "scaling.md").read_text()
    assert "| layer_wise | 2 | 128 |" in written
    assert "layer_wise" in (tmp_path / "scaling.html").read_text()
    assert "<svg" in (tmp_path / "scaling.svg").read_text()[:200]

    before = {path: path.read_bytes() for path in runs.values()}
    assert call(*words) == 0
    said = capsys.readouterr().out
    assert re.search(r"layer_wise 2 ranks round 1: finished at step 16, .* \(before\)", said)
    assert {path: path.read_bytes() for path in runs.values()} == before


def test_the_simulation_has_the_lines_of_the_measured_strategies():
    """Also with the experiment of an optimizer alone, and with a fraction of gradient workers."""
    words = "experiment=digits/autoencoder_sgd --strategy=hybrid_opt@1/2 --world-size=2,4"
    asked = request([*words.split(), "--hardware=two_cores"])
    simulated = scaling_options._simulated(asked, asked.machine)
    assert set(simulated) == {"sgd", "hybrid_opt@0.5"}
    assert simulated["sgd"] != simulated["hybrid_opt@0.5"]


def expected_payload(overrides):
    """Return the payload of the plan that a dry run makes with the same options."""
    plan = dry_run.trace(compose.load(overrides), 2).report.plan
    return {stage.value: payload_bytes(plan, stage) for stage in Stage}


def test_without_slurm_there_is_a_one_line_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert call(*WORDS, "--launcher=slurm", f"--runs-dir={tmp_path}") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--launcher slurm: there is no sbatch on this machine" in line
    words = ("--world-size=1", "--strategy=comm_opt", "--rounds=1", f"--runs-dir={tmp_path}")
    for each in parse(*words).cells:
        write(each.path())
    assert call(*WORDS, *words, "--launcher=slurm") == 0
    assert "all runs have finished, so no job is submitted" in capsys.readouterr().out
