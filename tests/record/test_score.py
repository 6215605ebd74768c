"""score.py: event files in, exact numbers out."""

import cProfile
import itertools
import math
import pstats
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kfac_bench.errors import UsageError
from kfac_bench.record import runs, score
from kfac_bench.record.event_log import EventLog, JsonlSink
from kfac_bench.record.events import (
    Evaluated,
    Event,
    Resumed,
    RunEnded,
    RunStarted,
    TargetReached,
    parse,
)
from kfac_bench.record.score import notes
from tests.support.denied import deny_listing

INF = math.inf


def config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "resnet8"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "kfac": {"enabled": False, "damping": 0.003},
        "trainer": {"target": 0.97, "batch_size": 256},
        "seed": 0,
        "run_id": "a",
        "runs_dir": "runs",
    }
    for key, value in changes.items():
        section, _, option = key.partition("__")
        if option:
            base[section] = {**base[section], option: value}
        else:
            base[section] = value
    return base


def write_run(
    folder: Path,
    *events: Event,
    higher_is_better: bool = True,
    environment: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    folder.mkdir(parents=True)
    log = EventLog([JsonlSink(folder / "events.jsonl")])
    started = RunStarted(
        0, 0.0, folder.name, "accuracy", higher_is_better, config(**changes), environment or {}
    )
    for event in (started, *events):
        log.emit(event)
    log.close()
    return folder


def evaluated(step: int, train_s: float, value: float) -> Evaluated:
    return Evaluated(step, train_s, 1.0, {"accuracy": value, "loss": 5.0})


def reached(step: int, train_s: float) -> tuple[Event, ...]:
    return (
        evaluated(step, train_s, 0.98),
        TargetReached(step, train_s, "accuracy", 0.98, 0.97),
        RunEnded(step, train_s, "reached"),
    )


def test_a_run_that_reached_its_target(tmp_path: Path) -> None:
    run = runs.load(write_run(tmp_path / "a", evaluated(10, 1.5, 0.99), *reached(20, 3.25)))
    assert score.time_to_target_s(run) == 3.25
    assert score.steps_to_target(run) == 20
    assert score.final_metric(run) == 0.98
    assert score.best_metric(run) == 0.99
    assert score.status(run) == "reached"


def test_a_run_that_missed_is_infinite_and_not_dropped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", evaluated(10, 1.5, 0.9), RunEnded(10, 1.5, "finished"))
    run = runs.load(folder)
    assert score.time_to_target_s(run) == INF
    assert score.steps_to_target(run) == INF
    row = score.row(runs.group([run])[0])
    assert (row.seeds, row.reached, row.seconds) == (1, 0, score.Spread(INF, INF, INF))
    assert notes(runs.group([run])) == []


@pytest.mark.parametrize(
    ("higher_is_better", "later", "time_s"),
    [(True, 0.5, INF), (True, 0.97, 2.0), (True, 0.99, 2.0), (False, 1.5, INF), (False, 0.9, 2.0)],
)
def test_a_target_that_a_later_start_made_easier_does_not_count(
    tmp_path: Path, higher_is_better: bool, later: float, time_s: float
) -> None:
    """Tables name the target of the first start, which is 0.97."""
    hit = TargetReached(20, 2.0, "accuracy", later, later)
    options = {"trainer.target": later}
    events = (Resumed(10, 1.0, "checkpoint", {}, options), hit, RunEnded(20, 2.0, "reached"))
    run = runs.load(write_run(tmp_path / "a", *events, higher_is_better=higher_is_better))
    assert score.time_to_target_s(run) == time_s
    assert score.row(runs.group([run])[0]).reached == (time_s < INF)


def test_a_time_that_is_no_number_counts_as_missed(tmp_path: Path) -> None:
    event = TargetReached(1, math.nan, "accuracy", 0.98, 0.97)
    assert score.time_to_target_s(runs.load(write_run(tmp_path / "a", event))) == INF


def test_best_metric_of_an_error_is_the_smallest(tmp_path: Path) -> None:
    events = (evaluated(1, 1, 3.0), evaluated(2, 2, 1.0), evaluated(3, 3, math.nan))
    run = runs.load(write_run(tmp_path / "a", *events, higher_is_better=False))
    assert score.best_metric(run) == 1.0
    assert math.isnan(score.final_metric(run))


def test_no_evaluation_means_no_metric(tmp_path: Path) -> None:
    run = runs.load(write_run(tmp_path / "a"))
    assert math.isnan(score.final_metric(run))
    assert math.isnan(score.best_metric(run))


def test_events_that_a_resume_made_void_do_not_count(tmp_path: Path) -> None:
    events = (*reached(20, 3.0), Resumed(10, 1.5, "ckpt"), *reached(40, 6.0))
    assert score.time_to_target_s(runs.load(write_run(tmp_path / "a", *events))) == 6.0


def test_a_file_of_many_resumes_is_read_in_linear_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", evaluated(1, 1.0, 0.5), Resumed(1, 1.0, "ckpt"))
    started, *lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)

    def calls(count: int) -> int:
        profile = cProfile.Profile()
        profile.runcall(parse, started + count * "".join(lines), folder)
        return pstats.Stats(profile).total_calls

    calls(1)  # what is read once
    assert calls(400) < 5 * calls(100)


