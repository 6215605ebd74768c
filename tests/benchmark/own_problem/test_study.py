"""The decisions of kfac-bench try: equal seconds, early stops, finalists; nothing runs twice.

The runs here are event files that a stand-in for kfac-train writes at once. test_try.py trains.
"""

import copy
import functools
import io
import math
import re
import shutil
import types
from dataclasses import replace

import pytest

from kfac_bench.benchmark import local_runs, schema, suite, tune
from kfac_bench.benchmark import trials as trials_of_tuning
from kfac_bench.benchmark.own_problem import answer, first_runs, study, study_input, study_plan
from kfac_bench.benchmark.own_problem.leaderboard import Leaderboard
from kfac_bench.benchmark.own_problem.study_input import Asked
from kfac_bench.benchmark.own_problem.study_plan import (
    MeasuredSeconds,
    Question,
    StudyFolder,
    StudyPlan,
)
from kfac_bench.config import compose, problem_file
from kfac_bench.errors import UsageError
from kfac_bench.record.event_log import EventLog, JsonlSink
from kfac_bench.record.events import Evaluated, RunEnded, RunStarted, TargetReached, Trained
from kfac_bench.training.run_directory import RunDirectory
from tests.benchmark.own_problem.problem_text import written
from tests.support.configs import quick_load
from tests.support.quick import slow

NAMES = ("sgd", "adamw", "eigen_adam")
SEEDS = 5
MADE = study_plan.budget_of(30, MeasuredSeconds(0.01, 0.02, 1, 10), len(NAMES), SEEDS)
QUESTION = Question("0", "", ",".join(NAMES), 30.0, 1, SEEDS)
COST = {"sgd": 0.5, "adamw": 0.6, "eigen_adam": 0.2}
"""Seconds to target by optimizer, in limits, for a setting that is right."""


def own_time_s(config, limit_s):
    """Return the seconds to target; learning rates far from 0.003 take longer."""
    off = abs(math.log(config.optimizer.lr / 0.003))
    return limit_s * COST[config.optimizer.name] * (1 + 0.3 * off + 0.02 * (config.seed % 7))


class Simulation:
    """A study of simulated runs: ``runs`` lists them, ``fate`` may end them in another way."""

    def __init__(self, file, path):
        shortened = {n: study_input.candidates(n, has_likelihood=True)[:4] for n in NAMES}
        self.asked = Asked(file, [], 30.0, 1, SEEDS, 0.93, shortened)
        self.folder = StudyFolder(path, QUESTION)
        self.runs, self.output = [], io.StringIO()
        self.fate = self.slower = None
        self.clock_s = 0.0

    def study(self):
        """Run what is left of the study."""
        with pytest.MonkeyPatch.context() as patch, self.folder.locked():
            patch.setattr(compose, "load", load)
            patch.setattr(local_runs, "train_forked", self.train)
            clock = types.SimpleNamespace(monotonic=lambda: self.clock_s)
            patch.setattr(trials_of_tuning, "time", clock)
            if self.folder.plan() is None:
                self.folder.write_plan(StudyPlan(MADE, 0.93, is_own_target=False))
            with Leaderboard(self.asked, self.output) as board:
                return study.run(self.asked, self.folder, board)

    @property
    def said(self):
        """The lines that the study has printed."""
        return self.output.getvalue().splitlines()

    def train(self, overrides):
        """Write the events of a run."""
        config = compose.load(overrides)
        name, limit_s = config.optimizer.name, config.trainer.max_train_s
        self.runs.append((name, config.seed, limit_s, config.optimizer.lr))
        time_s = own_time_s(config, MADE.limit_s) * (self.slower(config) if self.slower else 1)
        end = self.fate(len(self.runs), config) if self.fate else None
        if end is not None:
            return end
        path = RunDirectory(config).path
        (path / "checkpoints").mkdir(parents=True)
        last_s = min(time_s, limit_s)
        self.clock_s += last_s
        log = EventLog([JsonlSink(path / "events.jsonl")])
        about = {"label": config.label, "seed": config.seed, "data": {"file": self.asked.file}}
        about |= {"optimizer": vars(config.optimizer), "trainer": vars(config.trainer)}
        log.emit(RunStarted(0, 0.0, "r", "accuracy", True, about, {}))
        stages = {"ReduceFactors": 1e-3, "ShareGradients": 1e-3, "Decompose": 1e-3}
        stages = stages if config.kfac.enabled else {}
        for share in (0, 0.5, 1):
            at_s = share * last_s
            log.emit(Trained(round(100 * at_s), at_s, 0, 1.0, 0.1, 1.0, stage_mean_s=stages))
            metric = {"accuracy": 0.93 * at_s / time_s}
            log.emit(Evaluated(round(100 * at_s), at_s, 0, metric))
        if time_s <= limit_s:
            log.emit(TargetReached(round(100 * last_s), last_s, "accuracy", 0.93, 0.93))
        log.emit(RunEnded(round(100 * last_s), last_s, "finished"))
        log.close()
        return 0, ""


