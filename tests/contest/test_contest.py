"""A contest in several sittings: what is kept, what continues, and what is computed from it."""

import copy
import functools
import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml

from benchmarks.contest import __main__ as contest_command
from benchmarks.contest import contest_tables, studies
from benchmarks.contest.packed_runs import PackedRun
from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.sitting import Sitting, factors, tasks_of
from kfac_bench.benchmark import grid, local_runs, schema, suite
from kfac_bench.benchmark.schema import Benchmark, Tuning
from kfac_bench.cli.entry import exit_with
from kfac_bench.config import compose, conf_files
from kfac_bench.errors import UsageError
from kfac_bench.record.events import RunEnded, RunStarted, TargetReached
from tests.benchmark.test_bench import write_run
from tests.support.configs import quick_load

INF = math.inf
TASKS = ["digits/resnet", "digits/autoencoder"]
SPACE = {
    name: {"optimizer": name, "kfac": "none", "optimizer.lr": {"log": [0.01, 0.1]}}
    for name in ("sgd", "adamw")
}
BASELINE = ["experiment={task}", "logger=none", "trainer.target=null", "trainer.max_steps=3"]


def contest(**changes):
    """Return a small contest of two tasks and two optimizers."""
    tuning = Tuning(
        ["experiment={task}", "logger=none"], 2, [1, 2], SPACE, "contest/{task}_{optimizer}"
    )
    options = {
        "title": "Contest",
        "axes": {"task": TASKS, "optimizer": ["sgd", "adamw"]},
        "overrides": ["experiment={task}", "optimizer={optimizer}", "logger=none"],
        "seeds": [10, 11],
        "baseline": BASELINE,
        "tuning": tuning,
    }
    return Benchmark(**(options | changes))


def command(words):
    """Run a command of the contest, which ends with an exit code."""
    exit_with("contest", lambda: contest_command.main(words))


@pytest.fixture
def lab(tmp_path, monkeypatch):
    return Lab(tmp_path, monkeypatch)


@functools.cache
def composed(overrides):
    return quick_load(overrides)


class Lab:
    """Machines that train nothing: a run writes the events that ``seconds(config)`` decides."""

    def __init__(self, tmp_path, monkeypatch):
        self.results = tmp_path / "results"
        self.results.mkdir()
        self.trained, self.said, self.count = [], [], 0
        self.slower = 1.0
        self.now_s = 0.0
        self.seconds = lambda config: 1.0 + 10 * config.optimizer.lr
        # Relative paths are the same in each test, so tests share what they compose.
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(compose, "load", lambda found: copy.deepcopy(composed(tuple(found))))
        monkeypatch.setattr(local_runs, "train_forked", self.train)

    def train(self, overrides):
        cell = grid.Cell("run", tuple(overrides))
        config = cell.config()
        self.trained.append(config)
        self.now_s += 30
        limit = config.trainer.max_train_s or INF
        if config.trainer.target is None:
            write_run(cell, "finished")
            path = cell.path() / "events.jsonl"
            slow = json.dumps(1.5 * self.slower)
            path.write_text(path.read_text().replace('"train_s": 1.5', f'"train_s": {slow}'))
            return 0, ""
        seconds = self.seconds(config) * self.slower
        hit = seconds <= limit
        write_run(cell, "reached" if hit else "finished", hit_s=seconds if hit else None)
        return 0, ""

    def new_machine(self, slower=1.0):
        self.count += 1
        self.slower = slower
        self.trained.clear()
        self.said.clear()

    def sitting(self, benchmark, part=studies.PART, minutes=None):
        runs_dir = Path(f"machine n\u00b0{self.count}") / part  # Hydra takes this in quotes only
        store = ResultStore(self.results, "contest", part, tasks_of(benchmark))
        now = lambda: self.now_s  # noqa: E731
        return Sitting(benchmark, runs_dir, self.said.append, store, minutes, now), str(runs_dir)

    def study(self, benchmark, minutes=None, tasks=()):
        sitting, runs_dir = self.sitting(benchmark, minutes=minutes)
        return studies.run_studies(benchmark, runs_dir, sitting, self.said.append, tasks)

    def run(self, benchmark, minutes=None, retry=False):
        sitting, runs_dir = self.sitting(benchmark, "table", minutes)
        cells = grid.cells(benchmark, runs_dir)
        row = suite.BenchmarkRow("contest", benchmark, "", None, cells, [], Path(runs_dir))
        return suite.run(row, self.said.append, retry=retry, session=sitting)

    def store(self, part=studies.PART):
        return ResultStore(self.results, "contest", part, TASKS)

    def baselines(self):
        return [c for c in self.trained if c.trainer.target is None]