def test_load_takes_the_folder_or_the_file_and_resolves(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    assert runs.load(folder).path == runs.load(folder / "events.jsonl").path
    assert runs.load(tmp_path / "a" / ".." / "a").path == runs.load(folder).path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no RunStarted event"),
        ('{"event": "RunEnded", "step": 0, "train_s": 0, "status": "failed"}\n', "no RunStarted"),
        ("not json\n", "not an event"),
        (
            '{"event": "RunStarted", "step": 0, "train_s": 0, "run_id": "a", "metric": "m",'
            ' "higher_is_better": true, "config": [], "environment": {}}\n',
            "'config' is not of its type",
        ),
        (
            '{"event": "RunStarted", "step": 0, "train_s": 0, "run_id": "a", "metric": ["m"],'
            ' "higher_is_better": true, "config": {}, "environment": {}}\n',
            "'metric' is not of its type",
        ),
        (f'{{"event": "RunEnded", "step": 1{400 * "0"}, "train_s": 0}}\n', "'step' is not of"),
    ],
)
def test_a_file_that_is_no_run_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        runs.load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_find_expands_a_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = write_run(tmp_path / "runs" / "demo" / "a")
    b = write_run(tmp_path / "runs" / "b")
    assert runs.find(tmp_path / "runs") == [b / "events.jsonl", a / "events.jsonl"]
    assert runs.find(a) == runs.find(a / "events.jsonl") == [a / "events.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no runs here"):
        runs.find(tmp_path / "empty")
    with pytest.raises(UsageError, match="no such run"):
        runs.find(tmp_path / "absent")
    deny_listing(monkeypatch, b.parent / "demo")
    with pytest.raises(UsageError, match=r"runs/demo: cannot be read \(Permission denied\)"):
        runs.find(tmp_path / "runs")


def test_seeds_of_one_configuration_are_one_setting(tmp_path: Path) -> None:
    found = [
        runs.load(
            write_run(
                tmp_path / f"s{seed}",
                *reached(10 * seed, float(seed)),
                seed=seed,
                run_id=f"s{seed}",
                runs_dir=f"elsewhere{seed}",
                logger={"name": "wandb" if seed == 1 else "none"},
                resume="elsewhere" if seed == 2 else None,
                dry_run=seed == 2,
            )
        )
        for seed in (3, 1, 2)
    ]
    (setting,) = runs.group(found)
    assert (setting.task, setting.optimizer) == ("digits resnet8, accuracy ≥ 0.97", "SGD")
    assert [runs.seed(run) for run in setting.runs] == [1, 2, 3]
    row = score.row(setting)
    assert row.steps == score.Spread(20, 10, 30)
    assert row.seconds == score.Spread(2.0, 1.0, 3.0)
    assert (row.seeds, row.reached, row.final) == (3, 3, 0.98)
    assert setting.options["optimizer.lr"] == "0.1"
    assert "seed" not in setting.options


