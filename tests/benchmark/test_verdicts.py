"""Verdicts on claims: from constructed lines, and from a row with constructed runs."""

import math
from dataclasses import replace

import pytest

from kfac_bench.benchmark import run_end, schema, suite, verdicts, write_reports
from kfac_bench.benchmark.result import Line, Measured
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile, Check, Claim, Quantity
from kfac_bench.benchmark.verdicts import CheckState, Verdict
from kfac_bench.errors import UsageError
from tests.benchmark.test_results import write

AT = {"optimizer": "K-FAC"}
FASTER = Check("seconds over SGD's", AT, at_most=0.6)
AS_GOOD = Check("more than SGD", AT, at_least=-0.5)
AGAINST = {"optimizer": "SGD"}
QUANTITIES = {
    "seconds": Quantity("train_s", unit="s"),
    "accuracy": Quantity("final", unit="%"),
    "seconds over SGD's": Quantity(of="seconds", against=AGAINST, how="ratio"),
    "more than SGD": Quantity(of="accuracy", against=AGAINST, how="difference"),
}


def measured(check, value, low, high, seeds=6, missed=0, bounds=0):
    numbers = Measured(value, low, high, seeds, missed, bounds)
    return Line(check.at, check.quantity, "", numbers, is_difference=check is AS_GOOD)


def judge(claim, lines, seeds=6):
    return verdicts.judge(claim, lines, QUANTITIES, seeds)


GOOD = measured(AS_GOOD, 0.1, -0.2, 0.4)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([measured(FASTER, 0.5, 0.4, 0.6), GOOD], Verdict.SUPPORTED),
        ([measured(FASTER, 0.8, 0.61, 0.9), GOOD], Verdict.NOT_SUPPORTED),
        ([measured(FASTER, 0.5, 0.4, 0.7), GOOD], Verdict.NOT_DECIDED),
        ([measured(FASTER, math.inf, math.inf, math.inf, missed=3), GOOD], Verdict.NOT_SUPPORTED),
        ([measured(FASTER, 0.5, 0.4, math.inf, missed=1), GOOD], Verdict.NOT_DECIDED),
        ([measured(FASTER, 0.5, 0.4, 0.6, seeds=5), GOOD], Verdict.NOT_TESTABLE),
        ([GOOD], Verdict.NOT_TESTABLE),
        ([measured(FASTER, 0.5, 0.4, 0.6), measured(AS_GOOD, -2, -3, -1)], Verdict.NOT_SUPPORTED),
        (
            [measured(FASTER, 0.5, 0.4, 0.6), measured(AS_GOOD, 0.1, 0, 0.2, missed=1)],
            Verdict.NOT_DECIDED,
        ),
        ([measured(FASTER, 0.5, 0.4, 0.6, bounds=3), GOOD], Verdict.SUPPORTED),
        ([measured(FASTER, 0.8, 0.7, 0.9, bounds=1), GOOD], Verdict.NOT_DECIDED),
        (
            [
                measured(FASTER, 0.5, 0.4, 0.6),
                measured(AS_GOOD, -math.inf, -math.inf, -math.inf, missed=6),
            ],
            Verdict.NOT_SUPPORTED,
        ),
        ([measured(FASTER, 0.9, 0.7, 1), measured(AS_GOOD, 0, -1, 1)], Verdict.NOT_SUPPORTED),
    ],
)
def test_a_claim_is_supported_if_whole_intervals_are_within_the_limits(lines, expected):
    assert judge(Claim("Faster.", [FASTER, AS_GOOD]), lines).verdict is expected


