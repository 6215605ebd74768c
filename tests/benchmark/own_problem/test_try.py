"""kfac-bench try as users type it: it trains, is killed, continues, and refuses bad input."""

import dataclasses
import os
import signal
import statistics
import sys

import pytest

from kfac_bench import cli
from kfac_bench.benchmark import local_runs
from kfac_bench.benchmark.own_problem import first_runs, study_input
from kfac_bench.benchmark.own_problem.study_input import Asked
from kfac_bench.benchmark.own_problem.study_plan import Question, StudyFolder
from kfac_bench.cli import try_command
from kfac_bench.config import problem_file
from kfac_bench.record import score
from kfac_bench.record.events import RunEnded, RunStarted
from kfac_bench.record.runs import load
from tests.benchmark.own_problem.problem_text import written
from tests.reliability.faults import launch
from tests.support import forks
from tests.support.quick import slow
from tests.support.runs import of_kind

TRIALS, SEEDS = 2, 2
"""So few trials of an optimizer and fresh seeds, so that a study is short."""
SMALL = ("--optimizers=adamw,eigen_adam", "trainer.threads=1", "--minutes=5")


def bench(*words):
    with pytest.raises(SystemExit) as caught:
        cli.bench(["try", *map(str, words)])
    return caught.value.code


def refused(capsys, *words):
    """Return the one line with which the command ends, with exit code 2."""
    assert bench(*words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("kfac-bench: ")
    return said


# ---- it trains ----


def check_verdict(text):
    assert "mine: accuracy " in text
    assert "AdamW" in text
    assert "EigenAdam" in text
    assert "Paste this:" in text or "The best setting of AdamW that was found:" in text


@pytest.mark.slow
def test_a_missing_target_is_what_adamw_reaches(tmp_path, monkeypatch):
    file = written(tmp_path, ("    target=0.93,\n", ""))
    problem_file.run_named([f"problem={file}"])
    asked = Asked(file, ["trainer.threads=1"], 4.0, 1, SEEDS, None, {"adamw": [], "sgd": []})
    said = []
    folder = StudyFolder(tmp_path / "trÿ (1)", Question("0", "", "adamw,sgd", 4.0, 1, SEEDS))
    plan = first_runs.make_plan(asked, folder, said.append)
    assert plan.is_own_target
    assert 0.5 < plan.target <= 1
    (run,) = (tmp_path / "trÿ (1)/reference").iterdir()
    last = [value for _, _, value in score.metric_curve(load(run))][-5:]
    assert plan.target == pytest.approx(statistics.median(last), abs=1e-4)
    assert "AdamW trains for 1000 steps" in said[-1]
    # A machine that is slower, or more minutes, give the same target.
    longer = dataclasses.replace(asked, minutes=9.0)
    again = StudyFolder(tmp_path / "again", Question("0", "", "adamw,sgd", 9.0, 1, SEEDS))
    slow_step_s = first_runs._step_s
    monkeypatch.setattr(first_runs, "_step_s", lambda path: 2 * slow_step_s(path))
    assert first_runs.make_plan(longer, again, said.append).target == plan.target


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks(tmp_path, capsys, monkeypatch):
    whole = study_input.candidates
    monkeypatch.setattr(study_input, "candidates", lambda *a, **k: whole(*a, **k)[:1])
    monkeypatch.setattr(try_command, "SEEDS", 1)
    forked_runs = []

    def run(command):
        """Start a run in forks, which is faster than torchrun."""
        assert command == local_runs.local_command(command[5:], 2)
        forked_runs.append(command)
        ended = launch.by_hand(tmp_path, 2, command[4:], is_slow=False)
        return max(ended.codes), ended.errors

    monkeypatch.setattr(local_runs, "run_command", run)
    words = (*SMALL, "--minutes=20", "--ranks=2", f"--runs-dir={tmp_path / 'try'}")
    assert bench(written(tmp_path), *words) == 0
    assert len(forked_runs) == 7
    check_verdict(capsys.readouterr().out)
    started = [of_kind(p.parent, RunStarted)[-1] for p in tmp_path.rglob("final/*/events.jsonl")]
    assert {e.environment["world_size"] for e in started} == {2}


def study(fifo, words):
    """In a fork: run the command, and print into a pipe."""
    forks.prepare()
    sys.stdout = open(fifo, "w", buffering=1)  # noqa: SIM115 - it ends with the process
    whole = study_input.candidates
    study_input.candidates = lambda *a, **k: whole(*a, **k)[:TRIALS]
    try_command.SEEDS = SEEDS
    cli.bench(["try", *words])


@pytest.mark.slow
def test_a_study_that_is_killed_twice_ends_with_a_verdict(tmp_path, capsys, monkeypatch):
    folder, fifo = tmp_path / "try", tmp_path / "fifo"
    os.mkfifo(fifo)
    own = (written(tmp_path), *SMALL, "--minutes=20", f"--runs-dir={folder}")

    def start():
        process = forks.server().Process(target=study, args=(str(fifo), own))
        process.start()
        return process, fifo.open()

    finished = {}
    for mark in ("[tuning] EigenAdam 1", "[seed 0]"):
        process, lines = start()
        with lines:
            for line in lines:
                if line.startswith(mark):
                    break
            else:
                pytest.fail(f"no line begins with {mark}")
            # A run is in progress: the next one begins as soon as the line is printed.
            process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL
        finished |= ended_at(tmp_path)
    process, lines = start()
    with lines:
        said = lines.read()
    process.join()
    assert process.exitcode == 0, said
    check_verdict(said)
    now = ended_at(tmp_path)
    assert finished.items() <= now.items(), "a finished run was run again"
    assert len(now) > len(finished) > 2
    assert (folder / "verdict.txt").read_text() in said
    assert "Does K-FAC help on mine?" in (folder / "verdict.html").read_text()
    monkeypatch.setattr(try_command, "SEEDS", SEEDS)
    other = refused(capsys, *own, f"--from={folder}")
    assert "holds a study with starts={}, not {'adamw': 'optimizer.beta2=" in other


def ended_at(folder):
    """Return the size of the event file of each finished run."""
    files = [*folder.rglob("tuning/*/events.jsonl"), *folder.rglob("final/*/events.jsonl")]
    return {
        path: path.stat().st_size
        for path in files
        if any(e.status in ("reached", "finished") for e in of_kind(path.parent, RunEnded))
    }


# ---- bad input ----

BAD = [
    (("--minutes=0",), "--minutes 0: must be above 0"),
    (("--minutes=nan",), "--minutes nan: must be above 0"),
    (("--minutes=x",), "invalid float value"),
    (("--quick", "--minutes=3"), "leave out --quick or --minutes"),
    (("--ranks=0",), "--ranks 0: must be at least 1"),
    (("--ranks=4096",), "more than the"),
    (("--optimizers=adam",), "'adam': choose among sgd,adamw,"),
    (("--optimizers=sgd,muon",), "name adamw, which the others are compared with"),
    (("--optimizers=adamw",), "at least one other"),
    (("--from=no_such_folder",), "--from no_such_folder: no study of kfac-bench try"),
    (("--launcher=pbs",), "argument --launcher: invalid choice: 'pbs'"),
    (("launcher=slurm",), "launcher=slurm: write --launcher slurm"),
    (("optimizer.lr=0.1",), "optimizer.lr=0.1: kfac-bench try sets optimizer.lr itself"),
    (("optimizer=sgd",), "kfac-bench try sets optimizer itself"),
    (("seed=3",), "kfac-bench try sets seed itself"),
    (("from=runs/a",), "kfac-bench try sets from itself"),
    (("++kfac.damping_freq=3",), "kfac-bench try sets kfac.damping_freq itself"),
    (("trainer.max_steps=3",), "kfac-bench try sets trainer.max_steps itself"),
    (("quick",), "quick: write an override as OPTION=VALUE"),
    (("trainer.dampign=1",), "trainer.dampign"),
    (("trainer.batch_size=601",), "is larger than the training set"),
    (("problem=other.py",), "name one problem"),
]


@pytest.mark.parametrize(("words", "line"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line_before_anything_runs(tmp_path, capsys, words, line):
    folder = tmp_path / "try"
    assert line in refused(capsys, written(tmp_path), f"--runs-dir={folder}", *words)
    assert not folder.exists()


def test_bad_files_are_one_line(tmp_path, capsys):
    assert "cannot be read" in refused(capsys, tmp_path / "none.py")
    broken = written(tmp_path, ("import torch\n", "import torchh\n"))
    assert "mine.py:1: ModuleNotFoundError" in refused(capsys, broken)


@pytest.mark.parametrize(("old", "new", "line"), [
    ("nn.Linear(8, 32)", "nn.Linear(9, 32)", "mine.py: the model or the loss fails on the first"),
    slow("target=0.93", "target=0.0", "the untrained model meets the target 0 already"),
])  # fmt: skip
def test_one_batch_is_tried_first(tmp_path, capsys, old, new, line):
    problem_file._files.clear()
    folder = tmp_path / "try"
    words = (written(tmp_path, (old, new)), f"--runs-dir={folder}", "trainer.threads=1")
    assert line in refused(capsys, *words)
    assert not folder.exists()


@pytest.mark.slow
def test_minutes_that_are_too_few_are_refused(tmp_path, capsys):
    folder = tmp_path / "try"
    said = refused(capsys, written(tmp_path), "--minutes=0.01", f"--runs-dir={folder}")
    assert "0.01 minutes are too few to mean anything" in said
    assert " is enough" in said
    assert not folder.exists()


def test_slurm_is_missing_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = (written(tmp_path), "--launcher=slurm", f"--runs-dir={tmp_path / 'try'}")
    assert "there is no sbatch on this machine" in refused(capsys, *words)