def test_the_same_run_twice_counts_once(tmp_path: Path) -> None:
    run = runs.load(write_run(tmp_path / "a", *reached(1, 1.0)))
    again = runs.load(tmp_path / "a" / "events.jsonl")
    assert score.row(runs.group([run, again])[0]).seeds == 1


def test_labels_of_optimizers(tmp_path: Path) -> None:
    for i, (name, kfac) in enumerate(
        [
            ("sgd", False),
            ("adam", False),
            ("adamw", False),
            ("sgd", True),
            ("muon", True),
            ("eigen_adam", True),
        ]
    ):
        write_run(tmp_path / str(i), optimizer__name=name, kfac__enabled=kfac)
    settings = runs.group(runs.load(file) for file in runs.find(tmp_path))
    labels = [setting.optimizer for setting in settings]
    assert labels == ["Adam", "AdamW", "SGD", "EigenAdam", "K-FAC + Muon", "K-FAC + SGD"]


def test_a_given_label_that_another_setting_has_gets_a_number(tmp_path: Path) -> None:
    write_run(tmp_path / "a", optimizer__lr=0.1)
    write_run(tmp_path / "b", optimizer__lr=0.2)
    for i, label in enumerate(("SGD (lr 0.1)", "SGD (lr 0.2)", "SGD (lr 0.1) [2]")):
        write_run(tmp_path / str(i), optimizer__lr=1 + i, label=label)
    settings = runs.group(runs.load(file) for file in runs.find(tmp_path))
    assert [(s.optimizer, s.runs[0].path.parent.name) for s in settings] == [
        ("SGD (lr 0.1)", "0"),
        ("SGD (lr 0.1) [2]", "a"),
        ("SGD (lr 0.1) [2] [2]", "2"),
        ("SGD (lr 0.2)", "1"),
        ("SGD (lr 0.2) [2]", "b"),
    ]


def test_equal_labels_say_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", kfac__enabled=True)
    write_run(tmp_path / "b", kfac__enabled=True, kfac__damping=0.03)
    write_run(tmp_path / "c", kfac__enabled=False)
    write_run(tmp_path / "d", kfac__enabled=False, kfac__damping=0.03)  # means nothing
    settings = runs.group(runs.load(file) for file in runs.find(tmp_path))
    assert [(s.optimizer, len(s.runs)) for s in settings] == [
        ("SGD", 2),
        ("K-FAC + SGD (damping 0.003)", 1),
        ("K-FAC + SGD (damping 0.03)", 1),
    ]


def test_options_with_one_last_name_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", optimizer__decay=1, kfac__enabled=True, kfac__decay=2)
    write_run(tmp_path / "b", optimizer__decay=3, kfac__enabled=True)
    settings = runs.group(runs.load(file) for file in runs.find(tmp_path))
    assert [s.optimizer for s in settings] == [
        "K-FAC + SGD (kfac.decay 2, optimizer.decay 1)",
        "K-FAC + SGD (kfac.decay unset, optimizer.decay 3)",
    ]


def test_other_targets_are_other_tasks(tmp_path: Path) -> None:
    write_run(tmp_path / "a", higher_is_better=False, trainer__target=6)
    write_run(tmp_path / "b", trainer__target=0.98)
    write_run(tmp_path / "c", trainer__target=None)
    settings = runs.group(runs.load(file) for file in runs.find(tmp_path))
    assert [(s.task, s.optimizer) for s in settings] == [
        ("digits resnet8, accuracy", "SGD"),
        ("digits resnet8, accuracy ≤ 6", "SGD"),
        ("digits resnet8, accuracy ≥ 0.98", "SGD"),
    ]
    assert [score.row(s).has_target for s in settings] == [False, True, True]