# ---- sittings ----


def test_the_time_limit_says_what_is_left_and_starts_nothing_more(lab):
    assert not lab.study(contest(), minutes=2)  # each run takes 30 s, baselines, too
    assert len(lab.trained) == 4
    assert lab.said[-1] == "time is up; the same command continues"
    assert lab.run(contest(), minutes=1) == 0
    assert lab.said[-1].startswith("time is up: 7 of 8 cells are left")


def test_each_turn_of_a_sitting_has_a_baseline_of_each_task(lab):
    lab.study(contest(), tasks=["digits/resnet"])
    names = [c.run_id for c in lab.baselines()]
    sitting = next(iter(lab.store().runs("digits/resnet", "baseline"))).sitting
    turns = 2 * 3  # of each study: trials, finalists and the winner
    assert names == [f"baseline-digits-resnet-{sitting}-{i}" for i in range(turns)]
    first = [c.trainer.target is None for c in lab.trained[:7]]
    assert first == [True, *[False] * 4, True, False]
    assert lab.store().runs("digits/autoencoder", "baseline") == []


def test_seconds_of_a_slower_machine_are_scaled(lab):
    benchmark = contest(axes={"task": TASKS[:1], "optimizer": ["sgd", "adamw"]})
    lab.run(benchmark, minutes=1.6)
    lab.new_machine(slower=3.0)
    lab.run(benchmark)
    result = contest_tables.load(benchmark, lab.store("table"))
    times = result.times()["digits/resnet"]
    rates = {c.optimizer.name: c.optimizer.lr for c in lab.trained}
    for name, lr in rates.items():
        assert times[name] == pytest.approx([1 + 10 * lr] * 2), "not those of the first sitting"
    table = contest_tables.tables(result)[-1]
    assert [row[3:] for row in table.rows] == [
        [2, 1.5, 1.5, 1.5, 1.0],
        [2, 4.5, 4.5, 4.5, pytest.approx(1 / 3)],
    ]
    assert any("took 2 sittings" in note for note in table.notes)


def test_a_trial_is_not_stopped_by_the_time_of_another_machine(lab):
    benchmark = contest(axes={"task": TASKS[:1], "optimizer": ["sgd"]})
    benchmark.tuning.trials, benchmark.tuning.patience = 3, 2.0
    lab.study(benchmark, minutes=0.9)
    best_s = lab.seconds(lab.trained[-1])
    lab.new_machine(slower=50.0)
    lab.study(benchmark)
    limits = [c.trainer.max_train_s for c in lab.trained if c.trainer.target is not None]
    assert limits[0] is None
    assert limits[1] == pytest.approx(2 * 50 * lab.seconds(lab.trained[1]))
    assert best_s < 3


def test_a_sitting_lasts_as_long_as_its_folder_of_runs(lab):
    one, runs_dir = lab.sitting(contest())
    two, _ = lab.sitting(contest())
    assert one.name == two.name
    lab.new_machine()
    assert lab.sitting(contest())[0].name != one.name
    (Path(runs_dir) / "sitting.txt").write_text("../x")
    lab.count = 0
    with pytest.raises(UsageError, match="not the name of a sitting; delete the file"):
        lab.sitting(contest())


def test_a_failed_process_is_a_miss_that_is_kept(lab, monkeypatch):
    benchmark = contest(baseline=[])
    monkeypatch.setattr(local_runs, "train_forked", lambda overrides: (1, "no memory"))
    assert lab.run(benchmark) == 8
    lab.study(benchmark)
    lab.new_machine()
    monkeypatch.setattr(local_runs, "train_forked", lab.train)
    lab.run(benchmark)
    lab.study(benchmark)
    assert lab.trained == []
    found = lab.store("table").runs("digits/resnet", "table")
    assert all("no memory" in run.failure for run in found)
    assert contest_tables.load(benchmark, lab.store("table")).times()["digits/resnet"] == {
        "sgd": [INF, INF],
        "adamw": [INF, INF],
    }
    lab.run(benchmark, minutes=1, retry=True)
    assert len(lab.trained) == 2, "a failed cell ran again after the time"
    assert lab.said[-1].startswith("time is up: 6 of 8 cells are left")
    lab.run(benchmark, retry=True)
    assert not any(run.failure for run in lab.store("table").runs("digits/resnet", "table"))


