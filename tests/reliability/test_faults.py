"""Faults in real runs: a short form of `make faults`, which must also report defects."""

import dataclasses
import json
import re
import socket
from datetime import date

import pytest
from torch.distributed import TCPStore

from kfac_bench.cli.entry import exit_with
from kfac_bench.errors import UsageError
from kfac_bench.record.events import RecordGap
from kfac_bench.report.tables import escape_markdown
from kfac_bench.training import environment
from tests.reliability.faults import cost, expect, launch, matrix, report, rows, smoke
from tests.reliability.faults.__main__ import main
from tests.reliability.faults.case import Case
from tests.reliability.faults.fault import FEW, Fault, starts
from tests.reliability.faults.launch import Ended
from tests.reliability.faults.matrix import Outcome
from tests.support import ROOT
from tests.support.quick import quick_if

PAGE = ROOT / "docs" / "lab" / "faults.md"


@pytest.mark.alone
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_runs_on_two_ranks_survive_faults(tmp_path):
    kept = tmp_path / "kept.jsonl"
    faults = matrix.find(matrix.SHORT)
    assert len(faults) == len(matrix.SHORT)
    said = []
    outcomes = matrix.run(faults, [2], ["mem_opt"], said.append, jobs=2, kept=kept)
    assert len(outcomes) == len(said) == len(faults)
    assert [o for o in outcomes if o.wrong] == []
    by_name = {o.fault.name: o for o in outcomes}
    assert by_name["checkpoint: a flipped bit"].lost_steps == 6, (
        "the damaged checkpoint was not the newest"
    )
    assert "rank0.pt: damaged" in by_name["checkpoint: a flipped bit"].said
    assert "the loss is nan at step 8" in by_name["NaN in one gradient"].said
    assert "no progress for 4 s" in by_name[faults_like("SIGSTOP")].said
    assert not by_name["eigh fails"].again
    assert by_name["SIGKILL of another rank"].said.startswith("kfac-train: rank 0: lost another")
    again = matrix.run(faults, [2], ["mem_opt"], said.append, kept=kept)
    assert again == outcomes, "kept outcomes differ from the original ones"


def faults_like(name):
    (fault,) = matrix.find([name])
    return fault.name


