"""Benchmarks are data: cells, what is run and what is not."""

import subprocess

import pytest

from kfac_bench import bench, cli, compose
from kfac_bench.bench import Benchmark, Cell
from kfac_bench.errors import UsageError
from kfac_bench.events import (
    Evaluated,
    EventLog,
    JsonlSink,
    RunEnded,
    RunStarted,
    TargetReached,
)

DEMO = bench.load("demo")


def small(**changes):
    """Two tasks times two optimizers, without a tuning section."""
    options = {
        "title": "Small",
        "axes": {"task": ["digits_resnet", "digits_autoencoder"], "optimizer": ["sgd", "adamw"]},
        "overrides": ["experiment={task}", "optimizer={optimizer}", "logger=none"],
        "seeds": [0, 5],
    }
    return Benchmark(**(options | changes))


def write_run(cell, status="finished", step=10, value=0.9, hit_s=None, message=""):
    """The event file that a run of the cell would have left."""
    config, path = cell.config(), cell.path()
    path.mkdir(parents=True, exist_ok=True)
    log = EventLog([JsonlSink(path / "events.jsonl")])
    higher = config.task.name == "classification"
    log.emit(
        RunStarted(
            *(0, 0.0, path.name, "figure", higher),
            {"seed": config.seed, "trainer": {"target": config.trainer.target}},
            {},
        )
    )
    log.emit(Evaluated(step, 1.0, 1.0, {"figure": value}))
    if hit_s is not None:
        log.emit(TargetReached(step, hit_s, "figure", value, config.trainer.target))
    log.emit(RunEnded(step, 1.5, status, message))
    log.close()


# ---- the grid ----


def test_points_are_every_combination_in_order():
    assert list(bench.points(small())) == [
        {"task": "digits_resnet", "optimizer": "sgd"},
        {"task": "digits_resnet", "optimizer": "adamw"},
        {"task": "digits_autoencoder", "optimizer": "sgd"},
        {"task": "digits_autoencoder", "optimizer": "adamw"},
    ]


def test_cells_are_points_times_seeds():
    """A slow hour of the machine must not slow one optimizer alone: the seeds are outside."""
    cells = bench.cells(small(), "some/where")
    assert [c.label for c in cells[:5]] == [
        "digits_resnet sgd seed 0",
        "digits_resnet adamw seed 0",
        "digits_autoencoder sgd seed 0",
        "digits_autoencoder adamw seed 0",
        "digits_resnet sgd seed 5",
    ]
    assert len(cells) == 8
    assert cells[5].overrides == (
        *("experiment=digits_resnet", "optimizer=adamw", "logger=none"),
        *("seed=5", "runs_dir=some/where"),
    )
    found = cells[5].config()
    assert (found.optimizer.name, found.seed, found.model.name) == ("adamw", 5, "resnet8")
    assert len({c.path() for c in cells}) == 8
    assert all(str(c.path()).startswith("some/where/") for c in cells)


def test_seeds_can_be_given():
    assert bench.cells(small(), "r", [7])[0].label == "digits_resnet sgd seed 7"
    assert len(bench.cells(DEMO, "r")) == 2 * 3 * 3
    assert len(bench.cells(DEMO, "r", [0])) == 6


@pytest.mark.parametrize("name", ["no_such", "", "../train", "demo.yaml"])
def test_an_unknown_benchmark_lists_what_there_is(name):
    with pytest.raises(UsageError, match=r"no such benchmark; choose one of .*demo") as caught:
        bench.load(name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("title: x\naxis: {}\n", "axis"),
        ("title: x\naxes: {a: [b]}\noverrides: [x]\nseeds: [many]\n", "many"),
        ("title: [\n", "broken.yaml"),
        ("title: x\n", "broken.yaml"),
    ],
)
def test_a_broken_benchmark_is_one_line(tmp_path, monkeypatch, text, fragment):
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "broken.yaml").write_text(text)
    monkeypatch.setattr(compose, "CONF_DIR", tmp_path)
    with pytest.raises(UsageError) as caught:
        bench.load("broken")
    assert "broken.yaml" in str(caught.value)
    assert fragment in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# ---- running cells ----


@pytest.fixture
def started(monkeypatch):
    """Overrides of the cells whose processes were started; none really is."""
    calls = []

    def run(command, **_):
        calls.append(tuple(command[3:]))
        return subprocess.CompletedProcess(command, 1, "", "some warning\nkfac-train: it broke\n")

    monkeypatch.setattr(bench.subprocess, "run", run)
    return calls


def test_a_finished_cell_is_not_run_again(tmp_path, started):
    cells = bench.cells(small(), str(tmp_path))[:5]
    write_run(cells[0])
    write_run(cells[1], "reached", 7)
    write_run(cells[2], "failed", 3, message="the loss is nan")
    write_run(cells[3], "interrupted")
    (cells[4].path()).mkdir()  # killed before its first event
    said = []
    assert bench.run_cells(cells, said.append) == 2
    assert started == [cells[3].overrides, cells[4].overrides]
    assert said[0] == "[1/5] digits_resnet sgd seed 0: finished at step 10, 1.50 s (before)"
    assert "reached at step 7" in said[1]
    assert "failed at step 3" in said[2]
    assert "the loss is nan" in said[2]
    assert said[3].endswith("failed: kfac-train: it broke (exit code 1)")
    assert len(said) == 5


def test_a_cell_that_runs_is_told_by_its_events(tmp_path, monkeypatch):
    [cell] = bench.cells(small(), str(tmp_path), [0])[:1]

    def run(command, **_):
        write_run(cell, "reached", 4)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bench.subprocess, "run", run)
    said = []
    assert bench.run_cells([cell], said.append) == 0
    assert said == ["[1/1] digits_resnet sgd seed 0: reached at step 4, 1.50 s"]


def test_a_real_cell_that_fails_is_reported_and_counted(tmp_path, capsys, monkeypatch):
    """kfac-bench run; the one test here that starts a process, which finds no data."""
    axes = {"data": ["digits", "cifar10"]}
    tree = Benchmark("T", axes, ["data={data}", "model=resnet8", "logger=none"], [3])
    monkeypatch.setattr(bench, "load", lambda name: tree)
    runs = tmp_path / "runs"
    write_run(bench.cells(tree, str(runs))[0], step=1)
    with pytest.raises(SystemExit) as caught:
        cli.bench(["run", "demo", "--runs-dir", str(runs)])
    said = capsys.readouterr().out
    assert caught.value.code == 1
    assert "[1/2] digits seed 3: finished at step 1" in said
    assert "[2/2] cifar10 seed 3: failed: kfac-train: data=cifar10" in said
    assert "set data.root" in said
    assert "(exit code 2)" in said
    assert (runs / "report.html").exists()
    assert "optimizer" in said, "no table"


def test_a_cell_with_bad_overrides_is_refused():
    with pytest.raises(UsageError, match="did you mean damping"):
        Cell("x", ("kfac.dampign=1",)).path()