def test_a_run_that_failed_by_its_events_and_ran_again_replaces_the_failed_one(lab, monkeypatch):
    benchmark = contest(axes={"task": TASKS[:1], "optimizer": ["sgd"]}, seeds=[10], baseline=[])

    def diverge(overrides):
        write_run(grid.Cell("run", tuple(overrides)), "failed", 3, message="the loss is nan")
        return 1, "the loss is nan"

    with monkeypatch.context() as diverging:
        diverging.setattr(local_runs, "train_forked", diverge)
        lab.run(benchmark)
    kept = lab.store("table").runs(TASKS[0], "table")
    assert contest_tables.load(benchmark, lab.store("table")).times()[TASKS[0]] == {"sgd": [INF]}
    lab.new_machine()
    lab.run(benchmark)
    assert lab.store("table").runs(TASKS[0], "table") == kept, "another sitting took the run"
    lab.run(benchmark, retry=True)
    assert len(lab.trained) == 1
    (times,) = contest_tables.load(benchmark, lab.store("table")).times()[TASKS[0]].values()
    assert times == [lab.seconds(lab.trained[0])]


def test_runs_of_a_benchmark_without_tasks_are_kept_with_whole_curves(lab):
    changes = {"axes": {"optimizer": ["sgd", "adamw"], "batch": ["8", "16"]}, "baseline": []}
    overrides = ["experiment=digits/resnet", "optimizer={optimizer}", "trainer.batch_size={batch}"]
    benchmark = contest(**changes, overrides=[*overrides, "logger=none"], tuning=None)
    lab.run(benchmark)
    kept = ResultStore(lab.results, "contest", "table", ["all"]).runs("all", "table")
    optimizers = {"sgd 8", "sgd 16", "adamw 8", "adamw 16"}
    assert {(run.optimizer, run.seed) for run in kept} == {*product(optimizers, (10, 11))}
    lab.new_machine()
    lab.run(benchmark)
    assert lab.said[0].startswith("8 finished runs taken from the results")
    assert not lab.trained


def test_two_commands_may_add_runs_to_one_store(lab):
    one, other = lab.store("table"), lab.store("table")
    for seed in (10, 11):
        one.add(packed("sgd", TASKS[0], seed, 2.0))
        other.add(packed("adamw", TASKS[0], seed, 1.0))
    runs = lab.store("table").runs(TASKS[0], "table")
    assert sorted(run.name for run in runs) == ["adamw10", "adamw11", "sgd10", "sgd11"]
    assert [p.name for p in one.path(TASKS[0]).parent.iterdir()] == ["resnet.jsonl.gz"]


def test_an_interrupted_trial_ends_the_tuning_and_is_no_miss(lab, monkeypatch):
    benchmark = contest(axes={"task": TASKS[:1], "optimizer": ["sgd"]})
    with monkeypatch.context() as stopped:
        stopped.setattr(local_runs, "train_forked", lambda overrides: (143, "bye"))
        with pytest.raises(KeyboardInterrupt):
            lab.study(benchmark)
        with pytest.raises(KeyboardInterrupt):
            lab.study(replace(benchmark, baseline=[]))
    lab.study(benchmark)
    assert len(lab.store().runs(TASKS[0], "trial")) == 4


def test_a_baseline_that_fails_says_so(lab, monkeypatch):
    monkeypatch.setattr(local_runs, "train_forked", lambda overrides: (1, "no memory"))
    sitting, _ = lab.sitting(contest())
    sitting.begin(TASKS[0], "turn 1")
    assert lab.said[-1].startswith("baseline-digits-resnet-")
    assert lab.said[-1].endswith("failed, so it does not measure this machine: no memory")


# ---- held-out tasks ----


