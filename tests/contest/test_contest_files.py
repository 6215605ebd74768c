"""The contest's files compose, and only its commands keep results."""

import pytest

from benchmarks.contest.__main__ import build_parser
from kfac_bench.benchmark import local_runs, schema
from kfac_bench.cli import bench_command


def test_a_forked_run_has_the_optimizers_of_the_contest(tmp_path):
    words = ["optimizer=kl_soap", "kfac=none", "trainer.max_steps=1", "logger=none"]
    assert local_runs.train_forked([*words, f"runs_dir={tmp_path}"])[0] == 0


def test_the_help_of_run_lists_the_option_that_only_the_contest_has(capsys):
    for parser, has_results in ((build_parser(), True), (bench_command.build_parser(), False)):
        with pytest.raises(SystemExit):
            parser.parse_args(["run", "--help"])
        assert ("--results" in capsys.readouterr().out) is has_results


def test_a_benchmark_has_the_values_of_the_one_that_it_extends():
    pilot, contest = schema.load("pilot"), schema.load("contest")
    assert contest.tuning.labels == pilot.tuning.labels | {"adam": "Adam at 0.001, not tuned"}
    assert (contest.tuning.trials, pilot.tuning.trials) == (6, 12)
    assert contest.axes["task"] != pilot.axes["task"]
