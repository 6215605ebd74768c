"""Benchmarks as data: which cells they have, and which cells are run."""

import sys
from pathlib import Path

import pytest
import yaml

from kfac_bench import cli
from kfac_bench.benchmark import grid, local_runs, run_end, schema, suite
from kfac_bench.benchmark.grid import Cell
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile
from kfac_bench.config import compose, conf_files
from kfac_bench.config.command_options import path_word
from kfac_bench.errors import UsageError
from kfac_bench.record import own_files
from kfac_bench.record.event_log import EventLog, JsonlSink
from kfac_bench.record.events import Evaluated, RunEnded, RunStarted, TargetReached
from tests.support.configs import quick_load

DEMO = schema.load("demo")


def code_of(*words):
    """Return the exit code of kfac-bench."""
    with pytest.raises(SystemExit) as caught:
        cli.bench([*words])
    return caught.value.code


def small(**changes):
    """Return a benchmark of two tasks times two optimizers, without a tuning section."""
    options = {
        "title": "Small",
        "axes": {"task": ["resnet", "autoencoder"], "optimizer": ["sgd", "adamw"]},
        "overrides": ["experiment=digits/{task}", "optimizer={optimizer}", "logger=none"],
        "seeds": [0, 5],
    }
    return Benchmark(**(options | changes))


