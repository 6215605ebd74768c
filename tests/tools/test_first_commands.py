"""The commands of docs/lab/first_commands.md, read from the page, run with and without K-FAC."""

import json
import os
import re
from types import SimpleNamespace

import pytest

from benchmarks import first_commands
from benchmarks.first_commands import Measured, measure
from kfac_bench import cli
from tests.support import ROOT, forks
from tests.support.configs import quick_load

COMMANDS = {command.split()[1]: command for command in first_commands.commands()}
TRAIN = {name: command for name, command in COMMANDS.items() if command.startswith("kfac-train")}
MOVED = "python examples/moved_script.py"


def test_the_page_has_a_command_for_each_library():
    assert [*COMMANDS] == [
        *("model=timm", "model=torchvision", "model=huggingface"),
        *("examples/lightning_training.py", "examples/moved_script.py"),
    ]
    for command in TRAIN.values():
        quick_load([*command.split()[1:], "kfac=none"])


def train_forked(command, **_):
    """Run ``python -m kfac_bench ...`` in a fork, which needs no imports, instead of a process."""
    forks.call(train_in_fork, os.getcwd(), command[3:])


def train_in_fork(folder, words):
    os.chdir(folder)
    with pytest.raises(SystemExit) as stop:
        cli.train(words)
    assert stop.value.code == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAIN.values(), ids=TRAIN)
def test_a_command_of_the_page_trains(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forking = SimpleNamespace(run=train_forked, DEVNULL=None)
    monkeypatch.setattr(first_commands, "subprocess", forking)
    first_commands.prepare()
    # One decomposition of ResNet-18's factors of 4608 rows takes longer than all steps.
    steps = 1 if "model=torchvision" in command else 3
    short = re.sub(r"max_steps=\d+", f"max_steps={steps}", command)
    ours = measure(short, 0, kfac=True).curve
    assert ours.steps == [*range(steps + 1)]
    if "model=timm" in command:
        without = measure(short, 0, kfac=False).curve
        assert without.metric[0] == ours.metric[0], "the same weights"
        assert without.metric[-1] != ours.metric[-1]


@pytest.mark.filterwarnings("ignore")  # Lightning says much about this machine
@pytest.mark.parametrize(
    "script", [MOVED, pytest.param("python examples/lightning_training.py", marks=pytest.mark.slow)]
)
def test_a_script_of_the_page_learns_with_and_without_kfac(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [measure(script, 0, kfac=kfac) for kfac in (False, True)]
    for run in runs:
        assert (run.optimizer, run.rate) == ("sgd", 0.1)
        assert run.curve.metric[-1] < 15
        assert len(run.curve.steps) == len(run.curve.seconds) == len(run.curve.metric)
    assert runs[0].curve.metric != runs[1].curve.metric


def test_the_moved_script_has_the_line_of_the_guide():
    page = (ROOT / "docs/how-to/coming_from.md").read_text()
    (line,) = re.findall(r"^.*preset=\"paper\".*$", page, re.MULTILINE)
    assert line in (ROOT / "examples/moved_script.py").read_text().splitlines()


def test_the_page_has_the_table_of_the_finished_runs():
    table = [*first_commands.table(first_commands.read(first_commands.RESULTS))]
    assert "\n".join(table) in first_commands.PAGE.read_text()
    assert len(table) == 1 + len(COMMANDS)


def test_a_finished_pair_does_not_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_commands, "prepare", lambda: None)
    monkeypatch.setattr(first_commands, "commands", lambda: [MOVED])
    seen = []

    def train(command, seed, *, kfac):
        seen.append((seed, kfac))
        return Measured("sgd", 0.1, first_commands.Curve([0, 5], [0.0, 2.0], [90.0, 50.0 - kfac]))

    monkeypatch.setattr(first_commands, "measure", train)
    for seeds in ((0,), (0, 1)):
        first_commands.run_missing(tmp_path / "r.jsonl", seeds)
    assert seen == [(0, False), (0, True), (1, False), (1, True)]
    assert len([*map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())]) == 4
    *_, row = first_commands.table(first_commands.read(tmp_path / "r.jsonl"))
    assert row.startswith("| moved_script.py | sgd 0.1 | 50 (50 to 50) | 49 (49 to 49) |")