def test_notes_name_dead_runs_repeated_seeds_and_unequal_machines(tmp_path: Path) -> None:
    env = {"git": {"commit": "1"}, "cpu": "x", "command": "a"}
    write_run(tmp_path / "a", evaluated(7, 1.0, 0.5), environment=env)
    write_run(tmp_path / "b", RunEnded(3, 1.0, "failed", "out of\nmemory"), environment=env)
    write_run(
        tmp_path / "c",
        *reached(1, 1.0)[:2],
        seed=1,
        environment={"git": {"commit": "2"}, "cpu": "x", "command": "b"},
    )
    settings = runs.group(runs.load(file) for file in runs.find(tmp_path))
    task = "digits resnet8, accuracy ≥ 0.97"
    assert notes(settings) == [
        f"{task}, SGD: a has not ended (last event at step 7): counts as not reached",
        f"{task}, SGD: b ended as failed (out of\\nmemory): counts as not reached",
        f"{task}, SGD: seed 0 was run 2 times",
        f"{task}: the runs' environments differ in git.commit",
    ]


def test_notes_name_the_cpu_clock_and_clocks_are_never_mixed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", *reached(1, 1.0), trainer__clock="wall")
    write_run(tmp_path / "b", *reached(1, 1.0), seed=1)  # before there was a choice
    found = runs.group(runs.load(file) for file in runs.find(tmp_path))
    assert notes(found) == []
    write_run(tmp_path / "c", *reached(1, 1.0), trainer__clock="cpu")
    found = runs.group(runs.load(file) for file in runs.find(tmp_path))
    said = "seconds are processor time, not time of day (trainer.clock=cpu)"
    assert notes(found) == [f"digits resnet8, accuracy ≥ 0.97, SGD (clock cpu): {said}"]
    assert notes(runs.group([runs.load(tmp_path / "c")])) == [said]
    assert "SGD (clock cpu)" in [setting.optimizer for setting in found]


def test_a_diverged_seed_ranks_worst_in_the_final_metric(tmp_path: Path) -> None:
    for seed, value in enumerate([math.nan, 0.5, 0.7]):
        write_run(tmp_path / f"s{seed}", evaluated(1, 1.0, value), seed=seed)
    found = [runs.load(file) for file in runs.find(tmp_path)]
    assert score.row(runs.group(found)[0]).final == 0.5
    assert math.isnan(score.row(runs.group(found[:2])[0]).final)


# Half of a number near the smallest one is rounded, so results would not scale.
times = st.lists(st.sampled_from([0.0, INF]) | st.floats(1e-300, 1e6), min_size=1, max_size=9)


@given(times, st.randoms())
def test_spread_does_not_depend_on_order(values: list[float], rng: random.Random) -> None:
    shuffled = rng.sample(values, len(values))
    assert score.spread(shuffled) == score.spread(values)
    assert score.spread(values).low <= score.spread(values).median <= score.spread(values).high


@given(times)
def test_median_is_finite_only_if_a_majority_reached(values: list[float]) -> None:
    missed = sum(math.isinf(value) for value in values)
    median = score.spread(values).median
    assert math.isinf(median) == (2 * missed >= len(values))
    if not missed:
        assert median == statistics.median(values)


def test_median_of_five_inf_inf_is_inf() -> None:
    assert score.spread([5.0, INF, INF]) == score.Spread(INF, 5.0, INF)
    assert score.spread([5.0, INF, 3.0]) == score.Spread(5.0, 3.0, INF)


def test_median_run_is_the_one_with_the_median_time(tmp_path: Path) -> None:
    for seed, seconds in enumerate([3.0, 9.0, 5.0]):
        write_run(tmp_path / f"s{seed}", *reached(1, seconds), seed=seed)
    found = [runs.load(file) for file in runs.find(tmp_path)]
    assert score.time_to_target_s(score.median_run(runs.group(found)[0])) == 5.0
    # Of two middle runs it is the slower one.
    assert score.time_to_target_s(score.median_run(runs.group(found[:2])[0])) == 9.0


