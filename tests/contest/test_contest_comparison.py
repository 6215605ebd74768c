"""Two contests beside each other: the same seeds, and seconds of one machine."""

import math

import pytest

from benchmarks.contest.contest_tables import ContestResult, compared
from benchmarks.contest.packed_runs import PackedRun
from kfac_bench.benchmark.schema import Benchmark
from kfac_bench.errors import UsageError
from kfac_bench.record.events import RunEnded, TargetReached
from tests.contest.test_contest import command

TASK = "digits/resnet"


def run(seed, seconds, sitting="1", kind="table"):
    """Return a run that reaches the target after so many seconds, and then ends."""
    reached = [TargetReached(10, seconds, "x", 1.0, 1.0)] if math.isfinite(seconds) else []
    events = (*reached, RunEnded(10, seconds, "finished"))
    return PackedRun(f"run{seed}", kind, TASK, "sgd", seed, sitting, "", {}, events)


def contest(times, sitting="1", baseline_s=1.0, optimizer="SGD", steps=3):
    """Return the runs of one optimizer: seconds by seed."""
    runs = {TASK: {optimizer: [run(seed, t, sitting) for seed, t in times.items()]}}
    benchmark = Benchmark("A contest", {}, [], baseline=[f"trainer.max_steps={steps}"])
    return ContestResult(benchmark, runs, {TASK: [run(0, baseline_s, sitting, "baseline")]})


def row(ours, theirs):
    (only,) = compared(ours, "twice", theirs, "once").rows
    assert only[:2] == [TASK, "SGD"]
    return only[2:]


def test_only_seeds_in_both_count_and_seconds_are_scaled_to_the_earliest_sitting():
    theirs = contest({1: 2.0, 2: 4.0, 3: 6.0, 4: 99.0}, "1", baseline_s=1.0)
    ours = contest({1: 2.0, 2: 4.0, 3: 8.0}, "2", baseline_s=2.0)
    assert row(ours, theirs) == [3, 4.0, 2.0, 0.5]
    assert row(theirs, ours) == [3, 2.0, 4.0, 2.0]


def test_missed_targets():
    some, none = contest({1: 2.0}), contest({1: math.inf})
    assert row(none, some) == [1, 2.0, math.inf, math.inf]
    assert row(some, none) == [1, math.inf, 2.0, 0.0]
    assert row(none, none) == [1, math.inf, math.inf, None]


def test_nothing_in_common():
    for other in (contest({2: 1.0}), contest({1: 1.0}, optimizer="Adam")):
        with pytest.raises(UsageError, match="have no task, optimizer and seed in common"):
            compared(contest({1: 1.0}), "twice", other, "once")


def test_seconds_of_other_baselines_tell_nothing_of_the_machine():
    with pytest.raises(UsageError, match="twice and once have different baselines"):
        compared(contest({1: 1.0}), "twice", contest({1: 1.0}, steps=4), "once")


@pytest.mark.parametrize(("other", "code", "fragment"), [
    ("contest", 0, "**Compared with contest**"),
    ("embedded", 2, "no results of "),
])  # fmt: skip
def test_the_command(other, code, fragment, capsys):
    words = ["tables", "contest_self_tuned", "--results", "benchmarks/results", "--than", other]
    with pytest.raises(SystemExit) as caught:
        command(words)
    assert caught.value.code == code
    assert fragment in "".join(capsys.readouterr())
