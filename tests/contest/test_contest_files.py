"""The contest's files compose, and the package refuses its options."""

import pytest

from kfac_bench import cli
from kfac_bench.benchmark import local_runs, schema
from kfac_bench.config import conf_files


def test_a_forked_run_has_the_optimizers_of_the_contest(tmp_path):
    words = ["optimizer=kl_soap", "kfac=none", "trainer.max_steps=1", "logger=none"]
    assert local_runs.train_forked([*words, f"runs_dir={tmp_path}"])[0] == 0


def test_the_package_refuses_results_and_names_the_contest(monkeypatch, capsys):
    monkeypatch.setattr(conf_files, "ADDED", [])
    with pytest.raises(SystemExit) as caught:
        cli.bench(["run", "demo", "--results", "r"])
    said = capsys.readouterr().err.strip()
    assert (caught.value.code, len(said.splitlines())) == (2, 1)
    assert "python -m benchmarks.contest run demo --results" in said


def test_a_benchmark_has_the_values_of_the_one_that_it_extends():
    pilot, contest = schema.load("pilot"), schema.load("contest")
    assert contest.tuning.labels == pilot.tuning.labels | {"adam": "Adam at 0.001, not tuned"}
    assert (contest.tuning.trials, pilot.tuning.trials) == (6, 12)
    assert contest.axes["task"] != pilot.axes["task"]
