"""Benchmarks are data: cells, what is run and what is not, and the equal budget of the tuning."""

import functools
import math
import subprocess

import pytest
import yaml

from kfac_bench import bench, cli, compose, tune
from kfac_bench.bench import Benchmark, Cell, Tuning
from kfac_bench.errors import UsageError
from kfac_bench.events import (
    Evaluated,
    EventLog,
    JsonlSink,
    RunEnded,
    RunStarted,
    TargetReached,
)
from kfac_bench.row import Profile
from kfac_bench.tune import Trial

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
    named = [f"run_id={cell.path().name}" for cell in cells]
    assert started == [(*cells[i].overrides, named[i]) for i in (3, 4)]
    assert said[0] == "[1/5] digits_resnet sgd seed 0: finished at step 10, 1.50 s (before)"
    assert "reached at step 7" in said[1]
    assert "failed at step 3" in said[2]
    assert "the loss is nan" in said[2]
    assert "failed: kfac-train: it broke (exit code 1); about " in said[3]
    assert said[4].endswith("failed: kfac-train: it broke (exit code 1)")
    assert len(said) == 5


def test_a_failed_cell_is_a_recorded_miss(tmp_path, started):
    cells = bench.cells(small(), str(tmp_path))[:2]
    said = []
    for _ in range(2):
        assert bench.run_cells(cells, said.append) == 2
    assert len(started) == 2, "tried again unasked"
    assert said[2].endswith("seed 0: failed: kfac-train: it broke (exit code 1) (before)")
    assert bench.failure(cells[0].path()) == "kfac-train: it broke (exit code 1)"
    assert bench.run_cells(cells, said.append, retry=True) == 2
    assert len(started) == 4
    write_run(cells[0], "reached", 4)  # by hand, in the meantime
    assert bench.failure(cells[0].path()) is None
    assert bench.run_cells(cells, said.append) == 1
    assert len(started) == 4


def test_a_run_that_was_stopped_goes_on_next_time(tmp_path, started, monkeypatch):
    [cell] = bench.cells(small(), str(tmp_path))[:1]
    stopped = subprocess.CompletedProcess([], 143, "", "bye\n")
    run = bench.subprocess.run
    monkeypatch.setattr(bench.subprocess, "run", lambda *a, **k: stopped)
    assert bench.run_cell(cell) == (False, "interrupted: bye (exit code 143)")
    assert bench.failure(cell.path()) is None
    monkeypatch.setattr(bench.subprocess, "run", run)
    bench.run_cell(cell)
    assert len(started) == 1


def test_a_cell_fails_with_the_run_that_it_starts_from(tmp_path, started):
    first = Cell("first", ("model=resnet8", f"runs_dir={tmp_path}", "run_id=first"))
    cell = Cell("cell", ("model=resnet8", f"runs_dir={tmp_path}", "seed=3"), before=(first,))
    good, said = bench.run_cell(cell)
    assert not good
    assert said == (
        "failed: first, which it starts from, failed: kfac-train: it broke (exit code 1)"
    )
    assert [call[-1] for call in started] == ["run_id=first"]
    assert bench.failure(cell.path()) == said.removeprefix("failed: ")
    write_run(first)
    bench.run_cell(cell, retry=True)
    assert [call[-1] for call in started] == ["run_id=first", f"run_id={cell.path().name}"]


def test_what_a_value_stands_for(tmp_path):
    each = {"size": {"big": ["trainer.batch_size=512", "ranks=2"]}}
    sized = {"smoke": Profile(each={"size": {"small": ["trainer.batch_size=4"]}}, seeds=[7])}
    axes = {"size": ["small", "big"]}
    tree = Benchmark("T", axes, ["model=resnet8"], [0, 1], each=each, profiles=sized)
    few, many = bench.cells(tree, str(tmp_path), None, "smoke", ["trainer.max_steps=3"])
    assert (few.ranks, few.config().trainer.batch_size, few.seed) == (1, 4, 7)
    assert (many.ranks, many.config().trainer.batch_size) == (2, 512)
    assert many.path().name.endswith("-2ranks")
    assert many.config().trainer.max_steps == 3
    assert many.command()[1:6] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ]
    with pytest.raises(UsageError, match="profile=paper: choose one of smoke"):
        bench.cells(tree, "r", None, "paper")
    with pytest.raises(UsageError, match="has no profiles"):
        bench.cells(small(), "r", None, "smoke")


