"""kfac-bench tune: equal budgets, studies and trials; the early stop changes no result."""

import copy
import functools
import itertools
import math
import re
from unittest import mock

import pytest
import yaml

from kfac_bench.benchmark import grid, local_runs, trials, tune
from kfac_bench.benchmark.schema import Benchmark, Tuning
from kfac_bench.benchmark.trials import TrialResult
from kfac_bench.benchmark.tune import Search
from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from kfac_bench.training.run_directory import run_id
from tests.benchmark.test_bench import DEMO, small, write_run
from tests.support.quick import quick_if

INF = math.inf

# ---- trials ----


def test_every_optimizer_has_the_same_budget():
    tuning, optimizers = DEMO.tuning, DEMO.axes["optimizer"]
    assert tuning.space.keys() == set(optimizers)
    for study in range(len(tuning.seeds)):
        settings = {o: trials.trial_settings(tuning, o, study) for o in optimizers}
        assert {len(s) for s in settings.values()} == {tuning.trials}
    assert len(tuning.seeds) * tuning.trials >= 15
    assert not set(tuning.seeds) & set(DEMO.seeds), "tuned on the seeds of the table"
    ranges = [sum(isinstance(v, dict) for v in tuning.space[o].values()) for o in optimizers]
    assert min(ranges) >= 2, "nothing to tune"


@pytest.mark.parametrize("optimizer", DEMO.axes["optimizer"])
def test_trials_are_within_their_ranges_and_cover_them(optimizer):
    space, made = DEMO.tuning.space[optimizer], trials.trial_settings(DEMO.tuning, optimizer)
    assert made == trials.trial_settings(DEMO.tuning, optimizer), "not a function of the space"
    for key, option in space.items():
        values = [t[key] for t in made]
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
    assert all(t.keys() == space.keys() for t in made)


def test_trials_of_spaces_with_and_without_ranges():
    space = {"x": {"optimizer": "sgd"}, "y": {"optimizer.lr": {"linear": [0, 1]}}}
    tuning = Tuning(["experiment=digits/resnet"], 3, [1], space, "digits/{task}_{optimizer}")
    assert trials.trial_settings(tuning, "x") == [{"optimizer": "sgd"}] * 3
    with pytest.raises(UsageError, match="is no range"):
        trials.trial_settings(tuning, "y")


def test_ranges_reach_both_ends():
    ranges = {
        "optimizer.lr": {"uniform": [0.5, 1.5]},
        "kfac.update_freq": {"integer": [2, 4]},
        "optimizer.momentum": {"choice": [0.5, 0.9]},
    }
    tuning = Tuning(["experiment=digits/resnet"], 64, [1], {"x": ranges}, "e")
    made = trials.trial_settings(tuning, "x")
    rates = [t["optimizer.lr"] for t in made]
    assert 0.5 <= min(rates) < 0.55
    assert 1.45 < max(rates) <= 1.5
    assert 0.9 < sum(rates) / 64 < 1.1, "not spread evenly"
    counts = [[t["kfac.update_freq"] for t in made].count(n) for n in (2, 3, 4)]
    assert sum(counts) == 64
    assert min(counts) > 15
    assert {t["optimizer.momentum"] for t in made} == {0.5, 0.9}


def composed(tmp_path, name, text):
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)
    return compose.load([f"experiment={name}"], tmp_path / "conf")


def test_a_tuning_without_an_experiment_writes_its_own_words(tmp_path):
    words = ["model=resnet20", "trainer.max_steps=4", "data.mixup=0.2", "logger=none"]
    best = TrialResult({"optimizer": "adam", "kfac": "none", "optimizer.lr": 0.01}, 1, (1.5, 0.0))
    tuning = Tuning(words, 1, [1], {"adam": best.settings}, "mine_{optimizer}")
    point = {"optimizer": "adam"}
    each = {"optimizer": {"adam": ["trainer.batch_size=64"]}}
    benchmark = Benchmark("mine", axes={"optimizer": ["adam"]}, each=each, tuning=tuning)
    words = tune.words_of_trials(benchmark, tuning, point)
    text = tune.experiment_yaml(tuning, words, point, 1, best, [1.5])
    found = composed(tmp_path, "mine", text)
    assert (found.model.name, found.optimizer.name, found.kfac.enabled) == (
        "resnet20",
        "adam",
        False,
    )
    assert (found.trainer.max_steps, found.data.mixup, found.optimizer.lr) == (4, 0.2, 0.01)
    assert found.trainer.batch_size == 64
    each["optimizer"]["adam"].append("ranks=2")
    with pytest.raises(UsageError, match="ranks=2: trials run on one rank"):
        tune.words_of_trials(benchmark, tuning, point)