@pytest.mark.parametrize("value", [0.5, 0.9])
def test_a_median_of_few_seeds_decides_nothing_but_a_mean_does(value):
    few = measured(FASTER, value, value, value, seeds=5)
    judged = judge(Claim("Faster.", [FASTER]), [few], 5)
    assert judged.verdict is Verdict.NOT_DECIDED
    assert judged.reason == "5 seeds"
    mean = measured(AS_GOOD, 0.1, -0.2, 0.4, seeds=3)
    assert judge(Claim("As good.", [AS_GOOD]), [mean], 3).verdict is Verdict.SUPPORTED
    missed = measured(AS_GOOD, -math.inf, -math.inf, -math.inf, seeds=3, missed=3)
    assert judge(Claim("As good.", [AS_GOOD]), [missed], 3).verdict is Verdict.NOT_DECIDED
    # With a miss the number is a median, and one seed has no interval.
    one_missed = measured(AS_GOOD, -2.0, -math.inf, -1.0, seeds=3, missed=1)
    assert judge(Claim("As good.", [AS_GOOD]), [one_missed], 3).verdict is Verdict.NOT_DECIDED
    one = measured(AS_GOOD, 0.1, 0.1, 0.1, seeds=1)
    assert judge(Claim("As good.", [AS_GOOD]), [one], 1).verdict is Verdict.NOT_DECIDED


def test_both_numbers_stand_beside_their_difference():
    lines = [
        Line(AT, "seconds", "s", Measured(33.0, 32.0, 34.0, 6, 0)),
        Line(AGAINST, "seconds", "s", Measured(58.0, 57.0, 59.0, 6, 0)),
        measured(FASTER, 0.57, 0.41, math.inf, missed=1),
    ]
    (number,) = judge(Claim("Faster.", [FASTER]), lines).numbers
    assert list(vars(number).values()) == [
        "K-FAC",
        "SGD",
        "33.0 s",
        "58.0 s",
        "0.57x (0.41 to missed)",
        "at most 0.6x (open)",
        CheckState.OPEN,
    ]
    bound = judge(Claim("Faster.", [FASTER]), [measured(FASTER, 0.8, 0.7, 0.9, bounds=1)])
    assert bound.numbers[0].difference == "at most 0.80x (0.70 to 0.90)"
    assert bound.numbers[0].needed == "at most 0.6x (open: only an upper bound is known)"
    near = judge(Claim("Faster.", [FASTER]), [measured(FASTER, 0.57, 0.5, 0.602)])
    assert near.numbers[0].difference == "0.57x (0.50 to 0.602)", "0.60 would be within the limit"
    exact = Line(AT, "bytes", "kB", computed=12.0)
    said = judge(Claim("Small.", [Check("bytes", AT, at_most=10)]), [exact])
    assert said.verdict is Verdict.NOT_SUPPORTED
    assert said.numbers[0].difference == "12.0 kB (computed)"
    assert said.numbers[0].needed == "at most 10 (fails)"


def test_means_stand_beside_a_mean_difference_and_medians_if_a_seed_missed():
    own, other = (
        Line(point, "accuracy", "%", Measured(median, 0, 100, 6, 0, mean=mean))
        for point, median, mean in ((AT, 78.92, 78.3), (AGAINST, 82.14, 82.1))
    )

    def numbers(difference):
        (number,) = judge(Claim("As good.", [AS_GOOD]), [own, other, difference]).numbers
        return number.number, number.other_number

    assert numbers(GOOD) == ("78.30 %", "82.10 %")
    assert numbers(measured(AS_GOOD, 0, -math.inf, 1, missed=1)) == ("78.92 %", "82.14 %")


def test_checks_of_the_same_points_share_a_line_and_the_deciding_line_is_first():
    lines = [
        Line(AT, "seconds", "s", Measured(33.0, 32.0, 34.0, 6, 0)),
        Line(AGAINST, "seconds", "s", Measured(58.0, 57.0, 59.0, 6, 0)),
        Line(AT, "accuracy", "%", Measured(88.0, 87.0, 89.0, 6, 0, mean=88.1)),
        Line(AGAINST, "accuracy", "%", Measured(88.0, 87.0, 89.0, 6, 0, mean=88.0)),
        replace(GOOD, unit="points"),
        measured(FASTER, 0.57, 0.41, 0.7),
        Line(AT, "bytes", "kB", computed=7.0),
    ]
    checks = [Check("bytes", AT, at_most=10), AS_GOOD, FASTER]
    first, second = verdicts._lines(judge(Claim("Better.", checks), lines))
    assert first == [
        "Better.",
        "K-FAC: 88.10 %, 33.0 s",
        "SGD: 88.00 %, 58.0 s",
        "0.10 (-0.20 to 0.40), 0.57x (0.41 to 0.70)",
        "at least -0.5 (holds), at most 0.6x (open)",
        "not decided: 6 seeds",
    ]
    assert second == ["", "K-FAC", "bytes", "7.00 kB (computed)", "at most 10 (holds)", ""]