def test_a_rule_that_is_not_frozen_does_not_meet_held_out_tasks(lab, monkeypatch):
    held = {"held_out": TASKS[1:], "frozen": {"adamw": ""}}
    lab.study(contest(**held))
    met = {(c.optimizer.name, c.model.name) for c in lab.trained if c.trainer.target is not None}
    assert met == {("sgd", "resnet8"), ("adamw", "resnet8"), ("sgd", "autoencoder")}
    monkeypatch.setattr(schema, "load", lambda name: contest(**held))
    row = suite.row("contest", None)
    assert row.left_out == [f"digits/autoencoder adamw seed {seed}" for seed in (10, 11)]
    assert len(row.cells) == 6
    held["frozen"] = {"adamw": "abcdef0"}
    assert len(suite.row("contest", None).cells) == 8


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"held_out": ["no_such"]}, "held_out: no_such is no value of the axis task"),
        ({"frozen": {"adam": ""}}, "frozen: adam is no value of the axis optimizer"),
        ({"frozen": {"sgd": "soon"}}, "'soon' is not the hash of a commit"),
    ],
)
def test_wrong_marks_are_refused(tmp_path, monkeypatch, change, fragment):
    (tmp_path / "benchmark").mkdir()
    tree = {"title": "x", "axes": contest().axes, "overrides": ["a"], **change}
    (tmp_path / "benchmark" / "x.yaml").write_text(yaml.safe_dump(tree))
    for module in (compose, conf_files):
        monkeypatch.setattr(module, "CONF_DIR", tmp_path)
    with pytest.raises(UsageError, match=fragment):
        schema.load("x")


def test_no_optimizer_of_the_contest_has_seen_its_tasks():
    found = schema.load("contest")
    assert [*found.held_out] == sorted(found.axes["task"], key=found.held_out.index)
    assert found.frozen.keys() == set(found.axes["optimizer"])
    baseline = [schema.fill_in(w, {"task": "embedded/pictures_unet"}) for w in found.baseline]
    config = compose.load(baseline)
    assert (config.trainer.target, config.trainer.max_steps, config.seed) == (None, 50, 99)


def test_options_of_a_task_hold_for_trials_and_for_the_table(lab):
    each = {"task": {"digits/resnet": ["trainer.max_train_s=1.05"]}}
    benchmark = contest(each=each, baseline=[])
    lab.study(benchmark)
    lab.run(benchmark)
    limits = {c.model.name: set() for c in lab.trained}
    for config in lab.trained:
        limits[config.model.name].add(config.trainer.max_train_s)
    assert limits["resnet8"] == {1.05}
    assert 1.05 not in limits["autoencoder"]


# ---- tables ----


def packed(optimizer, task, seed, seconds, sitting="1"):
    ended = RunEnded(10, 1.0, "finished")
    events = [TargetReached(10, seconds, "x", 1.0, 1.0)] if math.isfinite(seconds) else []
    return PackedRun(
        f"{optimizer}{seed}", "table", task, optimizer, seed, sitting, "", {}, (*events, ended)
    )


def test_the_score_table_names_slow_tasks(lab):
    store = lab.store()
    for seed in (10, 11, 12):
        store.add(packed("sgd", TASKS[0], seed, 2.0))
        store.add(packed("adamw", TASKS[0], seed, 1.0))
        store.add(packed("sgd", TASKS[1], seed, 3.0))
        store.add(packed("adamw", TASKS[1], seed, 3.3))
    found = contest_tables.load(contest(), store)
    scores, _, ratios, times, sittings = contest_tables.tables(found)
    assert scores.rows == [
        ["adamw", "0.983 (0.983 to 0.983)", pytest.approx(1.1), "none"],
        ["sgd", "0.833 (0.833 to 0.833)", 2.0, "digits/resnet 2"],
    ]
    assert [row[0] for row in ratios.rows] == ["adamw", "sgd"]
    assert times.rows[0] == ["digits/resnet", "sgd", "3 of 3", 10, "2 (2 to 2)", 2.0]
    assert [row[3] for row in sittings.rows] == [6, 6]


def test_a_contest_that_is_not_complete_says_so(lab):
    with pytest.raises(UsageError, match="no results of 'Contest'"):
        contest_tables.load(contest(), lab.store("table"))
    store = lab.store("table")
    store.add(packed("sgd", TASKS[0], 10, 2.0))
    [scores, *_] = contest_tables.tables(contest_tables.load(contest(), store))
    assert any("Not run yet, and not counted: digits/autoencoder" in n for n in scores.notes)
    assert "digits/resnet: only 1 of 2 studies have run" in scores.notes
    store.add(packed("sgd", TASKS[0], 11, 2.0))
    store.add(packed("adamw", TASKS[0], 10, 2.0))
    [scores, *_] = contest_tables.tables(contest_tables.load(contest(), store))
    assert "digits/resnet: optimizers have between 1 and 2 studies" in scores.notes