@given(st.permutations(range(5)))
def test_grouping_does_not_depend_on_order(order: list[int]) -> None:
    found = [_memory_run(i, lr=0.1 if i < 3 else 0.2) for i in range(5)]
    assert runs.group([found[i] for i in order]) == runs.group(found)


def _memory_run(number: int, lr: float) -> runs.Run:
    started = RunStarted(0, 0.0, "a", "accuracy", True, config(optimizer__lr=lr, seed=number), {})
    return runs.Run(Path(f"/r{number}"), started, (started, *reached(number, float(number))))


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.dictionaries(st.text(), x)))
def test_flatten_gives_printable_text(value: Any) -> None:
    flat = runs.flatten({"a": value})
    assert all((key + text).isprintable() for key, text in flat.items())
    assert list(flat) == sorted(flat)


def test_flatten_survives_deep_nesting() -> None:
    deep: dict[str, Any] = {}
    for _ in range(20_000):
        deep = {"": deep}
    assert list(runs.flatten({"a": deep}).values()) == ["{}"]


# ---- intervals ----


def test_the_interval_of_a_mean_is_that_of_students_t():
    values = [0.3, -0.4, 1.2, 0.5]
    mean, low, high = score.mean_with_interval(values)
    expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean, low, high) == pytest.approx((0.4, expected.low, expected.high))
    assert score.mean_with_interval([2.0]) == (2.0, 2.0, 2.0)
    for wrong in ([], [1.0, INF]):
        with pytest.raises(ValueError, match="finite number"):
            score.mean_with_interval(wrong)


@pytest.mark.parametrize("n", range(1, 17))
def test_the_interval_of_a_median_holds_it_with_95_percent(n: int) -> None:
    """Each value is below the true median with the chance 1/2: all 2^n cases are counted."""
    below = [cases.count(True) for cases in itertools.product((False, True), repeat=n)]
    _, low, high = (int(x) for x in score.median_with_interval(range(1, n + 1)))
    assert high == n + 1 - low

    def coverage(left_out: int) -> float:
        return sum(left_out < count < n - left_out for count in below) / 2**n

    assert coverage(low - 1) >= 0.95 or (n <= 5 and low == 1)
    assert coverage(low) < 0.95, "a narrower one would do"


def test_intervals_by_hand() -> None:
    assert score.median_with_interval([4.0]) == (4.0, 4.0, 4.0)
    assert score.median_with_interval([3.0, 1.0]) == (2.0, 1.0, 3.0)
    assert score.median_with_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    # the true median is below the least of 8 in 0.4 % of cases, below the second in 3.5 %
    assert score.median_with_interval([9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == (4.5, 1.0, 9.0)
    # of 9: in 2.0 %
    assert score.median_with_interval([*range(9, 0, -1)]) == (5.0, 2.0, 8.0)
    assert score.median_with_interval([1.0, 2.0, INF]) == (2.0, 1.0, INF)
    assert score.median_with_interval([1.0, INF]) == (INF, 1.0, INF)
    assert score.median_with_interval([INF, INF, INF]) == (INF, INF, INF)


@given(times, st.randoms())
def test_an_interval_holds_its_median_within_the_range(
    values: list[float], rng: random.Random
) -> None:
    median, low, high = score.median_with_interval(values)
    assert min(values) <= low <= median <= high <= max(values)
    assert median == score.spread(values).median
    assert score.median_with_interval(rng.sample(values, len(values)))[0] == median
    assert score.median_with_interval(values) == (median, low, high)
    scaled = score.median_with_interval([4 * v for v in values])
    assert scaled == (4 * median, 4 * low, 4 * high)


@pytest.mark.parametrize("values", [[], [1.0, math.nan]])
def test_a_median_of_no_values_or_of_nan_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="a median needs"):
        score.median_with_interval(values)