WRONG = {
    "the fault did not happen": Fault("f", starts("kill", at=99)),
    "2 steps lost": Fault("f", starts("kill"), lost=1),
    "a traceback": Fault("f", starts("raise")),
    "other weights": Fault("f", starts("nan statistic", at=4)),
    "the run did not go on (failed)": Fault(
        "f",
        lambda case: (
            setattr(case, "start", lambda *_: type(case).start(case, "nan loss")) or case.start()
        ),
    ),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return the weights of runs without a fault, which run once."""
    return matrix.References(tmp_path_factory.mktemp("references"))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", quick_if(("a traceback", "other weights").__contains__, WRONG))
def test_a_defect_is_reported(wrong, tmp_path, references):
    outcome = matrix.try_one(WRONG[wrong], 1, "comm_opt", tmp_path / "case", references)
    assert wrong in outcome.wrong


def test_expectations_are_checked(tmp_path):
    ended = Ended([1, None], "step 1\nfailed at step 2\n", "kfac-train: no\n", 0.0)
    expect.line(ended, "^failed")
    case = Case(tmp_path, 1, "SGD")
    case.path.mkdir(parents=True)
    (case.path / "state").write_text("failed 2 path\n")
    case.events.write_text('{"event": "RunEnded", "step": 2, "train_s": 1, "status": "finished"}\n')
    wrong = {
        "exit codes \\[1, None\\], expected 1: kfac-train: no": lambda: expect.codes(ended, {1}),
        "0 lines .*'step 3'": lambda: expect.line(ended, "step 3"),
        "2 lines .*expected 1": lambda: expect.line(ended, "step"),
        "0 events RecordGap": lambda: expect.recorded(case, RecordGap),
        "RunEnded says finished, .* says failed": lambda: expect.finished_record(case, "failed"),
    }
    for said, check in wrong.items():
        with pytest.raises(expect.UnexpectedError, match=said):
            check()


def test_a_fault_may_need_few_methods():
    (fault,) = matrix.find(["the record is deleted during"])
    cases = list(matrix._combinations([fault], [1, 2], matrix.ALL_METHODS))
    assert [method for _, _, method in cases] == [*FEW, *FEW]


def test_a_reserved_port_goes_to_nobody_else():
    with launch.own_port() as port, launch.own_port() as other, socket.socket() as stranger:
        assert port != other
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", int(port)))
        store = TCPStore("127.0.0.1", int(port), is_master=True)
        store.set("who", "rank 0")
        assert TCPStore("127.0.0.1", int(port)).get("who") == b"rank 0"


TINY = ("model=autoencoder", "model.hidden=[16,6]", "trainer.max_steps=12", "optimizer.lr=0.05")


@pytest.mark.slow
def test_the_cost_of_checkpoints_is_measured_on_real_runs(monkeypatch, capsys):
    monkeypatch.setattr(smoke, "EXPERIMENTS", {"tiny": TINY})
    without = smoke._spent([*TINY, *smoke.DEFAULT], saving=False)
    assert (without.steps, without.checkpoints, without.recorded_s) == (12, 0, 0)
    assert 0 < without.train_s < without.wall_s
    assert without.cpu_s > 0
    with pytest.raises(SystemExit) as caught:
        exit_with("faults", lambda: main(["--cost", "2"]))
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert re.search(r"^\[2/2\] tiny: \d+\.\d s of a processor, [+-]\d+\.\d\d%$", said, re.M)
    (row,) = (line for line in said.splitlines() if line.startswith("| tiny |"))
    share = r"[+-]\d+\.\d+% \([+-]\d+\.\d+% to [+-]\d+\.\d+%\)"
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["12", "1"], "12 steps, and a checkpoint at the end"
    assert [bool(re.fullmatch(share, cells[i])) for i in (4, 6, 8)] == [True] * 3
    assert float(cells[9].removesuffix("%")) > 0
    assert "of 1 medians and" in said


@pytest.mark.slow
def test_a_run_that_cannot_be_measured_is_a_usage_error(monkeypatch, capsys):
    with pytest.raises(UsageError, match=r"model=none: .*choose one of autoencoder"):
        smoke.table(1, print, {"none": ("model=none",)})
    with pytest.raises(UsageError, match="the loss is"):
        smoke.table(1, print, {"diverges": (*TINY, "optimizer.lr=1e15", "kfac=none")})


def outcome(name, ranks, method, **fields):
    (fault,) = [f for f in rows.ROWS if f.name == name]
    return Outcome(fault, ranks, method, **fields)


@pytest.mark.slow
def test_the_page_counts_methods_and_names_failures():
    outcomes = [
        outcome("disk full", 1, "SGD", again=True, lost_steps=2, resume_s=1.0, identical=True),
        outcome("disk full", 1, "mem_opt", again=True, lost_steps=4, resume_s=3.0, wrong="torn"),
        outcome("disk full", 2, "SGD", not_here="needs root"),
        outcome("eigh fails", 2, "mem_opt", said="a | b"),
    ]
    shown = report.table(outcomes)
    first, second = shown.rows
    assert first[:4] == ["disk full", "1, 2", "1/2, 0/0", "same command again, "]
    assert first[4:] == ["2 to 4, \u2013", "2, \u2013", "1/2, 0/0", None]
    assert second[5:] == ["\u2013", "0/1 (arithmetic)", "a | b"]
    assert shown.notes == [
        "disk full, 1 ranks, mem_opt: torn",
        "disk full, 2 ranks, SGD: not tried: needs root",
    ]
    about, costs = environment.describe(), cost.table()
    text = report.page(outcomes, about, date(2026, 11, 21), 3.0, costs)
    assert [row[0] for row in costs.rows] == list(cost.SIZES_MB)
    assert 0 < costs.rows[0][1] < costs.rows[-1][1], "a larger checkpoint costs no more"
    assert "3 real runs" in text
    assert "met a fault: 2 ended as they\nshould, 1 did not" in text
    assert "a \\| b" in text
    assert 'docs/lab/faults.md"` wrote this page on 2026-11-21' in text


def test_the_page_in_docs_lists_every_fault():
    text = PAGE.read_text()
    for fault in rows.ROWS:
        lines = [x for x in text.splitlines() if x.startswith(f"| {escape_markdown(fault.name)} |")]
        assert len(lines) == 1, fault.name
        assert lines[0].split(" | ")[1] == ", ".join(map(str, fault.ranks))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("failed at step 6 after 0.2 s of training, squared_error 6.419: torn", "torn"),
        ("failed at step 9 after 0.3 s of training: torn", "torn"),
        ("kfac-train: rank 1: lost another rank: closed", "lost another rank: closed"),
        ("a" * 61, "a" * 60 + " ..."),
    ],
)
def test_a_message_is_short_and_begins_with_the_cause(said, shown):
    assert report.table([outcome("eigh fails", 1, "SGD", said=said)]).rows[0][-1] == shown


def test_kept_outcomes_of_removed_faults_are_ignored(tmp_path):
    kept = tmp_path / "kept.jsonl"
    fields = {f.name: f.default for f in dataclasses.fields(Outcome)}
    kept.write_text(json.dumps({**fields, "fault": "gone", "ranks": 1, "method": "SGD"}) + "\n")
    assert matrix._read(kept) == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "meteorite"], "--only meteorite: no such fault"),
        (["--methods", "adam"], "--methods adam: choose from SGD, comm_opt"),
        (["--ranks", "3"], "invalid choice: 3"),
        (["--cost", "0"], "--cost 0: must be at least 1"),
    ],
)
def test_bad_arguments_are_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        exit_with("faults", lambda: main(arguments))
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("faults: ")
    assert said in line