def test_optimizers_with_the_same_label_stay_apart(lab):
    benchmark = contest()
    benchmark.tuning.labels = {"sgd": "adamw", "adamw": "adamw"}
    store = lab.store("table")
    store.add(packed("sgd", TASKS[0], 10, 2.0))
    store.add(packed("adamw", TASKS[0], 10, 1.0))
    times = contest_tables.load(benchmark, store).times()[TASKS[0]]
    assert times == {"adamw": [2.0], "adamw (adamw)": [1.0]}


def test_a_later_run_replaces_one_with_the_same_key(lab):
    store = lab.store("table")
    store.add(packed("sgd", TASKS[0], 10, 2.0))
    store.add(replace(packed("sgd", TASKS[0], 10, 3.0), name="other"))
    assert [r.name for r in lab.store("table").runs(TASKS[0], "table")] == ["other"]


def test_speeds_without_a_finished_baseline_are_not_scaled():
    died = replace(packed("sgd", "a", 1, INF), kind="baseline", events=(RunEnded(1, 2, "failed"),))
    assert factors([died]) == {}


@pytest.mark.parametrize(("device", "name"), [("cpu", "A CPU"), ("cuda:0", "A GPU")])
def test_a_sitting_names_the_processor_that_trained(lab, device, name):
    about = {"hardware": {"cpu": "A CPU", "gpus": "A GPU"}, "device": device}
    about["versions"] = {"torch": "2.15"}
    run = packed("sgd", TASKS[0], 10, 2.0)
    started = RunStarted(0, 0.0, "a", "x", True, {}, about)
    store = lab.store("table")
    store.add(replace(run, events=(started, *run.events)))
    table = contest_tables.tables(contest_tables.load(contest(), store))[-1]
    assert table.rows[0][2] == f"{name}, torch 2.15"


def test_sittings_without_a_baseline_are_named(lab):
    store = lab.store("table")
    for seed, sitting in ((10, "1"), (11, "2")):
        store.add(packed("sgd", TASKS[0], seed, 2.0, sitting))
    store.add(replace(packed("sgd", TASKS[0], 99, INF, "1"), kind="baseline"))
    table = contest_tables.tables(contest_tables.load(contest(), store))[-1]
    assert table.notes[-1] == "digits/resnet: no baseline of 2 finished: not scaled"


def test_a_negative_time_of_a_damaged_clock_makes_no_score_above_1(lab):
    store = lab.store("table")
    store.add(packed("sgd", TASKS[0], 10, -1.0))
    store.add(packed("adamw", TASKS[0], 10, 2.0))
    [scores, *_] = contest_tables.tables(contest_tables.load(contest(), store))
    assert [row[1] for row in scores.rows] == ["1 (1 to 1)", "0 (0 to 0)"]


# ---- commands ----


@pytest.mark.slow
def test_wrong_requests_are_one_line(lab, capsys):
    for words, fragment in [
        (["run", "demo", "--minutes", "-1"], "--minutes -1: must be at least 0"),
        (["run", "demo", "runs_dir=x"], "runs_dir: write --runs-dir DIR"),
        (["run", "all", "profile=cpu"], "profile=cpu: write --profile cpu"),
        (["run", "demo", "run_id=x"], "run_id=x: each cell has a run directory of its own"),
        (["run", "demo", "seed=7"], "seed=7: write --seeds 7"),
        (["run", "demo", "--sbatch=--gpus=4"], "--launcher is local: add --launcher slurm"),
        (["run", "demo", "launcher=slurm"], "launcher=slurm: write --launcher slurm"),
        (
            ["run"],
            "arguments are required: benchmark; see python -m benchmarks.contest run --help",
        ),
        (["run", "contest"], "contest has no cells: python -m benchmarks.contest study makes"),
        (["study", "contest", "--results", "no_such"], "--results no_such: no such folder"),
        (["run", "demo", "--only", "x"], "--only x: no cell begins with this text; cells are "),
        (["run", "all", "--only", "x"], "contest: --only: name one benchmark instead of all"),
        (["run", "all", "--minutes", "0"], "contest: --minutes: name one benchmark instead of all"),
        (["tables", "claim2_intervals", "--results", "."], "has no studies"),
        (
            ["run", "demo", "--launcher=slurm", "--minutes", "3"],
            "--launcher slurm does not fit --minutes",
        ),
    ]:
        with pytest.raises(SystemExit) as caught:
            command(words)
        said = capsys.readouterr().err.strip()
        assert (caught.value.code, len(said.splitlines())) == (2, 1), words
        assert fragment in said
    store = lab.results / "contest" / "table" / "digits"
    store.mkdir(parents=True)
    (store / "resnet.jsonl.gz").write_bytes(b"no")
    with pytest.raises(UsageError, match=r"resnet\.jsonl\.gz: damaged"):
        ResultStore(lab.results, "contest", "table", TASKS)


