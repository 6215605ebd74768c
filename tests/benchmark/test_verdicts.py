"""Verdicts on claims: from constructed lines, and from a row with constructed runs."""

import math

import pytest

from kfac_bench.benchmark import result_tables, run_end, schema, suite, write_reports
from kfac_bench.benchmark.result import Line, Measured
from kfac_bench.benchmark.result_tables import Verdict, judge
from kfac_bench.benchmark.schema import Benchmark, BenchmarkProfile, Check, Claim, Quantity
from tests.benchmark.test_results import write

AT = {"optimizer": "K-FAC"}
FASTER = Check("seconds over SGD's", AT, at_most=0.6)
AS_GOOD = Check("more than SGD", AT, at_least=-0.5)


def measured(check, median, low, high, seeds=3, missed=0, bounds=0):
    return Line(check.at, check.quantity, "", Measured(median, low, high, seeds, missed, bounds))


GOOD = measured(AS_GOOD, 0.1, -0.2, 0.4)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([measured(FASTER, 0.5, 0.4, 0.6), GOOD], Verdict.SUPPORTED),
        ([measured(FASTER, 0.8, 0.61, 0.9), GOOD], Verdict.NOT_SUPPORTED),
        ([measured(FASTER, 0.5, 0.4, 0.7), GOOD], Verdict.NOT_DECIDED),
        ([measured(FASTER, math.inf, math.inf, math.inf, missed=3), GOOD], Verdict.NOT_SUPPORTED),
        ([measured(FASTER, 0.5, 0.4, math.inf, missed=1), GOOD], Verdict.NOT_DECIDED),
        ([measured(FASTER, 0.5, 0.4, 0.6, seeds=2), GOOD], Verdict.NOT_TESTABLE),
        ([GOOD], Verdict.NOT_TESTABLE),
        ([measured(FASTER, 0.5, 0.4, 0.6), measured(AS_GOOD, -2, -3, -1)], Verdict.NOT_SUPPORTED),
        ([measured(FASTER, 0.5, 0.4, 0.6, bounds=3), GOOD], Verdict.SUPPORTED),
        ([measured(FASTER, 0.8, 0.7, 0.9, bounds=1), GOOD], Verdict.NOT_DECIDED),
        (
            [
                measured(FASTER, 0.5, 0.4, 0.6),
                measured(AS_GOOD, -math.inf, -math.inf, -math.inf, missed=3),
            ],
            Verdict.NOT_SUPPORTED,
        ),
        ([measured(FASTER, 0.9, 0.7, 1), measured(AS_GOOD, 0, -1, 1)], Verdict.NOT_SUPPORTED),
    ],
)
def test_a_claim_is_supported_if_whole_intervals_are_within_the_limits(lines, expected):
    assert judge(Claim("Faster.", [FASTER, AS_GOOD]), lines, 3).verdict is expected


def test_the_numbers_are_those_of_the_lines():
    lines = [measured(FASTER, 0.5, 0.41, math.inf, missed=1), GOOD]
    assert judge(Claim("Faster.", [FASTER, AS_GOOD]), lines, 3).numbers == (
        "seconds over SGD's (K-FAC): 0.5 (0.41 \u2013 missed), limit at most 0.6: "
        "not decided; "
        "more than SGD (K-FAC): 0.1 (-0.2 \u2013 0.4), limit at least -0.5: holds"
    )
    bound = judge(Claim("Faster.", [FASTER]), [measured(FASTER, 0.8, 0.7, 0.9, bounds=1)], 3)
    assert bound.numbers == (
        "seconds over SGD's (K-FAC): at most 0.8 (0.7 \u2013 0.9), limit at most 0.6: "
        "only an upper bound is known"
    )
    exact = Line(AT, "bytes", "kB", computed=12.0)
    said = judge(Claim("Small.", [Check("bytes", AT, at_most=10)]), [exact], 3)
    assert said.verdict is Verdict.NOT_SUPPORTED
    assert said.numbers == (
        "bytes (K-FAC): 12 kB (computed from the plan that the ranks execute, not measured), "
        "limit at most 10: fails"
    )


def test_a_claim_that_cannot_be_tested_or_has_not_run_says_so():
    never = judge(Claim("Scales.", not_testable="two ranks"), [], 3)
    assert (never.verdict, never.numbers) == (Verdict.NOT_TESTABLE, "two ranks")
    early = result_tables.without_numbers(Claim("Faster.", [FASTER]))
    assert early.verdict is Verdict.NOT_RUN
    assert early.numbers == "seconds over SGD's (K-FAC): at most 0.6"


ROW = Benchmark(
    "Made up",
    {"optimizer": ["SGD", "K-FAC"]},
    ["model=resnet8", "logger=none"],
    [0, 1, 2],
    each={"optimizer": {"SGD": ["kfac=none"]}},
    profiles={"cpu": BenchmarkProfile()},
    quantities={
        "seconds": Quantity("seconds_to_level", level_of={"optimizer": "SGD"}),
        "seconds over SGD's": Quantity(of="seconds", against={"optimizer": "SGD"}, how="ratio"),
    },
    claims=[Claim("K-FAC is faster.", [FASTER]), Claim("It scales.", not_testable="one rank")],
)


def verdicts(row):
    return [line[1] for line in result_tables.verdicts([row]).rows]


def test_verdicts_of_runs_whose_level_is_that_of_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "load", lambda name: ROW)
    monkeypatch.chdir(tmp_path)
    row = suite.row("made_up", "cpu", runs_dir=str(tmp_path / "runs"))
    document = tmp_path / "doc.md"
    document.write_text(f"{write_reports.begin_mark('cpu')}\n{write_reports.END}\n")
    assert verdicts(row) == ["not run yet", "not testable here"]
    write_reports.write_all([], document, result_tables.verdicts([row]), "cpu")
    assert "| K-FAC is faster. | not run yet |" in document.read_text()
    cells = {(c.point["optimizer"], c.seed): c.path() for c in row.cells}
    for seed in range(3):
        # SGD is at 0.5 after 9 s, its final metric, and so K-FAC's 0.5 after 4 s is enough.
        write(cells["SGD", seed], 0.5)
        write(cells["K-FAC", seed], 0.6, reached_s=4.0 + seed / 10)
        assert verdicts(row)[0] == ("supported" if seed == 2 else "not run yet")
    write_reports.write_all(
        [write_reports.write(row)], document, result_tables.verdicts([row]), "cpu"
    )
    assert "| K-FAC is faster. | supported |" in document.read_text()
    assert "0.4556" in document.read_text()
    for part in ({"seeds": [0]}, {"only": "K-FAC"}):
        # One seed has an interval without a width, and a part of the cells lacks numbers.
        some = suite.row("made_up", "cpu", runs_dir=str(tmp_path / "runs"), **part)
        assert verdicts(some)[0] == "not run yet", part
    write(cells["SGD", 2], 0.7)  # a level that K-FAC does not reach
    assert verdicts(row)[0] == "not decided"
    (cells["SGD", 2] / "events.jsonl").unlink()
    run_end.record_failure(cells["SGD", 2], "x", "out of memory")
    judged = result_tables.verdicts([row]).rows[0]
    assert judged[1:] == [
        "not testable here",
        "1 cell failed, the first: out of memory. Use --retry",
    ]