def write_run(cell, status="finished", step=10, value=0.9, hit_s=None, message=""):
    """Write the event file that a run of the cell would leave."""
    config, path = cell.config(), cell.path()
    path.mkdir(parents=True, exist_ok=True)
    log = EventLog([JsonlSink(path / "events.jsonl")])
    higher = config.task.name == "classification"
    log.emit(
        RunStarted(
            0,
            0.0,
            path.name,
            "figure",
            higher,
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


def test_points_are_all_combinations_in_order():
    assert list(schema.points(small())) == [
        {"task": "resnet", "optimizer": "sgd"},
        {"task": "resnet", "optimizer": "adamw"},
        {"task": "autoencoder", "optimizer": "sgd"},
        {"task": "autoencoder", "optimizer": "adamw"},
    ]


def test_cells_are_points_times_seeds():
    """Seeds are the outer loop, so that a slow hour does not slow one optimizer alone."""
    cells = grid.cells(small(), "some/where")
    assert [c.label for c in cells[:5]] == [
        "resnet sgd seed 0",
        "resnet adamw seed 0",
        "autoencoder sgd seed 0",
        "autoencoder adamw seed 0",
        "resnet sgd seed 5",
    ]
    assert len(cells) == 8
    assert cells[5].overrides == (
        "experiment=digits/resnet",
        "optimizer=adamw",
        "logger=none",
        "seed=5",
        "runs_dir=some/where",
    )
    found = cells[5].config()
    assert (found.optimizer.name, found.seed, found.model.name) == ("adamw", 5, "resnet8")
    assert len({c.path() for c in cells}) == 8
    assert all(str(c.path()).startswith("some/where/") for c in cells)


def test_runs_go_into_a_folder_of_any_name():
    folder = "caf\u00e9 (1)/it's, \\'"
    assert path_word("runs_dir", "1e3") == "runs_dir='1e3'", "no number"
    cell = grid.cells(small(), folder, [0])[0]
    assert quick_load(cell.overrides).runs_dir == folder
    first = ["experiment=digits/resnet", "model.weights={shared}/first"]
    (cell,) = grid.cells(small(axes={}, overrides=first), f"{folder}/runs", [0])
    assert quick_load(cell.overrides).model.weights == f"{folder}/shared/first"


def test_given_seeds_replace_those_of_the_benchmark():
    assert grid.cells(small(), "r", [7])[0].label == "resnet sgd seed 7"
    assert len(grid.cells(DEMO, "r")) == 2 * 3 * 3
    assert len(grid.cells(DEMO, "r", [0])) == 6


def test_seeds_of_the_tuning_are_refused():
    with pytest.raises(UsageError, match="--seeds 100: the tuning chose the settings with this"):
        suite.row("demo", None, seeds=[0, 100])


def test_a_cell_waits_for_the_process_of_an_earlier_command(tmp_path, monkeypatch):
    """Its refusal to share the run directory would count as a missed target."""
    monkeypatch.setattr(run_end, "PATIENCE_S", 0.1)
    monkeypatch.setattr(own_files, "is_locked", lambda folder: True)
    cell = grid.cells(small(), str(tmp_path), [0])[0]
    with pytest.raises(UsageError, match="a process of an earlier command still trains here"):
        grid.run_cell(cell)
    assert run_end.failure(cell.path()) is None


@pytest.mark.parametrize("name", ["no_such", "", "../train"])
def test_an_unknown_name_gives_an_error_with_all_benchmarks(name):
    with pytest.raises(UsageError, match=r"no such benchmark; choose one of .*demo") as caught:
        schema.load(name)
    assert len(str(caught.value).splitlines()) == 1


TUNED = (
    "title: x\naxes: {{optimizer: [b]}}\noverrides: [x]\ntuning: {{overrides: [x], "
    "trials: {trials}, seeds: {seeds}, experiment: e, space: {{{name}: {{}}}}}}\n"
)


def ranged(text):
    return TUNED.format(trials=1, seeds=[3], name="b").replace("{}", f"{{optimizer.lr: {text}}}")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("title: x\naxis: {}\n", "axis"),
        ("title: x\naxes: {a: [b]}\noverrides: [x]\nseeds: [many]\n", "many"),
        ("title: [\n", "broken.yaml"),
        ("title: x\n", "broken.yaml"),
        ("title: 0x_\n", "invalid literal for int()"),
        pytest.param(f"title: {'[' * 2000}", "maximum recursion depth", id="deep"),
        ("- title: x\n", "is no benchmark: expected title:, axes: and overrides:"),
        (ranged("{log: [0, 1]}"), "b: optimizer.lr: {'log': [0, 1]} is no range; write"),
        (ranged("{integer: [0.5, 3]}"), "is no range"),
        (ranged("{uniform: [3, 1]}"), "is no range"),
        (ranged("{choice: []}"), "is no range"),
        (ranged("{linear: [0, 1]}"), "log, uniform or integer: [low, high], or choice: ["),
        (TUNED.format(trials=0, seeds=[1], name="b"), "tuning: needs at least one trial"),
        (TUNED.format(trials=1, seeds=[], name="b"), "tuning: needs at least one trial, and seeds"),
        (TUNED.format(trials=1, seeds=[3, 3], name="b"), "and seeds that differ"),
        (TUNED.format(trials=1, seeds=[3], name="c"), "the space has no optimizer b"),
        ("extends: broken\n", "extends: this benchmark extends itself"),
        ("extends: nothing\n", "extends: nothing: no such benchmark; choose one of broken"),
    ],
)
def test_a_broken_benchmark_gives_a_one_line_error(tmp_path, monkeypatch, text, fragment):
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "broken.yaml").write_text(text)
    for module in (compose, conf_files):
        monkeypatch.setattr(module, "CONF_DIR", tmp_path)
    with pytest.raises(UsageError) as caught:
        schema.load("broken")
    assert "broken.yaml" in str(caught.value)
    assert fragment in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


OWN = "extends: demo\noverrides: ['experiment=digits/{task}_{optimizer}', trainer.max_steps=1]\n"


def test_a_file_of_the_users_own_is_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "base.yaml").write_text(OWN)
    (tmp_path / "mine" / "short.yaml").write_text("extends: base.yaml\nseeds: [7]\n")
    row = suite.row("mine/short.yaml", None)
    assert row.folder == Path("runs/short")
    assert (len(row.cells), row.cells[0].seed) == (6, 7)
    assert row.cells[0].config().trainer.max_steps == 1
    with pytest.raises(UsageError, match=r"mine/no\.yaml: no such file; kfac-bench list"):
        schema.load("mine/no.yaml")
    (tmp_path / "mine" / "base.yaml").write_text("title: &a x\nsource: *a\n")
    with pytest.raises(UsageError, match=r"mine/short\.yaml: line 2: YAML aliases are not allowed"):
        schema.load("mine/short.yaml")