@pytest.mark.parametrize(("words", "is_whole", "following"), [
    ([], True, ""),
    (["--results", "r", "--runs-dir", "d"], True, "tables demo --results r   (the scores)"),
    (["--results", "r", "--runs-dir", "d", "--tasks", "a,b"], False,
     "study demo --results r --runs-dir d --tasks a,b   (the runs that are missing)"),
    (["--tasks", "a"], True, "study demo   (the other tasks)"),
])  # fmt: skip
def test_a_study_names_a_command_that_fits(monkeypatch, capsys, words, is_whole, following):
    monkeypatch.setattr(contest_command, "open_sitting", lambda *given: None)
    monkeypatch.setattr(studies, "run_studies", lambda *given: is_whole)
    with pytest.raises(SystemExit):
        command(["study", "demo", *words])
    said = capsys.readouterr().out
    assert said == (f"next: python -m benchmarks.contest {following}\n" if following else "")


@pytest.mark.slow
def test_a_real_contest_from_trials_to_its_tables(tmp_path, monkeypatch, capsys):
    """Run a study with real trials, and its tables; then again with the results alone."""
    easy = ["trainer.predictions=0", "model.hidden=[16]", "trainer.target=8", "logger=none"]
    tree = {
        "title": "Tiny",
        "axes": {"task": ["digits/autoencoder"], "optimizer": ["adam"]},
        "overrides": [],
        "seeds": [10],
        "baseline": [*BASELINE, "model.hidden=[16]", "trainer.predictions=0"],
        "tuning": {
            "overrides": ["experiment={task}", *easy],
            "trials": 1,
            "seeds": [1],
            "space": {"adam": {"optimizer": "adam", "optimizer.lr": {"log": [0.01, 0.03]}}},
            "experiment": "",
        },
    }
    tiny = Benchmark(**(tree | {"tuning": Tuning(**tree["tuning"])}))
    monkeypatch.setattr(schema, "load", lambda name: tiny)
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    for machine in (1, 2):
        with pytest.raises(SystemExit) as caught:
            command(["study", "tiny", "--results", "results", "--minutes", "30"])
        assert caught.value.code == 0
        said = capsys.readouterr().out
        # A trial on three seeds, the winner and three baselines; the second machine trains nothing.
        took = [r.name for r in Path().glob("runs/*/*") if (r / "checkpoints").exists()]
        assert len(took) == (7 if machine == 1 else 0), took
        Path("runs").rename(f"machine{machine}")
        assert ("finished runs taken from the results" in said) == (machine == 2)
    page = Path("page.md")
    page.write_text("before\n<!-- made by python -m benchmarks.contest tables tiny --into -->old\n")
    words = ["tables", "tiny", "--results", "results", "--svg", "p.svg"]
    with pytest.raises(SystemExit):
        command([*words, "--into", str(page)])
    assert (
        "add the lines <!-- made by python -m benchmarks.contest tables tiny"
        in capsys.readouterr().err
    )
    page.write_text(page.read_text() + f"{contest_tables.END}\nafter\n")
    for more in ([], ["--into", str(page)], ["--into", str(page)]):
        with pytest.raises(SystemExit):
            command([*words, *more])
    said = capsys.readouterr().out
    assert said.endswith("figure: p.svg\nfigure: tiny.svg\n")
    tables = said.split("**Scores: ")[1].split("figure:")[0]
    assert "| adam | 1 (1 to 1) | 1 | none |" in tables
    begin = "<!-- made by python -m benchmarks.contest tables tiny --into -->\n\n"
    picture = f"![{contest_command.ALTERNATIVE}](tiny.svg)\n\n"
    made = f"{begin}{picture}**Scores: {tables}{contest_tables.END}"
    assert page.read_text() == f"before\n{made}\nafter\n"
    assert Path("p.svg").read_text().startswith("<svg")
    assert Path("tiny.svg").read_text() == Path("p.svg").read_text()
    size = sum(path.stat().st_size for path in Path("results").rglob("*.gz"))
    assert size < 4000
