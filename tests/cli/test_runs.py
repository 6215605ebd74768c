"""``kfac-bench runs`` lists old runs, and removes only checkpoints that no run needs."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from kfac_bench import cli
from kfac_bench.record import own_files, run_list
from kfac_bench.record.event_log import JsonlSink
from kfac_bench.record.events import Resumed
from kfac_bench.training import checkpoint
from tests.support import ROOT
from tests.support.denied import deny_entering, deny_listing
from tests.support.runs import before_step, kill, train

OPTIONS = ("kfac=none", "trainer.predictions=0", "trainer.keep_last=9", "trainer.checkpoint_freq=3")


def call(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        cli.bench(["runs", *map(str, words)])
    assert stop.value.code == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with checkpoints at steps 3, 6, 9 and 12, and a killed run with step 3."""
    folder = tmp_path_factory.mktemp("trained")
    options = (*OPTIONS, "trainer.max_steps=12", "trainer.eval_freq=6", "trainer.keep_best=1")
    train(folder, *options, "run_id=whole")
    with before_step(5, kill), pytest.raises(RuntimeError):
        train(folder, *options, "run_id=killed")
    lines = (folder / "killed/events.jsonl").read_text().splitlines(keepends=True)
    # A process that is killed cannot write its last event.
    (folder / "killed/events.jsonl").write_text("".join(x for x in lines if "RunEnded" not in x))
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "runs")


def steps(run):
    return [int(p.name[5:]) for p in sorted(run.glob("checkpoints/step-*"))]


