"""Ratios, profiles and scores, compared with hand-made results and with their definitions."""

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfac_bench import cli
from kfac_bench.benchmark import performance_profile as pp
from kfac_bench.benchmark.performance_profile import profile_finding, profile_svg
from kfac_bench.record import runs
from kfac_bench.report.figure_style import PALETTE
from tests.record.test_score import reached, write_run
from tests.support.figures import texts

INF = math.inf
# Three tasks by hand; nobody solves the last, C was not run on the first.
TIMES = {
    "a": {"A": 2.0, "B": 3.0},
    "b": {"A": 10.0, "B": 4.0, "C": 14.0},
    "c": {"A": INF, "B": INF, "C": INF},
}


def test_ratios_equal_hand_made_ones():
    assert pp.ratios(TIMES) == {
        "A": {"a": 1.0, "b": 2.5, "c": INF},
        "B": {"a": 1.5, "b": 1.0, "c": INF},
        "C": {"a": INF, "b": 3.5, "c": INF},
    }


def test_profiles_equal_hand_made_ones_with_the_best_first():
    third = pytest.approx(1 / 3)
    two = pytest.approx(2 / 3)
    assert pp.profiles(TIMES) == {
        "B": [(1.0, third), (1.5, two)],
        "A": [(1.0, third), (2.5, two)],
        "C": [(1.0, 0.0), (3.5, third)],
    }
    assert list(pp.profiles(TIMES)) == ["B", "A", "C"]


def test_scores_equal_hand_made_ones():
    found = pp.scores(TIMES)
    assert found["A"] == pytest.approx((3 + 1.5 + 0) / 9)
    assert found["B"] == pytest.approx((2.5 + 3 + 0) / 9)
    assert found["C"] == pytest.approx((0 + 0.5 + 0) / 9)


def test_times_of_zero_have_defined_ratios():
    assert pp.ratios({"a": {"A": 0.0, "B": 1.0, "C": 0.0}}) == {
        "A": {"a": 1.0},
        "B": {"a": INF},
        "C": {"a": 1.0},
    }


def test_the_table_has_scores_and_ratios():
    table = pp.table(TIMES)
    assert table.columns == ["optimizer", "score", "solved", "r, a", "r, b", "r, c"]
    assert [row[0] for row in table.rows] == ["B", "A", "C"]
    assert table.rows[1][1:] == [pytest.approx(0.5), 2, 1.0, 2.5, INF]
    assert "| A | 0.5 | 2 | 1 | 2.5 | inf |" in table.markdown()


def test_medians_use_only_runs_with_a_target(tmp_path):
    for seed, seconds in enumerate([3.0, 9.0, 5.0]):
        write_run(tmp_path / f"sgd{seed}", *reached(int(2 * seconds), seconds), seed=seed)
        write_run(
            tmp_path / f"adam{seed}",
            *(reached(4, 1.0) if not seed else ()),
            seed=seed,
            optimizer__name="adam",
        )
        write_run(tmp_path / f"no{seed}", seed=seed, trainer__target=None)
    settings = runs.group(runs.load(file) for file in runs.find(tmp_path))
    task = "digits resnet8, accuracy ≥ 0.97"
    assert pp.medians(settings) == {task: {"Adam": INF, "SGD": 5.0}}
    assert pp.medians(settings, steps=True) == {task: {"Adam": INF, "SGD": 10.0}}


def test_a_negative_time_of_a_damaged_clock_counts_as_0(tmp_path):
    setting = runs.group([runs.load(write_run(tmp_path / "a", *reached(4, -1.0)))])
    assert pp.medians(setting) == {"digits resnet8, accuracy ≥ 0.97": {"SGD": 0.0}}


time = st.floats(1e-6, 1e6) | st.just(INF)
times = st.dictionaries(
    st.sampled_from("abcdef"),
    st.dictionaries(st.sampled_from(["A", "B", "C", "D"]), time, min_size=1),
    min_size=1,
)


def rho(profile, tau):
    return max((share for corner, share in profile if corner <= tau), default=0.0)


@settings(deadline=None)
@given(times)
def test_the_score_is_the_area_below_the_profile(found):
    for name, profile in pp.profiles(found).items():
        corners = [1.0, *(tau for tau, _ in profile if 1 < tau < 4), 4.0]
        area = sum(rho(profile, a) * (b - a) for a, b in itertools.pairwise(corners))
        assert pp.scores(found)[name] == pytest.approx(area / 3, abs=1e-9)
        assert 0 <= pp.scores(found)[name] <= 1


@settings(deadline=None)
@given(times)
def test_a_profile_rises_to_the_share_of_tasks_solved(found):
    for name, profile in pp.profiles(found).items():
        taus, shares = zip(*profile, strict=True)
        assert taus[0] == 1.0
        assert list(taus) == sorted(set(taus))
        assert list(shares) == sorted(shares)
        solved = sum(math.isfinite(row.get(name, INF)) for row in found.values())
        assert shares[-1] == solved / len(found)


@settings(deadline=None)
@given(times, st.sampled_from("abcdef"), st.sampled_from([0.25, 8.0]))
def test_the_unit_of_a_tasks_times_does_not_matter(found, task, factor):
    if task in found:
        scaled = {**found, task: {name: factor * t for name, t in found[task].items()}}
        assert pp.ratios(scaled) == pp.ratios(found)


@settings(deadline=None)
@given(times)
def test_each_solved_task_has_a_best_optimizer(found):
    of_task = {task: [r[task] for r in pp.ratios(found).values()] for task in found}
    for task, values in of_task.items():
        solved = any(map(math.isfinite, found[task].values()))
        assert min(values) == (1.0 if solved else INF)