def test_a_tuning_of_an_experiment_writes_its_other_words_too(tmp_path):
    """Its rate is good with the schedule and the batch of the trials, not with the parent's."""
    words = ["experiment=digits/resnet", "schedule=cosine", "trainer.batch_size=64", "logger=none"]
    best = TrialResult({"optimizer": "adam", "kfac": "none", "optimizer.lr": 0.01}, 1, (1.5, 0.0))
    tuning = Tuning(words, 1, [1], {"adam": best.settings}, "mine_{optimizer}")
    text = tune.experiment_yaml(tuning, words, {"optimizer": "adam"}, 1, best, [1.5])
    found, parent = composed(tmp_path, "mine", text), compose.load(["experiment=digits/resnet"])
    assert (found.schedule.name, found.trainer.batch_size) == ("cosine", 64)
    assert (found.optimizer.lr, found.model) == (0.01, parent.model)
    assert parent.schedule.name != "cosine"
    assert parent.trainer.batch_size != 64


@pytest.mark.parametrize("task", DEMO.axes["task"])
@pytest.mark.parametrize("optimizer", DEMO.axes["optimizer"])
def test_the_best_trial_becomes_an_experiment(tmp_path, task, optimizer):
    point = {"task": task, "optimizer": optimizer}
    all_settings = trials.trial_settings(DEMO.tuning, optimizer)
    made = [TrialResult(s, 100, (math.inf, 0.5)) for s in all_settings]
    made[4] = TrialResult(all_settings[4], 100, (1.25, 0.0))
    search = Search(f"digits/{task}_{optimizer}", point, {100: made, 101: made[:4]})
    words = tune.words_of_trials(DEMO, DEMO.tuning, point)
    times = [1.25, math.inf]
    text = tune.experiment_yaml(DEMO.tuning, words, point, search.reached, made[4], times)
    found = composed(tmp_path, "tuned", text)
    parent = compose.load([f"experiment=digits/{task}"])
    assert (found.trainer, found.model, found.data) == (parent.trainer, parent.model, parent.data)
    assert found.kfac.enabled == (optimizer == "kfac")
    assert found.optimizer.name == ("adam" if optimizer == "adam" else "sgd")
    for key, value in all_settings[4].items():
        section, _, option = key.partition(".")
        if option:
            assert getattr(getattr(found, section), option) == value, key
    assert "best of 24 trials, 12 on each of the seeds\n# 100, 101, of which 1 reached" in text
    assert "1.25 s, missed" in text
    assert yaml.safe_load(text)["defaults"][-1] == "_self_"
    assert all(len(line) <= 100 for line in text.splitlines())


# ---- studies ----