def test_a_name_does_not_depend_on_the_job(tmp_path, monkeypatch):
    """A job of the cluster and the terminal that submitted it must find one directory."""
    cells = bench.cells(small(), str(tmp_path))
    here = cells[0].path()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    bench._path.cache_clear()
    assert cells[0].path() == here


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


# ---- tuning ----


def test_every_optimizer_has_the_same_budget():
    settings = {o: tune.trial_settings(DEMO.tuning, o) for o in DEMO.axes["optimizer"]}
    assert {len(s) for s in settings.values()} == {DEMO.tuning.trials}
    assert DEMO.tuning.trials >= 10
    assert not set(DEMO.tuning.seeds) & set(DEMO.seeds), "tuned on the seeds of the table"
    assert DEMO.tuning.space.keys() == set(DEMO.axes["optimizer"])


@pytest.mark.parametrize("optimizer", DEMO.axes["optimizer"])
def test_trials_are_within_their_ranges_and_cover_them(optimizer):
    space, trials = DEMO.tuning.space[optimizer], tune.trial_settings(DEMO.tuning, optimizer)
    assert trials == tune.trial_settings(DEMO.tuning, optimizer), "not a function of the space"
    for key, option in space.items():
        values = [t[key] for t in trials]
        match option:
            case {"log": [low, high]}:
                assert all(low <= v <= high for v in values)
                assert len(set(values)) == len(values)
                middle = math.sqrt(low * high)
                below = sum(v < middle for v in values)
                assert 0.3 < below / len(values) < 0.7, "not spread evenly over the logarithm"
            case {"choice": choices}:
                assert set(values) == set(choices)
            case fixed:
                assert set(values) == {fixed}
    assert all(t.keys() == space.keys() for t in trials)


def test_trials_of_any_space():
    space = {"x": {"optimizer": "sgd"}, "y": {"optimizer.lr": {"linear": [0, 1]}}}
    tuning = Tuning(["experiment=digits_resnet"], 3, [1], space, "{task}_{optimizer}")
    assert tune.trial_settings(tuning, "x") == [{"optimizer": "sgd"}] * 3
    with pytest.raises(UsageError, match="neither log"):
        tune.trial_settings(tuning, "y")


def composed(tmp_path, name, text):
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)
    return compose.load([f"experiment={name}"], tmp_path / "conf")