def test_a_claim_that_cannot_be_tested_or_has_not_run_says_so():
    never = judge(Claim("Scales.", not_testable="two ranks"), [])
    assert (never.verdict, never.reason) == (Verdict.NOT_TESTABLE, "two ranks")
    early = verdicts.without_numbers(Claim("Faster.", [FASTER]), QUANTITIES, {})
    assert early.verdict is Verdict.NOT_RUN
    assert early.numbers[0].needed == "at most 0.6x (not run yet)"


ROW = Benchmark(
    "Made up",
    {"optimizer": ["SGD", "K-FAC"]},
    ["model=resnet8", "logger=none"],
    [*range(6)],
    each={"optimizer": {"SGD": ["kfac=none"]}},
    profiles={"cpu": BenchmarkProfile()},
    quantities={
        "seconds": Quantity("seconds_to_level", level_of={"optimizer": "SGD"}),
        "seconds over SGD's": Quantity(of="seconds", against={"optimizer": "SGD"}, how="ratio"),
    },
    claims=[
        Claim("K-FAC is faster.", [FASTER]),
        Claim("It scales.", not_testable="one rank", goal=True),
    ],
)


def said(row):
    return [line[-1] for table in verdicts.verdict_tables([row]) for line in table.rows]


def test_verdicts_of_runs_whose_level_is_that_of_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "load", lambda name: ROW)
    monkeypatch.chdir(tmp_path)
    row = suite.row("made_up", "cpu", runs_dir=str(tmp_path / "runs"))
    document = tmp_path / "doc.md"
    begin = write_reports.begin_mark("cpu", "--verdicts-into")
    document.write_text(f"before\n{begin}\nold\n{write_reports.END}\nafter\n")
    assert said(row) == ["not run yet", "not testable here: one rank"]
    write_reports.write_all([], None, verdicts.verdict_tables([row]), "cpu")
    every = tmp_path / "runs/all/cpu.md"
    first = "| K-FAC is faster. | K-FAC | SGD |  | at most 0.6x (not run yet) | not run yet |"
    assert first in every.read_text()
    cells = {(c.point["optimizer"], c.seed): c.path() for c in row.cells}
    for seed in range(6):
        # SGD is at 0.5 after 9 s, its final metric, and so K-FAC's 0.5 after 4 s is enough.
        write(cells["SGD", seed], 0.5)
        write(cells["K-FAC", seed], 0.6, reached_s=4.0 + seed / 10)
        assert said(row)[0] == ("supported" if seed == 5 else "not run yet")
    written = write_reports.write(row)
    write_reports.write_all([written], None, written.verdicts, "cpu")
    write_reports.verdicts_into(document, written.verdicts, "cpu")
    line = "| K-FAC: 4.25 | SGD: 9.00 | 0.47x (0.44 to 0.50) | at most 0.6x (holds) | supported |"
    for text in (every.read_text(), document.read_text()):
        assert f"| K-FAC is faster. {line}" in text
        assert "| It scales. |  |  |  |  | not testable here: one rank |" in text
    assert document.read_text().startswith(f"before\n{begin}\n\n**Verdicts on")
    assert document.read_text().endswith(f"\n{write_reports.END}\nafter\n")
    with pytest.raises(UsageError, match="no row has claims"):
        write_reports.verdicts_into(document, [], "cpu")
    for part in ({"seeds": [0]}, {"only": "K-FAC"}):
        # One seed has an interval without a width, and a part of the cells lacks numbers.
        some = suite.row("made_up", "cpu", runs_dir=str(tmp_path / "runs"), **part)
        assert said(some)[0] == "not run yet", part
    write(cells["SGD", 5], 0.7)  # a level that K-FAC does not reach
    assert said(row)[0] == "not decided: 6 seeds"
    (cells["SGD", 5] / "events.jsonl").unlink()
    run_end.record_failure(cells["SGD", 5], "x", "out of memory")
    failed = "not testable here: 1 cell failed, the first: out of memory. Use --retry"
    assert said(row)[0] == failed
