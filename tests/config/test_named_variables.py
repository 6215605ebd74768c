"""An environment variable enters a configuration only if the command line names it."""

import os

import pytest

from kfac_bench import cli
from kfac_bench.config import compose, named_variables
from kfac_bench.errors import UsageError

SECRET = "hunter2-of-the-test"
WORDS = ["model=autoencoder", "logger=none"]


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("MY_SECRET", SECRET)
    monkeypatch.setattr(named_variables, "_named", set())


def received(folder, text):
    """Write an experiment of somebody else, and return the words that choose it."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    return ["experiment=mine", *WORDS]


SLOW = pytest.mark.slow

FILES = [
    "run_id: ${oc.env:MY_SECRET}",
    "run_id: a-${oc.env:MY_SECRET,none}",
    "run_id: ${oc.decode:${oc.env:MY_SECRET}}",
    "runs_dir: oc.env\nrun_id: ${${runs_dir}:MY_SECRET}",
    "runs_dir: MY_SECRET\nrun_id: ${oc.env:${runs_dir}}",
    "defaults:\n  - override /model: ${oc.env:MY_SECRET}",
]


@pytest.mark.parametrize("text", FILES)
@pytest.mark.parametrize("more", [["--cfg", "job"], pytest.param(["--multirun"], marks=SLOW)])
def test_a_received_file_cannot_read_the_environment(tmp_path, capsys, text, more):
    words = received(tmp_path, text)
    with pytest.raises(SystemExit) as caught:
        cli.train([*words[:1], "logger=none", f"--config-dir={tmp_path}", *more])
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert said.err.count("\n") == 1, said.err
    assert SECRET not in said.err + said.out


def test_the_line_names_option_and_variable(tmp_path):
    with pytest.raises(UsageError) as caught:
        compose.load(received(tmp_path, FILES[0]), tmp_path)
    assert "run_id" in str(caught.value)
    assert "environment variable 'MY_SECRET', but your command line does not" in str(caught.value)


def test_the_command_line_may_name_a_variable(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.train([*WORDS, "run_id='${oc.env:MY_SECRET}'", "--cfg", "job"])
    said = capsys.readouterr()
    assert caught.value.code == 0, said.err
    assert f"run_id: {SECRET}\n" in said.out


def test_a_named_variable_permits_no_other_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    named_variables.allow(["data.root='${oc.env:SCRATCH}'"])
    assert compose.load([*WORDS, "runs_dir='${oc.env:SCRATCH}'"]).runs_dir == "/scratch"
    with pytest.raises(UsageError, match="'MY_SECRET'"):
        compose.load(received(tmp_path, FILES[0]), tmp_path)


def test_a_default_is_for_a_variable_that_is_not_set():
    named_variables.allow(["${oc.env:NO_SUCH_VARIABLE,x}"])
    assert compose.load([*WORDS, "runs_dir='${oc.env:NO_SUCH_VARIABLE,x}'"]).runs_dir == "x"
    with pytest.raises(UsageError, match="'NO_SUCH_VARIABLE' is not set"):
        compose.load([*WORDS, "runs_dir='${oc.env:NO_SUCH_VARIABLE}'"])


def test_other_resolvers_tell_nothing_about_the_machine(tmp_path):
    with pytest.raises(UsageError, match="run_id: ValueError raised while resolving"):
        compose.load(received(tmp_path, "run_id: ${hydra:runtime.cwd}"), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "hydra:\n  callbacks:\n    evil: {{_target_: builtins.open, file: {path}, mode: w}}",
        "hydra: {{job_logging: {{handlers: {{x: {{(): builtins.open, file: {path}, mode: w}}}}}}}}",
        "hydra:\n  job:\n    env_set: {{MY_SECRET: other}}",
    ],
)
def test_a_sweep_runs_no_code_of_a_received_file(tmp_path, capsys, text):
    trap = tmp_path / "executed"
    words = received(tmp_path, text.format(path=trap) + "\ndry_run: true")
    with pytest.raises(SystemExit) as caught:
        cli.train([*words, "seed=0,1", f"--config-dir={tmp_path}", "--multirun"])
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert "options of Hydra itself have no effect" in said.err
    assert not trap.exists()


def test_a_received_run_directory_reads_no_variable(tmp_path, capsys):
    """The line that compares the options of two starts shows the text of the file."""
    folder = tmp_path / "r"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "config.yaml").write_text("data: {name: '${oc.env:MY_SECRET}'}\n")
    with pytest.raises(SystemExit) as caught:
        cli.train([*WORDS, f"runs_dir={tmp_path}", "run_id=r"])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert "data.name=${oc.env:MY_SECRET}" in said
    assert SECRET not in said


def test_aliases_in_a_received_run_directory_are_refused(tmp_path, capsys):
    folder = tmp_path / "r"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    (folder / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(SystemExit) as caught:
        cli.train([*WORDS, f"runs_dir={tmp_path}", "run_id=r"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "config.yaml: cannot be read (line 2: YAML aliases are not allowed" in said


@pytest.mark.parametrize("name", ["experiment/mine.yaml", "elsewhere/other.yaml"])
def test_aliases_in_a_received_folder_of_configurations_are_refused(tmp_path, capsys, name):
    experiment = tmp_path / "conf" / "experiment" / "mine.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\ndefaults: [/elsewhere/other]\n")
    # Hydra lists what is there, but opens no FIFO.
    os.mkfifo(experiment.parent / "fifo.yaml")
    path = tmp_path / "conf" / name
    path.parent.mkdir(exist_ok=True)
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 30)]
    path.write_text("\n".join(lines))
    with pytest.raises(SystemExit) as caught:
        cli.train([*WORDS, "--config-dir", str(tmp_path / "conf"), "experiment=mine"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"{path}: line 2: YAML aliases are not allowed. Write the value out" in said