def test_the_figure_draws_each_profile_and_escapes_names():
    times = {"a": {"<b>$x": 1.0, "_B": 2.0, "C\n": INF}, "b": {"<b>$x": 1.0, "_B": 3.0}}
    svg = profile_svg(times, "seconds")
    assert {"<b>$x 1.00", "B 0.50", "C\\n 0.00", "share of 2 tasks solved"} <= set(texts(svg))
    assert "<b>$x has the best score (1.00), B the second best (0.50)" in texts(svg)
    assert svg == profile_svg(times, "seconds"), "not the same bytes"
    drawing = svg.partition("</style>")[2]
    # A line, and the line to its label.
    assert [drawing.count(f"stroke: {colour}") for colour in PALETTE[:4]] == [2, 2, 2, 0]


def test_no_line_is_above_one_or_below_zero():
    times = {"a": {"x": 1.0, "y": 1.5, "z": 2.0}, "b": {"x": 2.0, "y": 1.0, "z": 3.0}}
    svg = profile_svg(times, "seconds")
    lines = re.findall(r'd="(M [^"]*)"(?:(?!d=)[^>])*stroke-width: 1.8', svg)
    ends = [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", line)] for line in lines]
    assert len(ends) == 3
    assert len({ys[0] for ys in ends}) == len({ys[-1] for ys in ends}) == 1


def test_the_figure_labels_six_optimizers_and_lists_the_others_as_grey():
    times = {"a": {f"o{i}": 1.0 + i / 4 for i in range(9)}}
    said = texts(profile_svg(times, "steps"))
    assert "o5 0.58" in said
    assert "Grey: o6 0.50, o7 0.42, o8 0.33" in said
    assert "steps to target, over the task's best" in said


@pytest.mark.parametrize(
    ("of_task", "words"),
    [
        ({"a": 1.0, "b": 2.5}, "a has the best score (1.00), b the second best (0.50)"),
        ({"a": 2.0, "b": 1.0, "c": 1.0}, "b and c have the best score (1.00)"),
        ({"a": 1.0}, "a has the score (1.00)"),
        ({"a": INF, "b": INF}, ""),
        ({}, ""),
    ],
)
def test_the_finding_of_the_profiles(of_task, words):
    assert profile_finding({"task": of_task}) == words


def test_times_are_compared_with_the_best_first_order_optimizer(tmp_path):
    for name, (kfac, seconds) in {
        "sgd": (False, [4.0, 6.0, 5.0]),
        "adam": (False, [2.0, 3.0, INF]),
        "muon": (True, [0.75, 0.5, 1.0]),
        "lamb": (True, [INF, INF, 1.0]),
        "soap": (False, [1.5, 1.5, 1.5]),
    }.items():
        for seed, time_s in enumerate(seconds):
            events = reached(int(4 * time_s), time_s) if math.isfinite(time_s) else ()
            write_run(
                tmp_path / f"{name}{seed}",
                *events,
                seed=seed,
                optimizer__name=name,
                kfac__enabled=kfac,
            )
    settings = runs.group(runs.load(file) for file in runs.find(tmp_path))
    table = pp.times_table(settings)
    assert [row[1:] for row in table.rows] == [
        ["Adam", "2 of 3", 12.0, 3.0, 2.0, INF, 1.0],
        ["SGD", "3 of 3", 20.0, 5.0, 4.0, 6.0, 5 / 3],
        ["SOAP", "3 of 3", 6.0, 1.5, 1.5, 1.5, 0.5],
        ["K-FAC + LAMB", "1 of 3", INF, INF, 1.0, INF, INF],
        ["K-FAC + Muon", "3 of 3", 3.0, 0.75, 0.5, 1.0, 0.25],
    ]


def test_without_a_first_order_optimizer_that_met_the_target_no_time_is_compared(tmp_path):
    write_run(tmp_path / "sgd", optimizer__name="sgd")
    write_run(tmp_path / "kfac", *reached(4, 1.0), kfac__enabled=True)
    table = pp.times_table(runs.group(runs.load(file) for file in runs.find(tmp_path)))
    assert [(row[1], row[4], row[-1]) for row in table.rows] == [
        ("SGD", INF, None),
        ("K-FAC + SGD", 1.0, None),
    ]


def test_kfac_bench_profile_prints_tables_and_draws_the_figure(tmp_path, capsys):
    for task, target in (("a", 0.9), ("b", 0.95)):
        write_run(tmp_path / "runs" / f"{task}sgd", *reached(8, 4.0), trainer__target=target)
        write_run(
            tmp_path / "runs" / f"{task}kfac",
            *reached(2, 1.0),
            trainer__target=target,
            kfac__enabled=True,
            label="K-FAC, ours",
        )
    with pytest.raises(SystemExit) as caught:
        cli.bench(["profile", str(tmp_path / "runs"), "--svg", str(tmp_path / "p.svg")])
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert "| K-FAC, ours | 1 of 1 | 2 | 1 | 1 | 1 | 0.25 |" in said
    assert "| K-FAC, ours | 1 | 2 | 1 | 1 |" in said
    assert "| SGD | 0 | 2 | 4 | 4 |" in said
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert "not run" not in said
    (tmp_path / "runs" / "bsgd" / "events.jsonl").unlink()
    with pytest.raises(SystemExit):
        cli.bench(["profile", str(tmp_path / "runs")])
    assert "accuracy \u2265 0.95: not run, counted as missed: SGD\n" in capsys.readouterr().out
    write_run(tmp_path / "none" / "a", trainer__target=None)
    with pytest.raises(SystemExit) as caught:
        cli.bench(["profile", str(tmp_path / "none")])
    assert caught.value.code == 2
    assert "none of these runs has a target" in capsys.readouterr().err