@pytest.mark.parametrize("task", DEMO.axes["task"])
@pytest.mark.parametrize("optimizer", DEMO.axes["optimizer"])
def test_the_best_trial_becomes_an_experiment(tmp_path, task, optimizer):
    point = {"task": task, "optimizer": optimizer}
    all_settings = tune.trial_settings(DEMO.tuning, optimizer)
    trials = [Trial(s, (math.inf, 0.5)) for s in all_settings]
    trials[4] = Trial(all_settings[4], (1.25, 0.0))
    text = tune.experiment_yaml(DEMO.tuning, point, trials, trials[4])
    found = composed(tmp_path, "tuned", text)
    parent = compose.load([f"experiment={task}"])
    assert (found.trainer, found.model, found.data) == (parent.trainer, parent.model, parent.data)
    assert found.kfac.enabled == (optimizer == "kfac")
    assert found.optimizer.name == ("adam" if optimizer == "adam" else "sgd")
    for key, value in all_settings[4].items():
        section, _, option = key.partition(".")
        if option:
            assert getattr(getattr(found, section), option) == value, key
    assert f"best of {DEMO.tuning.trials} trials on seeds 100, 101, of which 1 reached" in text
    assert "1.25 s" in text
    assert yaml.safe_load(text)["defaults"][-1] == "_self_"
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Tune a small space; ``outcomes[(lr, seed)]`` is (status, best figure, seconds to target)."""
    space = {
        "sgd": {"optimizer": "sgd", "kfac": "none", "optimizer.lr": {"choice": [0.1, 0.2, 0.3]}},
        "adamw": {"optimizer": "adamw", "kfac": "none", "optimizer.lr": {"choice": [0.1, 0.2]}},
    }
    overrides = ["experiment={task}", "logger=none"]
    tuning = Tuning(overrides, 6, [1, 2], space, "{task}_{optimizer}")
    benchmark = small(tuning=tuning)
    out, cells, said = tmp_path / "out", [], []
    out.mkdir()

    def run(outcomes, only="digits_resnet_sgd"):
        def run_cell(cell):
            cells.append(cell)
            config = cell.config()
            if not (cell.path() / "events.jsonl").exists():
                figure, seconds = outcomes[config.optimizer.lr, config.seed]
                if figure is not None:
                    write_run(cell, value=figure, hit_s=seconds)
            return True, "said"

        monkeypatch.setattr(bench, "run_cell", run_cell)
        monkeypatch.setattr(compose, "load", functools.lru_cache(None)(compose.load))
        tune.tune(benchmark, str(tmp_path / "runs"), out, said.append, only)
        return yaml.safe_load((out / f"{only}.yaml").read_text())["optimizer"]["lr"]

    run.out, run.cells, run.said, run.benchmark = out, cells, said, benchmark
    return run


def test_the_smallest_mean_time_to_target_wins(tuned):
    outcomes = {(0.1, 1): (0.98, 1.0), (0.1, 2): (0.98, 9.0)}
    outcomes |= {(0.2, 1): (0.98, 4.0), (0.2, 2): (0.98, 5.0)}
    outcomes |= {(0.3, 1): (0.99, 6.0), (0.3, 2): (0.99, 6.0)}
    assert tuned(outcomes) == 0.2
    assert {c.config().seed for c in tuned.cells} == {1, 2}
    assert [p.name for p in tuned.out.iterdir()] == ["digits_resnet_sgd.yaml"]
    assert "4.50 s to target" in tuned.said[-1]
    assert len(tuned.said) == 6 + 1


def test_a_trial_that_misses_on_one_seed_is_behind_all_that_do_not(tuned):
    outcomes = {(0.1, 1): (0.98, 0.1), (0.1, 2): (0.969, None)}
    outcomes |= {(0.2, 1): (0.97, 50.0), (0.2, 2): (0.97, 60.0)}
    outcomes |= {(0.3, 1): (0.96, None), (0.3, 2): (0.98, 0.1)}
    assert tuned(outcomes) == 0.2


@pytest.mark.parametrize("others", [0.5, math.nan, None])  # far off, diverged, never started
@pytest.mark.parametrize("best", [0.1, 0.2, 0.3])
def test_where_all_miss_the_nearest_wins(tuned, best, others):
    outcomes = {(lr, 1): (others, None) for lr in (0.1, 0.2, 0.3)} | {(best, 1): (0.9, None)}
    assert tuned(outcomes) == best
    assert {c.config().seed for c in tuned.cells} == {1}, "a missed trial needs no second seed"
    assert "inf s" in tuned.said[-1] or "none" in tuned.said[-1].lower()


def test_tuning_refuses_what_it_cannot_do(tuned, tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        tune.tune(tuned.benchmark, "runs", tmp_path / "none", print)
    with pytest.raises(UsageError, match="--only x: choose one of digits_resnet_sgd"):
        tune.tune(tuned.benchmark, "runs", tmp_path, print, "x")
    with pytest.raises(UsageError, match="no tuning section"):
        tune.tune(small(), "runs", tmp_path, print)


def test_a_cell_with_bad_overrides_is_refused():
    with pytest.raises(UsageError, match="did you mean damping"):
        Cell("x", ("kfac.dampign=1",)).path()
