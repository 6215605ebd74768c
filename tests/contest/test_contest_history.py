"""Kept results: their commits, held-out tasks that nobody met too early, and studies' winners."""

import math
import subprocess
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from benchmarks.contest import packed_runs
from benchmarks.contest.interpolated import reached
from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.sitting import ALL
from benchmarks.contest.spaces import centred, factors
from benchmarks.contest.studies import PART
from kfac_bench.benchmark import schema, suite
from kfac_bench.record.events import RunStarted

ROOT = Path(__file__).parents[2]


def is_ancestor(older, newer):
    command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", older, newer]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def has_history(commit):
    command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def is_shallow():
    command = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() != "false"


def commits(store, tasks, kinds, but=""):
    """The commits of kept runs. With "+changes" a name would be no commit."""
    return {
        event.environment["git_commit"].removesuffix(but)
        for task in tasks
        for kind in kinds
        for run in store.runs(task, kind)
        for event in run.events
        if isinstance(event, RunStarted)
    }


@pytest.mark.parametrize("name", suite.CLAIMS)
def test_the_kept_runs_of_a_claim_have_commits_of_the_history(name):
    store = ResultStore(ROOT / "benchmarks/results", name, "table", [ALL])
    found = commits(store, [ALL], ("table",))
    assert found
    if not all(map(has_history, found)) and is_shallow():
        pytest.skip("the history is not here: a shallow clone, or no clone")
    assert all(is_ancestor(commit, "HEAD") for commit in found)


def test_no_optimizer_met_a_held_out_task_before_it_was_frozen():
    contest = schema.load("contest")
    (frozen,) = {*contest.frozen.values()}
    if not has_history(frozen) and is_shallow():
        pytest.skip("the history is not here: a shallow clone, or no clone")
    store = ResultStore(ROOT / "benchmarks/results", "contest", PART, contest.axes["task"])
    # In a clone of a commit with packed results, the study writes these: git counts changes.
    found = commits(store, contest.held_out, ("trial", "final", "table"), but="+changes")
    assert found
    assert all(is_ancestor(frozen, commit) for commit in found)
    assert not is_ancestor(frozen, f"{frozen}~1")  # the check can fail


def test_the_ranges_are_those_that_the_pilot_gives():
    pilot, contest = schema.load("pilot"), schema.load("contest")
    store = ResultStore(ROOT / "benchmarks/results", "pilot", PART, pilot.axes["task"])
    for optimizer, ranges in centred(pilot, store).items():
        given = contest.tuning.space[optimizer]
        for option, values in ranges.items():
            assert given[option] == values, (optimizer, option)


@pytest.mark.parametrize("name", ["pilot", "contest"])
def test_a_file_has_each_run_once(name):
    for path in (ROOT / "benchmarks/results" / name).rglob("*.gz"):
        again = Counter(run.key for run in packed_runs.read(path))
        assert max(again.values()) == 1, path


def test_the_table_has_the_winner_of_each_study():
    contest = schema.load("contest")
    store = ResultStore(ROOT / "benchmarks/results", "contest", PART, contest.axes["task"])
    other = []
    for task in contest.axes["task"]:
        speed = factors(store.runs(task, "baseline"))

        def seconds(run, speed=speed):
            return reached(run).seconds * speed.get(run.sitting, 1.0)

        trials, finals = store.runs(task, "trial"), store.runs(task, "final")
        for run in store.runs(task, "table"):
            seed = contest.tuning.seeds[contest.seeds.index(run.seed)]
            medians = {}
            mine = (t for t in trials if (t.optimizer, t.seed) == (run.optimizer, seed))
            for trial in sorted(mine, key=seconds)[:3]:
                more = (
                    final
                    for final in finals
                    if (final.optimizer, final.seed // 1000) == (run.optimizer, seed)
                    and final.settings == trial.settings
                )
                times = [*map(seconds, (trial, *more))]
                medians[str(trial.settings)] = median(times)
                assert len(times) == (1 if times[0] == math.inf else 3)
            # Without any trial that met the target, the best metric decides.
            if min(medians.values()) == math.inf:
                continue
            if str(run.settings) != min(medians, key=medians.get):
                other.append((task, run.optimizer, run.seed))
    # The page tells of these: the scale of the sitting changed between trials and finalists.
    assert other == [("heldout/poisson", name, 13) for name in ("eigen_adam", "muon")]