SPACE = {
    "sgd": {"optimizer": "sgd", "kfac": "none", "optimizer.lr": {"choice": [0.1, 0.2, 0.3]}},
    "adamw": {"optimizer": "adamw", "kfac": "none", "optimizer.lr": {"choice": [0.1, 0.2]}},
}
TUNING = Tuning(
    ["experiment=digits/{task}", "logger=none"], 6, [1, 2], SPACE, "digits/{task}_{optimizer}"
)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Tune a small space; ``outcomes[(lr, seed)]`` is (best metric, seconds to target or None)."""
    out, runs, said = tmp_path / "out", [], []
    load = functools.lru_cache(None)(compose.load)
    out.mkdir()

    def run(outcomes, only="digits/resnet_sgd", **changes):
        def train(overrides):
            cell = grid.Cell("trial", tuple(overrides))
            config = compose.load(overrides)
            runs.append((config.optimizer.lr, config.seed, config.trainer.max_train_s))
            figure, seconds = outcomes[config.optimizer.lr, config.seed]
            limit = config.trainer.max_train_s or INF
            if figure is not None:
                write_run(cell, value=figure, hit_s=seconds if (seconds or 0) <= limit else None)
            return 0, ""

        monkeypatch.setattr(local_runs, "train_forked", train)
        monkeypatch.setattr(
            compose, "load", lambda overrides: copy.deepcopy(load(tuple(overrides)))
        )
        benchmark = small(tuning=TUNING, **changes)
        tune.tune(benchmark, str(tmp_path / "runs"), out, said.append, only)
        return yaml.safe_load((out / f"{only}.yaml").read_text())["optimizer"]["lr"]

    run.out, run.runs, run.said = out, runs, said
    return run


def lrs(study):
    return [t["optimizer.lr"] for t in trials.trial_settings(TUNING, "sgd", study)]


def test_the_winner_over_all_seeds_becomes_the_experiment(tuned):
    # 0.1 wins study 1, 0.2 study 2; on both seeds 0.2 takes 4 and 5 s, 0.1 takes 1 and 20
    outcomes = {(0.1, 1): (0.98, 1.0), (0.1, 2): (0.98, 20.0)}
    outcomes |= {(0.2, 1): (0.98, 4.0), (0.2, 2): (0.98, 5.0)}
    outcomes |= {(0.3, 1): (0.99, 6.0), (0.3, 2): (0.99, 6.0)}
    assert tuned(outcomes) == 0.2
    assert [str(p.relative_to(tuned.out)) for p in tuned.out.rglob("*.yaml")] == [
        "digits/resnet_sgd.yaml"
    ]
    folders = [path.name for path in (tuned.out.parent / "runs").iterdir()]
    # A trial may have been stopped, so the run of a winner on another seed has another name.
    assert [name.endswith("-trial") for name in sorted(folders)].count(True) == 6
    assert len(folders) == 8
    text = (tuned.out / "digits/resnet_sgd.yaml").read_text()
    assert "best of 12 trials, 6 on each of the seeds" in text
    assert "on these seeds: 4.00 s, 5.00 s." in text
    assert "median over seeds: 4.50 s" in "".join(tuned.said)
    table = next(line for line in tuned.said if line.startswith("**Tuning"))
    assert "| resnet | sgd | 3 | 1 | 5 |" in table  # the studies' bests: 1 s and 5 s


def test_a_trial_stops_when_the_best_of_its_study_would_have_ended(tuned):
    outcomes = {(lr, seed): (0.98, 10 * lr + seed) for lr in (0.1, 0.2, 0.3) for seed in (1, 2)}
    tuned(outcomes)
    for study, seed in enumerate((1, 2)):
        limit, done = None, set()
        for lr in lrs(study):
            if lr not in done:  # the same trial again is not run again
                assert tuned.runs.pop(0) == (lr, seed, limit)
            done.add(lr)
            limit = min(limit or INF, 10 * lr + seed)


def test_the_early_stop_changes_no_result(tuned):
    outcomes = {(0.1, 1): (0.98, 3.0), (0.2, 1): (0.98, 2.0), (0.3, 1): (0.98, 7.0)}
    outcomes |= {(0.1, 2): (0.98, 4.0), (0.2, 2): (0.98, 2.5), (0.3, 2): (0.98, 1.5)}
    tuned(outcomes)
    table = next(line for line in tuned.said if line.startswith("**Tuning"))
    # without stopping: the least of each seed, 2 and 1.5
    assert "| resnet | sgd | 1.75 | 1.5 | 2 |" in table


def test_the_time_limit_of_the_task_is_kept(tuned):
    outcomes = {(lr, seed): (0.98, 9.0) for lr in (0.1, 0.2, 0.3) for seed in (1, 2)}
    limited = ["experiment=digits/{task}", "logger=none", "trainer.max_train_s=5"]
    TUNING.overrides, before = limited, TUNING.overrides
    try:
        tuned(outcomes)
    finally:
        TUNING.overrides = before
    assert {limit for _, _, limit in tuned.runs} == {5}
    assert "inf" in next(line for line in tuned.said if line.startswith("**Tuning"))


def test_nothing_is_run_twice(tuned):
    outcomes = {(lr, seed): (0.98, 1 / lr) for lr in (0.1, 0.2, 0.3) for seed in (1, 2)}
    tuned(outcomes)
    assert tuned.runs
    tuned.runs.clear()
    first, tuned.said[:] = list(tuned.said), []
    assert tuned(outcomes) == 0.3
    assert tuned.runs == []
    trials = [line for line in first if line.startswith("[")]
    results = [line for line in first if line not in trials]
    assert tuned.said == [f"all {len(trials)} trials had finished before", *results]


def test_a_winner_that_misses_on_another_seed_loses(tuned):
    outcomes = {(0.1, 1): (0.98, 0.1), (0.1, 2): (0.969, None)}
    outcomes |= {(0.2, 1): (0.97, 50.0), (0.2, 2): (0.97, 60.0)}
    outcomes |= {(0.3, 1): (0.96, None), (0.3, 2): (0.98, 70.0)}
    assert tuned(outcomes) == 0.2


@pytest.mark.parametrize(
    ("best", "others"),  # the others are far off, have diverged, or have never started
    quick_if(
        ((0.1, 0.5), (0.2, None), (0.3, math.nan)).__contains__,
        itertools.product((0.1, 0.2, 0.3), (0.5, math.nan, None)),
    ),
)
def test_if_all_trials_miss_the_nearest_wins(tuned, best, others):
    outcomes = {(lr, seed): (others, None) for lr in (0.1, 0.2, 0.3) for seed in (1, 2)}
    outcomes |= {(best, 1): (0.9, None), (best, 2): (0.9, None)}
    assert tuned(outcomes) == best
    assert re.search(
        r"yaml: optimizer.lr=\S+ not reached.*, median over seeds: missed", "".join(tuned.said)
    )


def test_experiments_take_turns_and_several_tasks_have_profiles(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(local_runs, "train_forked", lambda overrides: (1, "no data"))
    tuning = Tuning(
        ["experiment=digits/{task}", "logger=none"], 2, [1], SPACE, "digits/{task}_{optimizer}"
    )
    tuning.labels = {"sgd": "SGD, ours"}
    tune.tune(small(tuning=tuning), str(tmp_path / "runs"), tmp_path, said.append)
    turns = [line.split()[0] for line in said if line.startswith("[")]
    assert turns == ["[1/2]"] * 4 + ["[2/2]"] * 4
    assert [line.split()[1] for line in said if line.startswith("[1/2]")] == [
        "digits/resnet_sgd",
        "digits/resnet_adamw",
        "digits/autoencoder_sgd",
        "digits/autoencoder_adamw",
    ]
    assert "| SGD, ours | 0 | 0 | inf | inf |" in said[-1]
    found = (tmp_path / "digits/resnet_sgd.yaml").read_text()
    assert yaml.safe_load(found)["label"] == "SGD, ours"


def test_studies_have_different_points():
    settings = [
        [t["optimizer.lr"] for t in trials.trial_settings(DEMO.tuning, "sgd", study)]
        for study in (0, 1)
    ]
    assert not set(settings[0]) & set(settings[1])


def test_tuning_refuses_wrong_requests(tmp_path, monkeypatch):
    benchmark = small(tuning=TUNING)
    with pytest.raises(UsageError, match="no such folder"):
        tune.tune(benchmark, "runs", tmp_path / "none", print)
    with pytest.raises(
        UsageError,
        match="--only x: no experiment begins with this text; there are digits/resnet_sgd",
    ):
        tune.tune(benchmark, "runs", tmp_path, print, "x")
    with pytest.raises(UsageError, match="no tuning section"):
        tune.tune(small(), "runs", tmp_path, print)
    monkeypatch.setattr(local_runs, "train_forked", lambda overrides: (2, "set data.root=FOLDER"))
    with pytest.raises(UsageError, match=r"optimizer.lr=.*: set data.root=FOLDER"):
        tune.tune(benchmark, str(tmp_path / "runs"), tmp_path, print)


# ---- real trials ----


@pytest.mark.slow
def test_real_trials_run_in_forks_and_write_an_experiment(tmp_path):
    """Train two trials of two studies, and their winners on the other seed."""
    easy = ["experiment=digits/{task}", "logger=none", "model.hidden=[16]", "trainer.target=8"]
    space = {"adam": {"optimizer": "adam", "optimizer.lr": {"log": [0.01, 0.03]}, "kfac": "none"}}
    tuning = Tuning(easy, 2, [1, 2], space, "digits/{task}_{optimizer}")
    axes = {"task": ["autoencoder"], "optimizer": ["adam"]}
    said = []
    tune.tune(small(axes=axes, tuning=tuning), str(tmp_path / "runs"), tmp_path, said.append)
    text = (tmp_path / "digits/autoencoder_adam.yaml").read_text()
    assert "missed" not in text
    assert len(list((tmp_path / "runs").iterdir())) == 2 * 2 + 2
    own = compose.load(["experiment=digits/autoencoder"]).optimizer
    assert 0.01 <= yaml.safe_load(text)["optimizer"]["lr"] <= 0.03 != own.lr


def test_a_fork_reports_its_error():
    code, said = local_runs.train_forked(["model=no_such"])
    assert code == 2
    assert said.startswith("model=no_such: no such model")


def test_a_fork_has_the_environment_of_its_caller(tmp_path, monkeypatch):
    """The server has the environment of its start. Loader processes are forks of the fork."""
    small = ["data=digits", "model=autoencoder", "model.hidden=[16]", "trainer.max_steps=2"]
    small += ["data.workers=1", "logger=none", f"runs_dir={tmp_path}"]
    for job in ("one", "two"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        assert local_runs.train_forked(small) == (0, mock.ANY)
        assert (tmp_path / run_id(compose.load(small), job)).is_dir()
