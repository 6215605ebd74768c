"""The examples of CONTRIBUTING.md, followed word for word in a copy of the repository, train."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kfac_bench.record.events import Evaluated, RunEnded, read
from tests.support import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FEW_STEPS = ["trainer.batch_size=100", "trainer.max_steps=40", "logger=none", "run_id=r"]


def section(title):
    """Return the text below a heading of CONTRIBUTING.md, up to the next heading."""
    return re.search(rf"^### {title}$\n(.*?)(?=^##)", TEXT, re.DOTALL | re.MULTILINE)[1]


def block(text, introduction):
    """Return the code block that follows a line of the text."""
    return re.search(rf"^{introduction}:\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]


def test_the_numbers_of_files_are_those_of_the_package():
    package, core = (
        len(list((ROOT / folder).rglob("*.py"))) for folder in ("kfac_bench", "kfac_bench/core")
    )
    assert f"The package has {package} files (goal: 260) and the core {core} (goal: 50)" in TEXT


def follow(text, repository):
    """Do what a section says: add its class and row, write its YAML file; return its commands."""
    [yaml_file] = re.findall(r"^`(\S+)`:$", text, re.MULTILINE)
    assert not (repository / yaml_file).exists()
    (repository / yaml_file).write_text(block(text, f"`{re.escape(yaml_file)}`"))
    introduction, options = re.search(r"^(A class of `(\S+)`):$", text, re.MULTILINE).groups()
    before, opening, rest = re.split(
        r"(^CHOICES: .* = {$\n)", (repository / options).read_text(), flags=re.MULTILINE
    )
    row = block(text, "A row of `CHOICES` in the same file")
    added = f"{before}{block(text, introduction)}\n\n{opening}{row}{rest}"
    (repository / options).write_text(added)
    lines = block(text, "Train (?:it, and print its options|a model on it)").splitlines()
    return (yaml_file, options), [shlex.split(line) for line in lines]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return a copy of the package and of conf/."""
    copy = tmp_path_factory.mktemp("repository")
    for folder in ("kfac_bench", "conf"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    return copy


def kfac_train(repository, arguments):
    """Run kfac-train on the copy, and return what it prints."""
    command = [sys.executable, "-m", "kfac_bench", *arguments]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("title", "option"),
    [("A new model", ("model", "width", 32)), ("A new dataset", ("data", "contrast", 1.0))],
)
@pytest.mark.slow
def test_the_example_trains_and_learns(repository, tmp_path, title, option):
    (yaml_file, options), (train, show) = follow(section(title), repository)
    assert train[0] == show[0] == "kfac-train"
    kfac_train(repository, [*train[1:], *FEW_STEPS, f"runs_dir={tmp_path}"])
    run = tmp_path / "r"
    events = read(run)
    assert [e.status for e in events if isinstance(e, RunEnded)] == ["finished"]
    assert [e for e in events if isinstance(e, Evaluated)][-1].metrics["accuracy"] > 0.8
    group, name, value = option
    chosen = yaml.safe_load((run / "config.yaml").read_text())[group]
    assert (chosen["name"], chosen[name]) == (Path(yaml_file).stem, value)
    assert f"{name}:" in kfac_train(repository, show[1:])
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--config", ROOT / "pyproject.toml"]
    subprocess.run([*ruff, options], cwd=repository, check=True)