@functools.cache
def _loaded(words):
    return quick_load(problem_file.expand(words))


def load(words):
    """Compose quickly; each caller gets a configuration of its own."""
    return copy.deepcopy(_loaded(tuple(words)))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return the path of a problem that the command line has named."""
    path = written(tmp_path_factory.mktemp("problem"))
    problem_file.run_named([f"problem={path}"])
    return path


@pytest.fixture(scope="module")
def done(file, tmp_path_factory):
    """Return a simulation and its finished study, for tests that only read."""
    simulation = Simulation(file, tmp_path_factory.mktemp("study") / "try")
    return simulation, simulation.study()


@pytest.fixture
def simulation(file, tmp_path):
    """Return a simulation that a test may change."""
    return Simulation(file, tmp_path / "try")


def test_every_optimizer_gets_the_same_seconds(done):
    simulation, found = done
    for name, trials in found.trials.items():
        spent_s = sum(t.train_s for t in trials)
        assert spent_s <= MADE.tune_s * 1.0001, name
        best_s = min(t.time_s for t in trials)
        is_spent = MADE.tune_s - spent_s < study.WORTH * min(best_s, MADE.limit_s)
        assert is_spent or len(trials) == len(simulation.asked.candidates[name]), name
        assert len(trials) >= 2


def test_trials_take_turns_and_stop_when_they_cannot_win(done):
    simulation, found = done
    tuning = [run for run in simulation.runs if run[1] == first_runs.TUNING_SEED]
    assert [name for name, *_ in tuning[:6]] == [*NAMES, *NAMES]
    for trials in found.trials.values():
        best_s = math.inf
        for trial in trials:
            assert trial.train_s <= min(best_s, MADE.limit_s) * 1.0001
            best_s = min(best_s, trial.time_s)


def test_hopeless_trials_stop_so_that_a_slow_optimizer_has_more_of_them(simulation):
    simulation.slower = lambda config: 0.05 if config.optimizer.name == "eigen_adam" else 100
    trials = simulation.study().trials
    best_s = min(t.time_s for t in trials["eigen_adam"])
    for name in ("sgd", "adamw"):
        assert len(trials[name]) == len(simulation.asked.candidates[name])
        assert trials[name][0].train_s == pytest.approx(MADE.limit_s)
        assert all(t.train_s >= 0.999 * study.HOPELESS * best_s for t in trials[name])
        assert all(t.train_s < 0.2 * MADE.limit_s for t in trials[name][1:])


def test_winners_run_on_fresh_seeds_in_turns(done):
    simulation, found = done
    finals = [(name, seed) for name, seed, *_ in simulation.runs if seed != first_runs.TUNING_SEED]
    names = list(found.finals)
    assert names[0] == "adamw"
    assert "eigen_adam" in names
    assert finals == [(name, seed) for seed in range(SEEDS) for name in names]
    for name, results in found.finals.items():
        assert {tuple(r.settings.items()) for r in results} == {
            tuple(found.winners[name].settings.items())
        }
    assert not list(simulation.folder.path.rglob("checkpoints"))


def test_the_best_settings_run_on_more_seeds_and_their_medians_decide(simulation):
    rates = [each["optimizer.lr"] for each in simulation.asked.candidates["adamw"]]
    lucky, second = sorted(rates, key=lambda lr: abs(math.log(lr / 0.003)))[:2]

    def slower(config):
        is_lucky = config.optimizer.name == "adamw" and config.optimizer.lr == lucky
        return 0.1 * (1.9 if is_lucky and config.seed != first_runs.TUNING_SEED else 1)

    simulation.slower = slower
    found = simulation.study()
    assert found.winners["adamw"].settings["optimizer.lr"] == second
    tuning = [run for run in simulation.runs if run[1] >= first_runs.TUNING_SEED]
    for name, trials in found.trials.items():
        assert sum(t.train_s for t in trials) <= MADE.tune_s
        again = [(run[3], run[1]) for run in tuning if run[0] == name][-2 * study.REPEATED :]
        assert len(set(again)) == 2 * study.REPEATED
        assert {seed for _, seed in again} == set(study.REPEAT_SEEDS)
        times_s = sorted(
            t.time_s
            for t in trials
            if t.settings["optimizer.lr"] == found.winners[name].settings["optimizer.lr"]
        )
        assert found.winners[name].time_s == times_s[1]


def test_the_time_left_is_what_is_left(done):
    simulation, found = done
    last_of_tuning = [line for line in simulation.said if line.startswith("[tuning]")][-1]
    minutes = float(re.search(r"about (\d+) min left", last_of_tuning)[1])
    finals_s = sum(r.train_s for results in found.finals.values() for r in results)
    assert 60 * minutes == pytest.approx(finals_s, rel=0.2)
    assert simulation.said[-1].endswith("about 0 s left")


def test_the_verdict_of_the_study(done, monkeypatch):
    simulation, found = done
    monkeypatch.setattr(compose, "load", load)
    path = simulation.folder.path
    text = answer.write(simulation.asked, found, path, is_quick=False)
    assert text.startswith("mine: accuracy 0.93 is reached by\n  EigenAdam  ")
    assert "x faster than AdamW" in text
    assert "67 % of the time of K-FAC's stages is communication." in text
    assert "optimizer = eigen_adam(model, lr=" in text
    page = (path / "verdict.html").read_text()
    assert "Does K-FAC help on mine?" in page
    assert "x faster than AdamW" in page
    assert (path / "verdict.txt").read_text() == text + "\n"


def test_a_run_that_ended_at_its_last_step_did_not_have_the_whole_limit(done, monkeypatch):
    simulation, found = done
    monkeypatch.setattr(compose, "load", load)
    first, *others = found.finals["adamw"]
    missed = replace(first, key=(math.inf, 0.1), train_s=0.5)
    cut = replace(found, finals={**found.finals, "adamw": [missed, *others]})
    whole, shorter = (
        answer.try_result(simulation.asked, each, is_quick=False).reference for each in (found, cut)
    )
    assert whole.limit_s > shorter.limit_s == shorter.least_s == 0.5


def test_a_study_starts_from_the_settings_of_another(done):
    simulation, found = done
    starts = study_input.starts_from(simulation.folder.path)
    assert starts.keys() == set(NAMES)
    for name in found.finals:
        won = found.winners[name].settings["optimizer.lr"]
        assert starts[name]["optimizer.lr"] == won
        first = study_input.candidates(name, has_likelihood=True, start=starts[name])[0]
        assert first["optimizer.lr"] == won
        assert first["optimizer"] == name


@pytest.mark.slow
@pytest.mark.parametrize("stops_at", [4, 14])
def test_an_interrupted_study_makes_the_same_runs(done, simulation, stops_at):
    whole, found = done
    simulation.fate = lambda number, config: (143, "stopped") if number == stops_at else None
    with pytest.raises(KeyboardInterrupt):
        simulation.study()
    simulation.fate = None
    again = simulation.study().finals
    assert simulation.runs[:stops_at] + simulation.runs[stops_at + 1 :] == whole.runs
    assert {n: [r.time_s for r in rs] for n, rs in again.items()} == {
        n: [r.time_s for r in rs] for n, rs in found.finals.items()
    }
    runs = list(simulation.runs)
    simulation.study()
    assert simulation.runs == runs, "a finished study runs nothing"


@pytest.mark.slow
def test_crashes_are_misses_with_their_reasons_and_the_study_goes_on(simulation, monkeypatch):
    line = "kfac: there is no layer to precondition"

    def fate(number, config):
        if config.kfac.enabled:
            return 2, line
        return (1, "out of memory") if number == 1 else None

    simulation.fate = fate
    found = simulation.study()
    assert len(found.trials["eigen_adam"]) == study.CRASHES
    assert line in found.trials["eigen_adam"][0].reason
    assert math.isinf(found.winners["eigen_adam"].time_s)
    assert "out of memory" in found.trials["sgd"][0].reason
    assert math.isfinite(found.winners["sgd"].time_s), "a single crash does not end an optimizer"
    assert list(found.finals) == ["adamw", "sgd"]
    monkeypatch.setattr(compose, "load", load)
    text = answer.write(simulation.asked, found, simulation.folder.path, is_quick=False)
    assert (
        f"Not run on fresh seeds: EigenAdam: missed the target in tuning (kfac-train: {line}"
        in text
    )


@pytest.mark.slow
def test_seeds_that_take_too_long_are_left_out(simulation, monkeypatch):
    simulation.slower = lambda config: 1 if config.seed == first_runs.TUNING_SEED else 2.9
    found = simulation.study()
    assert {len(results) for results in found.finals.values()} <= {3, 4}
    monkeypatch.setattr(compose, "load", load)
    text = answer.write(simulation.asked, found, simulation.folder.path, is_quick=False)
    assert f"of {SEEDS} seeds fit into the budget." in text


@pytest.mark.parametrize(
    ("begins", "best", "higher_is_better", "target"),
    [
        (0.1, 0.99996, True, 0.9999),
        (0.1, 0.93, True, 0.93),
        (2.0, 1.23444e-5, False, 1.235e-5),
        (math.nan, 0.93, False, 0.93),
        (-2.0, -1.23456, True, -1.235),
        (1.0, 0.0, False, 0.0),
        # The untrained model must not meet the target.
        (1000.4, 1000.1, False, 1000.1),
        (0.99991, 0.99996, True, 0.99996),
    ],
)
def test_adamw_has_reached_the_target_that_its_metric_fixes(begins, best, higher_is_better, target):
    assert first_runs.rounded(best, begins, higher_is_better=higher_is_better) == target
    assert best >= target if higher_is_better else best <= target


# ---- the folder ----


def test_a_study_continues_only_with_the_same_question(tmp_path):
    plan = StudyPlan(MADE, 0.9, is_own_target=True)
    StudyFolder(tmp_path, QUESTION).write_plan(plan)
    assert StudyFolder(tmp_path, QUESTION).plan() == plan
    for changed, words in (
        ({"sha256": "1"}, "another version of the file"),
        ({"minutes": 5.0}, "minutes=30.0, not 5.0"),
    ):
        other = Question(**(vars(QUESTION) | changed))
        with pytest.raises(UsageError, match=words):
            StudyFolder(tmp_path, other).plan()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"question": 3}', "\xff"])
def test_a_damaged_plan_is_one_line(tmp_path, text):
    (tmp_path / "try.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="Delete") as caught:
        StudyFolder(tmp_path, QUESTION).plan()
    assert "\n" not in str(caught.value)


def test_two_commands_cannot_run_one_study(tmp_path):
    with (
        StudyFolder(tmp_path, QUESTION).locked(),
        pytest.raises(UsageError, match="another command runs this study"),
        StudyFolder(tmp_path, QUESTION).locked(),
    ):
        pass


def test_a_file_is_no_folder_of_a_study(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match="cannot write here"),
        StudyFolder(tmp_path / "file", QUESTION).locked(),
    ):
        pass


@pytest.mark.parametrize("linked", ["tuning", "final/trial", "reference"])
def test_a_study_removes_no_checkpoints_through_a_link(simulation, tmp_path, linked):
    """A study folder from somebody else may link to another run, whose checkpoints must stay."""
    weights = tmp_path / "mine" / "checkpoints" / "weights"
    weights.parent.mkdir(parents=True)
    weights.touch()
    (link := simulation.folder.path / linked).parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match=f"{linked}: is a link"):
        simulation.study()
    assert weights.exists()


@pytest.mark.slow
def test_a_trial_that_links_to_another_run_keeps_its_checkpoints(simulation, tmp_path):
    simulation.study()
    trial = next(simulation.folder.runs_dir("tuning").iterdir())
    trial.rename(tmp_path / "mine")
    trial.symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="is a link"):
        simulation.study()
    assert (tmp_path / "mine" / "checkpoints").is_dir()


def test_a_study_removes_its_own_first_runs_alone(tmp_path):
    """The user may name a folder that holds files of another purpose under the same names."""
    paper = tmp_path / "reference" / "papers" / "kfac.pdf"
    paper.parent.mkdir(parents=True)
    paper.touch()
    (tmp_path / "speed" / "first").mkdir(parents=True)
    StudyFolder(tmp_path, QUESTION).remove_first_runs()
    assert paper.exists()
    assert not (tmp_path / "speed").exists()


# ---- the spaces ----


@pytest.mark.parametrize(
    "optimizer", ["kfac", *(slow(n) for n in study_input.choose(None) if n != "kfac")]
)
def test_every_setting_composes(optimizer):
    made = study_input.candidates(optimizer, has_likelihood=True)
    assert len(made) >= 8
    for settings in made:
        words = [f"{k}={'null' if v is None else v}" for k, v in settings.items()]
        config = quick_load(["model=autoencoder", "task=reconstruction", *words])
        assert config.kfac.enabled == ("kfac" in optimizer or optimizer == "eigen_adam")


def test_the_spaces_are_no_table_to_run_or_to_tune(tmp_path):
    with pytest.raises(UsageError, match="try has no cells: kfac-bench try makes its runs"):
        suite.row("try", None)
    with pytest.raises(UsageError, match="no tuning section for this command; choose one of cl"):
        tune.check(schema.load("try"), tmp_path)


def test_labels_are_drawn_only_with_a_likelihood():
    with_it = study_input.candidates("kfac", has_likelihood=True)
    without = study_input.candidates("kfac", has_likelihood=False)
    first, *others = with_it
    assert first["kfac.fisher"] == "empirical"  # the default of KFAC
    assert {each["kfac.fisher"] for each in others} == {"mc"}
    assert not any("kfac.fisher" in each for each in without)


def test_settings_of_another_study_are_not_trusted(tmp_path):
    config = {"label": "AdamW", "optimizer": {"lr": "${oc.env:HOME}", "beta2": 0.5}}
    path = tmp_path / "tuning" / "r"
    path.mkdir(parents=True)
    log = EventLog([JsonlSink(path / "events.jsonl")])
    log.emit(RunStarted(0, 0.0, "r", "accuracy", True, config, {}))
    log.emit(Evaluated(0, 0.0, 0, {"accuracy": 0.1}))
    log.close()
    assert study_input.starts_from(tmp_path) == {"adamw": {"optimizer.beta2": 0.5}}
    with pytest.raises(UsageError, match="no study of kfac-bench try"):
        study_input.starts_from(path)


def test_the_better_metric_is_a_start_if_all_trials_missed_the_target(tmp_path):
    """A trial that never had a finite metric is the last choice, whichever way is better."""
    for number, metric in enumerate((math.nan, 0.5, 0.2, 0.9)):
        path = tmp_path / "tuning" / f"{number}"
        path.mkdir(parents=True)
        log = EventLog([JsonlSink(path / "events.jsonl")])
        config = {"label": "AdamW", "optimizer": {"lr": metric}, "trainer": {"target": 0.1}}
        log.emit(RunStarted(0, 0.0, "r", "loss", False, config, {}))
        log.emit(Evaluated(0, 0.0, 0, {"loss": metric}))
        log.close()
    assert study_input.starts_from(tmp_path) == {"adamw": {"optimizer.lr": 0.2}}
    for number in (1, 2, 3):
        shutil.rmtree(tmp_path / "tuning" / f"{number}")
    with pytest.raises(UsageError, match="no run of this study can be read"):
        study_input.starts_from(tmp_path)
