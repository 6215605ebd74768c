"""Contests with studies: what runs, which winner is chosen, and the eight scores."""

import hashlib
import math
import runpy
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from benchmarks.contest import contest_tables, definitions, setup, spaces
from benchmarks.contest.interpolated import Reached, reached
from kfac_bench.benchmark import performance_profile, schema
from kfac_bench.benchmark.trials import trial_settings
from kfac_bench.benchmark.tune import TuningRuns
from kfac_bench.core.layers.coverage import find_layers
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated, RunStarted, TargetReached
from tests.contest.test_contest import TASKS, lab  # noqa: F401
from tests.contest.test_contest import contest as small_contest
from tests.support.quick import quick_if

INF = math.inf


def contest(**changes):
    """Return a small contest whose trials are not stopped early."""
    benchmark = small_contest(**changes)
    benchmark.tuning = replace(benchmark.tuning, patience=100.0)
    return benchmark


def kept(lab, task):  # noqa: F811
    store = lab.store()
    return [run for kind in ("trial", "final", "table") for run in store.runs(task, kind)]


def seeds(lab, optimizer, task):  # noqa: F811
    chosen = (c for c in lab.trained if c.trainer.target is not None)
    kind = task.partition("/")[2]
    return [c.seed for c in chosen if c.optimizer.name == optimizer and kind in c.model.name]


class TestStudies:
    def test_each_study_has_trials_finalists_and_a_fresh_seed(self, lab):  # noqa: F811
        assert lab.study(contest())
        # Two trials of each study, both again on two more seeds, then the winner.
        study = [1, 1, *[1000, 1001] * 2, 10], [2, 2, *[2000, 2001] * 2, 11]
        assert seeds(lab, "sgd", "digits/resnet") == [*study[0], *study[1]]

    def test_a_setting_that_is_fast_on_one_seed_only_does_not_win(self, lab):  # noqa: F811
        first, second = (s["optimizer.lr"] for s in trial_settings(contest().tuning, "sgd", 0))
        lab.seconds = lambda c: 1.0 if (c.seed, c.optimizer.lr) == (1, first) else (
            5.0 if c.optimizer.lr == first else 2.0
        )  # fmt: skip
        lab.study(contest(axes={"task": TASKS[:1], "optimizer": ["sgd"]}))
        (winner,) = [r for r in lab.store().runs(TASKS[0], "table") if r.seed == 10]
        assert winner.settings["optimizer.lr"] == second

    def test_a_winner_does_not_depend_on_how_the_scale_of_a_sitting_changes(self, lab):  # noqa: F811
        benchmark = contest(axes={"task": TASKS[:1], "optimizer": ["sgd"]})
        steady, other = (s["optimizer.lr"] for s in trial_settings(benchmark.tuning, "sgd", 1))
        # Medians of 2 and 3 seconds.
        times = {steady: {2: 1.8, 2000: 2.0, 2001: 4.0}, other: {2: 3.0, 2000: 1.9, 2001: 3.4}}
        lab.study(benchmark, minutes=5)
        assert {run.seed for run in kept(lab, TASKS[0])} == {1, 1000, 1001, 10}

        def seconds(config):
            lab.slower = 3.0  # the baseline before the finalists takes longer than the first one
            return times[config.optimizer.lr].get(config.seed, 1.0) / lab.slower

        lab.new_machine()
        lab.seconds = seconds
        assert lab.study(benchmark)
        (winner,) = [r for r in lab.store().runs(TASKS[0], "table") if r.seed == 11]
        assert winner.settings["optimizer.lr"] == steady

    def test_an_optimizer_may_have_fewer_studies(self, lab):  # noqa: F811
        benchmark = contest()
        benchmark.tuning.studies = {"adamw": 1}
        lab.study(benchmark)
        assert {*seeds(lab, "adamw", "digits/resnet")} == {1, 1000, 1001, 10}
        assert 2001 in seeds(lab, "sgd", "digits/resnet")

    @pytest.mark.slow
    def test_a_new_machine_continues(self, lab):  # noqa: F811
        """Cut into sittings of a few runs, the studies train the same runs, each once."""
        assert lab.study(contest())
        whole = {(task, *run.key) for task in TASKS for run in kept(lab, task)}
        shutil.rmtree(lab.results / "contest")
        trained = 0
        for sittings in count(1):
            lab.new_machine(slower=float(sittings))
            is_whole = lab.study(contest(), minutes=10)
            trained += len([c for c in lab.trained if c.trainer.target is not None])
            if is_whole:
                break
        assert sittings >= 3
        assert {(task, *run.key) for task in TASKS for run in kept(lab, task)} == whole
        assert trained == 2 * 2 * 14
        lab.new_machine()
        assert lab.study(contest())
        assert not lab.trained

    def test_a_setting_that_missed_is_not_run_on_more_seeds(self, lab):  # noqa: F811
        lab.seconds = lambda c: INF
        lab.study(contest(axes={"task": TASKS[:1], "optimizer": ["sgd"]}))
        assert seeds(lab, "sgd", TASKS[0]) == [1, 1, 10, 2, 2, 11]

    def test_only_some_tasks(self, lab):  # noqa: F811
        assert lab.study(contest(), tasks=[TASKS[1]])
        assert not seeds(lab, "sgd", TASKS[0])
        with pytest.raises(UsageError, match="--tasks digits/x: no such task; there are digits/"):
            lab.study(contest(), tasks=["digits/x"])

    def test_a_seed_of_the_table_is_needed_for_each_study(self, lab):  # noqa: F811
        with pytest.raises(UsageError, match="no tuning with a seed of the table per study"):
            lab.study(contest(seeds=[10]))

    def test_the_tables_count_studies(self, lab):  # noqa: F811
        benchmark = contest()
        lab.study(benchmark)
        result = contest_tables.load(benchmark, lab.store())
        scores, by_definition, _, times, _ = contest_tables.tables(result)
        assert "over studies" in scores.notes[0]
        assert [row[2] for row in times.rows] == ["2 of 2"] * 4
        assert len(by_definition.rows) == 2
        # The faster trial of a study has the smaller rate.
        rates = [[s["optimizer.lr"] for s in trial_settings(benchmark.tuning, "sgd", i)]
                 for i in (0, 1)]  # fmt: skip
        want = sum(1 + 10 * min(each) for each in rates) / 2
        assert result.trials[TASKS[0]]["sgd"] == pytest.approx(want)