def flip(path):
    content = bytearray((path / "rank0.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "rank0.pt").write_bytes(content)


def test_list_leaves_out_cells_that_trained_nothing(runs, capsys):
    words = ["sec634_bert_interval", "--profile=paper", "--minutes", "0"]
    with pytest.raises(SystemExit):
        cli.bench(["run", *words, "--runs-dir", str(runs / "cells")])
    # Nothing has trained, so the next command is not one that draws curves.
    assert capsys.readouterr().out.endswith("   (the 4 cells left)\n")
    assert list(runs.glob("cells/*/events.jsonl"))
    assert call(capsys, "list", "--runs-dir", runs).splitlines()[-2].startswith("2 runs in ")


def test_list_shows_each_run(runs, capsys):
    os.utime(runs / "whole/events.jsonl", (0, 0))
    header, first, second, total, after = call(capsys, "list", "--runs-dir", runs).splitlines()
    assert header.split() == ["state", "step", "age", "size", "saved", "run"]
    assert re.fullmatch(r"killed +\d+ +[\d.]+ s +\d+\.\d kB +1 +killed", first)
    assert re.fullmatch(r"finished +12 +20\d\d\d d +\d+\.\d kB +4 +whole", second)
    assert total.startswith(f"2 runs in {runs}, ")
    assert after.startswith(f"next: kfac-bench runs prune --dry-run --runs-dir {runs} ")
    with own_files.locked(runs / "killed", 0.0, print):
        assert "\nrunning  " in call(capsys, "list", "--runs-dir", runs)


def test_prune_keeps_the_newest_and_the_best(runs, capsys):
    best = checkpoint.find_best(runs / "whole")[0].step
    kept = sorted({best, 12})
    tried = call(capsys, "prune", "--runs-dir", runs, "--dry-run")
    assert (steps(runs / "whole"), steps(runs / "killed")) == ([3, 6, 9, 12], [3])
    said = call(capsys, "prune", "--runs-dir", runs)
    assert (steps(runs / "whole"), steps(runs / "killed")) == (kept, [3])
    count = 4 - len(kept)
    assert re.search(rf"^{runs}/whole: removed {count} checkpoints, \d+\.\d kB$", said, re.M)
    assert re.search(rf"^freed \d+\.\d kB: {count} checkpoints of 1 run$", said, re.M)
    assert tried == said.replace("removed", "would remove").replace("freed", "would free")


def test_prune_keeps_as_many_best_ones_as_the_last_start_asked_for(runs, capsys):
    record = JsonlSink(runs / "whole/events.jsonl")
    record.write(Resumed(12, 1.0, "checkpoint", {}, {"trainer.keep_best": 2}))
    record.close()
    call(capsys, "prune", "--runs-dir", runs)
    assert steps(runs / "whole") == [6, 12], "both steps were evaluated"


def test_prune_never_removes_the_last_good_checkpoint(runs, capsys):
    flip(runs / "whole/checkpoints/step-00000012")
    flip(runs / "whole/checkpoints/step-00000009")
    (runs / "whole/events.jsonl").rename(runs / "events")
    text = (runs / "events").read_text()
    (runs / "whole/events.jsonl").write_text(text.replace('"keep_best": 1', '"keep_best": 0'))
    call(capsys, "prune", "--runs-dir", runs)
    assert steps(runs / "whole") == [6, 9, 12]
    flip(runs / "whole/checkpoints/step-00000006")
    said = call(capsys, "prune", "--runs-dir", runs)
    assert "left alone: " in said
    assert "no checkpoint is good" in said
    assert steps(runs / "whole") == [6, 9, 12]


def test_prune_leaves_running_young_and_foreign_runs_alone(runs, capsys, tmp_path):
    with own_files.locked(runs / "whole", 0.0, print):
        said = call(capsys, "prune", "--runs-dir", runs)
    assert "whole: the run is running" in said
    call(capsys, "prune", "--runs-dir", runs, "--older-than", 1)
    # Links lead out of the folder.
    (runs / "whole").rename(tmp_path / "elsewhere")
    (runs / "whole").symlink_to(tmp_path / "elsewhere")
    call(capsys, "prune", "--runs-dir", runs)
    (runs / "whole").unlink()
    (runs / "whole").mkdir()
    shutil.copy(tmp_path / "elsewhere/events.jsonl", runs / "whole")
    (runs / "whole/checkpoints").symlink_to(tmp_path / "elsewhere/checkpoints")
    assert "checkpoints: is a link" in call(capsys, "prune", "--runs-dir", runs)
    (runs / "whole/checkpoints").unlink()
    (runs / "whole/checkpoints").mkdir()
    for path in (tmp_path / "elsewhere/checkpoints").iterdir():
        (runs / "whole/checkpoints" / path.name).symlink_to(path)
    call(capsys, "prune", "--runs-dir", runs)
    assert steps(tmp_path / "elsewhere") == steps(runs / "whole") == [3, 6, 9, 12]


def test_prune_removes_unfinished_checkpoints_and_keeps_as_many_as_asked(runs, capsys):
    partial = runs / "killed/checkpoints/.step-00000006.0123abcd.partial"
    partial.mkdir()
    (partial / "rank0.pt").write_bytes(b"x" * 100)
    call(capsys, "prune", "--runs-dir", runs, "--keep", 3)
    assert steps(runs / "whole")[-3:] == [6, 9, 12]
    assert not partial.exists()
    assert steps(runs / "killed") == [3]


@pytest.mark.parametrize("action", ["list", "prune"])
def test_a_run_that_somebody_removes_meanwhile_is_passed_over(runs, capsys, monkeypatch, action):
    def found(root):
        for path in directories(root):
            if path.name == "killed":
                shutil.rmtree(path)
            yield path

    directories = run_list.directories
    monkeypatch.setattr(run_list, "directories", found)
    said = call(capsys, action, "--runs-dir", runs)
    assert "killed" not in said
    assert said.endswith(" of 1 run\n") if action == "prune" else "\n1 run in " in said


def test_runs_imports_no_torch(runs):
    code = (
        "import sys, kfac_bench.cli\n"
        "try: kfac_bench.cli.bench(['runs', sys.argv[1], '--runs-dir', sys.argv[2]])\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    for action in ("list", "prune"):
        command = [sys.executable, "-c", code, action, str(runs)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.stderr == "0 False\n"


def test_a_run_that_cannot_be_read_is_shown(runs, capsys):
    (runs / "whole/events.jsonl").write_text("\x1b[31m{}\n{}\n")
    said = call(capsys, "list", "--runs-dir", runs)
    assert re.search(r"^unreadable +0 ", said, re.M)
    assert "\x1b" not in said
    (runs / "whole/.lock").unlink(missing_ok=True)
    (runs / "whole/.lock").symlink_to(runs / "killed/events.jsonl")
    assert ".lock: is a link" in call(capsys, "prune", "--runs-dir", runs)


@pytest.mark.parametrize(("name", "deny"), [("killed", deny_entering), ("private", deny_listing)])
def test_a_folder_that_this_user_may_not_read_is_shown(runs, monkeypatch, capsys, name, deny):
    (runs / name).mkdir(exist_ok=True)
    deny(monkeypatch, runs / name)
    said = call(capsys, "list", "--runs-dir", runs)
    assert re.search(rf"^unreadable +0 +0.0 s +0.0 kB +0 +{name}$", said, re.M)
    assert f"left alone: {runs / name}" in call(capsys, "prune", "--runs-dir", runs)