def test_an_unknown_option_in_a_file_is_one_line_before_anything_runs(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(OWN.replace("max_steps", "max_stepps"))
    assert code_of("run", str(file), "--runs-dir", str(tmp_path / "runs")) == 2
    assert "did you mean trainer.max_steps?" in capsys.readouterr().err
    space = schema.load("demo").tuning.space["kfac"] | {"kfac.dampign": {"uniform": [0.1, 0.2]}}
    tuning = {"tuning": {"space": {"kfac": space}}}
    file.write_text(OWN + yaml.safe_dump(tuning))
    words = ("tune", str(file), "--runs-dir", str(tmp_path / "runs"), "--out", str(tmp_path))
    assert code_of(*words) == 2
    assert "did you mean kfac.damping?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_benchmark_may_extend_one_that_extends_another(tmp_path, monkeypatch):
    (tmp_path / "benchmark").mkdir()
    for name, text in {
        "first": "title: x\naxes: {a: [b]}\noverrides: [x]\nseeds: [1, 2]\n",
        "second": "extends: first\nseeds: [3]\n",
        "third": "extends: second\ntitle: y\n",
    }.items():
        (tmp_path / "benchmark" / f"{name}.yaml").write_text(text)
    for module in (compose, conf_files):
        monkeypatch.setattr(module, "CONF_DIR", tmp_path)
    found = schema.load("third")
    assert (found.title, found.axes, found.seeds) == ("y", {"a": ["b"]}, [3])


# ---- running cells ----


@pytest.fixture
def started(monkeypatch):
    """Return the overrides of the started cells. No process is really started."""
    calls = []

    def train(overrides):
        calls.append(tuple(overrides))
        return 1, "it broke"

    monkeypatch.setattr(local_runs, "train_forked", train)
    return calls


def test_a_finished_cell_is_not_run_again(tmp_path, started):
    cells = grid.cells(small(), str(tmp_path))[:5]
    write_run(cells[0])
    write_run(cells[1], "reached", 7)
    write_run(cells[2], "failed", 3, message="the loss is nan")
    write_run(cells[3], "interrupted")
    (cells[4].path()).mkdir()  # killed before its first event
    said = []
    assert grid.run_cells(cells, said.append) == 2
    named = [f"run_id={cell.path().name}" for cell in cells]
    assert started == [(*cells[i].overrides, named[i]) for i in (3, 4)]
    assert said[0] == "[1/5] resnet sgd seed 0: finished at step 10, 1.50 s (before)"
    assert "reached at step 7" in said[1]
    assert "failed at step 3" in said[2]
    assert "the loss is nan" in said[2]
    assert "failed: kfac-train: it broke (exit code 1); about " in said[3]
    assert said[4].endswith("failed: kfac-train: it broke (exit code 1)")
    assert len(said) == 5


def test_a_failed_cell_is_recorded_and_not_run_again_without_retry(tmp_path, started):
    cells = grid.cells(small(), str(tmp_path))[:2]
    said = []
    for _ in range(2):
        assert grid.run_cells(cells, said.append) == 2
    assert len(started) == 2, "tried again unasked"
    assert said[2].endswith("seed 0: failed: kfac-train: it broke (exit code 1) (before)")
    assert run_end.failure(cells[0].path()).reason == "kfac-train: it broke (exit code 1)"
    assert grid.run_cells(cells, said.append, retry=True) == 2
    assert len(started) == 4
    write_run(cells[0], "reached", 4)  # by hand, in the meantime
    assert run_end.failure(cells[0].path()) is None
    assert grid.run_cells(cells, said.append) == 1
    assert len(started) == 4


@pytest.mark.parametrize("code", [143, 138])  # SIGTERM; SIGUSR1, with which Slurm gives notice
def test_an_interrupted_run_continues_at_the_next_start(tmp_path, started, monkeypatch, code):
    [cell] = grid.cells(small(), str(tmp_path))[:1]
    with monkeypatch.context() as stopped:
        stopped.setattr(local_runs, "train_forked", lambda overrides: (code, "bye"))
        assert grid.run_cell(cell) == (False, f"interrupted: kfac-train: bye (exit code {code})")
    assert run_end.failure(cell.path()) is None
    grid.run_cell(cell)
    assert len(started) == 1


def test_a_cell_fails_if_the_run_that_it_starts_from_fails(tmp_path, started):
    first = Cell("first", ("model=resnet8", f"runs_dir={tmp_path}", "run_id=first"))
    cell = Cell("cell", ("model=resnet8", f"runs_dir={tmp_path}", "seed=3"), before=(first,))
    good, said = grid.run_cell(cell)
    assert not good
    assert said == (
        "failed: first, which it starts from, failed: kfac-train: it broke (exit code 1)"
    )
    assert [call[-1] for call in started] == ["run_id=first"]
    assert run_end.failure(cell.path()).reason == said.removeprefix("failed: ")
    write_run(first)
    grid.run_cell(cell, retry=True)
    assert [call[-1] for call in started] == ["run_id=first", f"run_id={cell.path().name}"]


def test_a_cell_waits_for_the_run_that_it_starts_from(tmp_path, started, monkeypatch):
    """An interrupted first run continues at the next start, so the cell has not failed."""
    first = Cell("first", ("model=resnet8", f"runs_dir={tmp_path}", "run_id=first"))
    cell = Cell("cell", ("model=resnet8", f"runs_dir={tmp_path}", "seed=3"), before=(first,))
    with monkeypatch.context() as stopped:
        stopped.setattr(local_runs, "train_forked", lambda overrides: (143, "bye"))
        assert grid.run_cell(cell) == (False, "interrupted: kfac-train: bye (exit code 143)")
    assert run_end.failure(cell.path()) is None
    write_run(first)
    grid.run_cell(cell)
    assert [call[-1] for call in started] == [f"run_id={cell.path().name}"]


def test_a_cell_with_too_many_ranks_does_not_train_the_run_that_it_starts_from(tmp_path, started):
    first = Cell("first", ("model=resnet8", f"runs_dir={tmp_path}", "run_id=first"))
    words = ("model=resnet8", f"runs_dir={tmp_path}")
    good, said = grid.run_cell(Cell("cell", words, ranks=100_000, before=(first,)))
    assert not good
    assert said.startswith("not run: 100000 ranks are more than the ")
    assert started == []


def test_a_profile_changes_the_options_of_a_value(tmp_path):
    each = {"size": {"big": ["trainer.batch_size=512", "ranks=2"]}}
    sized = {
        "smoke": BenchmarkProfile(each={"size": {"small": ["trainer.batch_size=4"]}}, seeds=[7])
    }
    axes = {"size": ["small", "big"]}
    tree = Benchmark("T", axes, ["model=resnet8"], [0, 1], each=each, profiles=sized)
    few, many = grid.cells(tree, str(tmp_path), None, "smoke", ["trainer.max_steps=3"])
    assert (few.ranks, few.config().trainer.batch_size, few.seed) == (1, 4, 7)
    assert (many.ranks, many.config().trainer.batch_size) == (2, 512)
    assert many.path().name.endswith("-2ranks")
    assert many.config().trainer.max_steps == 3
    assert many.command()[1:4] == ["-m", "kfac_bench.benchmark.local_runs", "2"]
    with pytest.raises(UsageError, match="--profile paper: choose one of smoke"):
        grid.cells(tree, "r", None, "paper")
    with pytest.raises(UsageError, match="has no profiles"):
        grid.cells(small(), "r", None, "smoke")


@pytest.mark.parametrize("name", ["optimiser", "task[name]"])
def test_a_name_that_is_no_axis_is_refused(name):
    with pytest.raises(UsageError, match=r"cannot be filled in; there are \{task\}"):
        grid.cells(small(overrides=[f"experiment=digits/{{{name}}}"]), "r")


def test_the_run_directory_does_not_depend_on_the_job(tmp_path, monkeypatch):
    """A job of the cluster and the terminal that submitted it must find the same directory."""
    cells = grid.cells(small(), str(tmp_path))
    here = cells[0].path()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    grid._path.cache_clear()
    assert cells[0].path() == here


def test_the_message_of_a_cell_comes_from_its_events(tmp_path, monkeypatch):
    [cell] = grid.cells(small(), str(tmp_path), [0])[:1]

    def train(overrides):
        write_run(cell, "reached", 4)
        return 0, ""

    monkeypatch.setattr(local_runs, "train_forked", train)
    said = []
    assert grid.run_cells([cell], said.append) == 0
    assert said == ["[1/1] resnet sgd seed 0: reached at step 4, 1.50 s"]


def test_lines_of_torchrun_after_the_error_are_left_out(tmp_path, monkeypatch):
    cell = Cell("x", ("model=resnet8", f"runs_dir={tmp_path}"), ranks=2)
    program = "raise SystemExit('warning\\nkfac-train: it broke\\ntorchrun: a rank failed')"
    monkeypatch.setattr(Cell, "command", lambda self: [sys.executable, "-c", program])
    assert grid.run_cell(cell) == (False, "failed: kfac-train: it broke (exit code 1)")


def test_a_real_cell_that_fails_is_reported_and_counted(tmp_path, capsys, monkeypatch):
    """kfac-bench run starts a real run here, which finds no data."""
    axes = {"data": ["digits", "cifar10"]}
    tree = Benchmark("T", axes, ["data={data}", "model=resnet8", "logger=none"], [3])
    monkeypatch.setattr(schema, "load", lambda name: tree)
    runs = tmp_path / "runs"
    write_run(grid.cells(tree, str(runs))[0], step=1)
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


def test_a_row_whose_data_are_missing_stops_at_its_second_cell(tmp_path, capsys, monkeypatch):
    tree = Benchmark("T", {}, ["data=cifar10", "model=resnet8", "logger=none"], [0, 1, 2])
    monkeypatch.setattr(schema, "load", lambda name: tree)
    cells = grid.cells(tree, str(tmp_path))
    assert code_of("run", "demo", "--runs-dir", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert said.out.count("set data.root") == 1
    assert said.err.startswith("kfac-bench: data=cifar10 is read from disk: set data.root")
    assert [run_end.failure(cell.path()) for cell in cells] == [None] * 3
    assert all(run_end.will_run(cell.path(), retry=False) for cell in cells)

    class NothingToKeep(grid.WorkSession):
        def keep(self, *args):
            pytest.fail("a refused run is no result")

    with pytest.raises(UsageError, match=r"set data\.root"):
        grid.run_cells(cells, lambda line: None, session=NothingToKeep())


def test_a_report_tells_cells_that_have_not_run_from_failed_ones(tmp_path, capsys, monkeypatch):
    tree, runs = small(seeds=[0]), tmp_path / "runs"
    monkeypatch.setattr(schema, "load", lambda name: tree)

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            cli.bench([words[0], "small", "--runs-dir", str(runs), *words[1:]])
        said = capsys.readouterr()
        return caught.value.code, said.out + said.err

    code, said = call("report")
    assert code == 2
    assert "small: no cell was run yet; start with kfac-bench run small" in said
    code, said = call("run", "--minutes", "1e-9")
    assert code == 0, "nothing has run, and nothing is wrong"
    first, then = said.splitlines()
    assert first == "time is up: 4 of 4 cells are left"
    assert then.startswith(f"next: kfac-bench run small --runs-dir {runs} ")
    done, failed, *_ = grid.cells(tree, str(runs))
    write_run(done)
    run_end.record_failure(failed.path(), failed.label, "no memory")
    code, said = call("report")
    assert code == 0
    assert "because it failed before its first event: resnet adamw seed 0\n" in said
    assert "not run yet: 2 of 4 cells\n" in said
    assert said.count("first event") == 1
    assert call("report", "--into", "doc.md")[0] == 2


def test_a_cell_with_wrong_overrides_is_refused():
    with pytest.raises(UsageError, match=r"did you mean kfac\.damping"):
        Cell("x", ("kfac.dampign=1",)).path()