@pytest.mark.parametrize("name", quick_if("contest".__eq__, ["pilot", "contest"]))
def test_the_first_trial_of_each_optimizer_composes(name):
    setup.run_problems()
    benchmark = schema.load(name)
    tuning = benchmark.tuning
    assert tuning.labels.keys() == tuning.space.keys() == set(benchmark.axes["optimizer"])
    runs = TuningRuns(benchmark, tuning, "runs/test", SimpleNamespace())
    for task in benchmark.axes["task"][:1]:
        for optimizer in benchmark.axes["optimizer"]:
            point = {"task": task, "optimizer": optimizer}
            runs.check(point, trial_settings(tuning, optimizer)[0])


MODELS = {
    "fashion_mixer": ("Mixer", 10),
    "manpages_bert": ("model", 15),
    "dates_lstm": ("Translator", 6),
    "poisson": ("network", 4),
}
"""The function that builds the model, and how many layers K-FAC covers."""


@pytest.mark.parametrize("name", MODELS)
def test_a_held_out_problem_is_frozen_and_covered(name):
    path = Path("benchmarks/contest/problems") / f"{name}.py"
    config = yaml.safe_load((setup.CONF / f"experiment/heldout/{name}.yaml").read_text())
    assert config["data"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert {config[group]["file"] for group in ("data", "model", "task")} == {str(path)}
    build, layers = MODELS[name]
    model = runpy.run_path(str(path))[build]()
    assert len(find_layers(model, skip=["Norm"])[0]) == layers


def test_a_pilot_centres_the_ranges(lab):  # noqa: F811
    benchmark = contest()
    store = lab.store()
    with pytest.raises(UsageError, match="digits/resnet, sgd: trials are missing; run study first"):
        spaces.centred(benchmark, store)
    lab.study(benchmark)
    best = min(
        s["optimizer.lr"] for i in (0, 1) for s in trial_settings(benchmark.tuning, "sgd", i)
    )
    low, high = spaces.centred(benchmark, lab.store())["sgd"]["optimizer.lr"]["log"]
    assert low == pytest.approx(max(0.01, best / 1.5), rel=0.05)
    assert high == pytest.approx(best * 1.5, rel=0.05)


# ---- interpolation ----


def record(*evaluations):
    """Return a run with evaluations (step, seconds, metric), whose last one meets the target."""
    begin = RunStarted(0, 0.0, "run", "loss", False, {"trainer": {"target": 1.0}}, {})
    events = [Evaluated(step, s, 0.0, {"loss": value}) for step, s, value in evaluations]
    step, seconds, value = evaluations[-1]
    return SimpleNamespace(
        events=[begin, *events, TargetReached(step, seconds, "loss", value, 1.0)]
    )


def test_the_target_is_met_between_two_evaluations():
    run = record((0, 0.0, 3.0), (10, 2.0, 2.0), (20, 4.0, 0.0))
    assert reached(run) == Reached(15.0, 3.0)


@pytest.mark.parametrize("before", [math.nan, INF, 0.5])
def test_without_a_finite_value_before_the_evaluation_counts(before):
    assert reached(record((10, 2.0, before), (20, 4.0, 0.0))) == Reached(20.0, 4.0)
    assert reached(record((20, 4.0, 0.0))) == Reached(20.0, 4.0)


def test_a_missed_target_is_infinite():
    run = record((0, 0.0, 3.0), (10, 2.0, 2.0))
    run.events = run.events[:-1]
    assert reached(run) == Reached(INF, INF)


# ---- definitions ----

TIMES = {
    "one": {"a": 1.0, "b": 2.0, "c": INF},
    "two": {"a": 3.0, "b": 1.0, "c": 1.0},
    "three": {"a": 1.0, "b": 1.0, "c": 1.4},
}


def test_the_definitions():
    assert performance_profile.scores(TIMES)["a"] == pytest.approx((1 + 1 / 3 + 1) / 3)
    assert performance_profile.scores(TIMES, 1.5)["c"] == pytest.approx((0 + 1 + 0.2) / 3)
    geometric = definitions.geometric_mean(TIMES)
    assert geometric["a"] == pytest.approx(3 ** (-1 / 3))
    assert geometric["c"] == pytest.approx((4 * 1 * 1.4) ** (-1 / 3))
    ranks = definitions.mean_rank(TIMES)
    assert ranks == pytest.approx({"a": -(1 + 3 + 1.5) / 3, "b": -5 / 3, "c": -(3 + 1.5 + 3) / 3})
    assert definitions.without_best_tasks(TIMES)["a"] == pytest.approx(1 / 3)
    best = definitions.best_trials({"one": {"a": {1: [3.0, 2.0], 2: [INF, 4.0], 3: [9.0]}}})
    assert best == {"one": {"a": 4.0}}


def test_the_table_names_ranks():
    table = definitions.table(TIMES, TIMES, TIMES)
    assert len(table.columns) == 9
    assert [row[0] for row in table.rows] == ["b", "a", "c"]
    assert table.rows[0][1].endswith("(1)")
