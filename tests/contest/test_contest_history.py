"""The kept results of the contest: no optimizer met a held-out task before it was frozen."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.contest.result_store import ResultStore
from kfac_bench.benchmark import schema
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


@pytest.mark.parametrize(("part", "kind"), [("tuning", "trial"), ("table", "table")])
def test_a_frozen_rule_met_held_out_tasks_after_its_commit_only(part, kind):
    contest = schema.load("contest")
    frozen = contest.frozen["eigen_adam"]
    if not has_history(frozen):
        pytest.skip("the history is not here: a shallow clone, or no clone")
    store = ResultStore(ROOT / "benchmarks/results", "contest", part, contest.axes["task"])
    commits = {
        event.environment["git_commit"].partition("+")[0]  # without "+changes"
        for task in contest.held_out
        for run in store.runs(task, kind)
        if run.optimizer == "eigen_adam"
        for event in run.events
        if isinstance(event, RunStarted)
    }
    assert all(is_ancestor(frozen, commit) for commit in commits)
    assert not is_ancestor(frozen, f"{frozen}~1")  # the check can fail
