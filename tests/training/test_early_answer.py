"""What kfac-train answers before it imports torch."""

import subprocess
import sys

import pytest

from kfac_bench.errors import UsageError
from kfac_bench.training import run_directory
from tests.support.runs import SMALL, before_step, config_of, terminate, train

TINY = (*SMALL, "kfac=none", "trainer.max_steps=2")
COMMAND = """
import sys
from kfac_bench import cli
try:
    getattr(cli, sys.argv[1])(sys.argv[2:])
except SystemExit as stop:
    print(stop.code, bool({"torch", "numpy"} & {*sys.modules}))
"""


def in_new_process(command, *arguments):
    """Return what a command prints, then its exit code, and whether torch or numpy is there."""
    words = [sys.executable, "-c", COMMAND, command, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def test_a_finished_run_answers_without_torch(tmp_path, monkeypatch):
    state = tmp_path / "state"
    _, path = train(tmp_path, *TINY[len(SMALL) :])
    monkeypatch.setenv("KFAC_STATE_FILE", str(state))
    done = in_new_process(
        "train", *TINY, "data=digits", f"runs_dir={tmp_path}", "trainer.log_freq=3"
    )
    first, *_, last = done.stdout.splitlines()
    assert first.startswith(f"{path} is complete (finished at step 2); for another run")
    assert (last, done.stderr) == ("0 False", "")
    assert state.read_text().split()[:2] == ["finished", "2"]


def test_another_option_or_an_interrupted_run_gets_no_early_answer(tmp_path, monkeypatch):
    options = ("kfac=none", "run_id=r")
    assert not run_directory.stop_if_complete(config_of(tmp_path, *options, "trainer.max_steps=2"))
    with before_step(2, terminate):
        train(tmp_path, *options, "trainer.max_steps=3")
    assert not run_directory.stop_if_complete(config_of(tmp_path, *options, "trainer.max_steps=3"))
    train(tmp_path, *options, "trainer.max_steps=3")
    assert run_directory.stop_if_complete(config_of(tmp_path, *options, "trainer.max_steps=3"))
    assert not run_directory.stop_if_complete(config_of(tmp_path, *options, "trainer.max_steps=4"))
    train(tmp_path, *options, "trainer.max_steps=4")  # the record has two values of an option now
    assert not run_directory.stop_if_complete(config_of(tmp_path, *options, "trainer.max_steps=3"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not run_directory.stop_if_complete(config_of(tmp_path, *options, "trainer.max_steps=3"))


@pytest.mark.parametrize("word", ["data=imagefolder data.root={}", "resume={}", "model.weights={}"])
def test_a_path_that_does_not_exist_is_one_line(tmp_path, word):
    missing = tmp_path / "missing"
    config = config_of(tmp_path, *word.format(missing).split())
    with pytest.raises(UsageError, match=rf"={missing}: no such file or folder"):
        run_directory.stop_if_complete(config)
    assert not [*tmp_path.iterdir()]


def test_a_run_with_a_checkpoint_of_its_own_needs_no_other_run(tmp_path):
    (tmp_path / "r" / "checkpoints" / "step-00000005").mkdir(parents=True)
    config = config_of(tmp_path, "run_id=r", f"resume={tmp_path / 'removed'}")
    assert not run_directory.stop_if_complete(config)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("train", ["data=imagefolder", "data.root=/none/here"]),
        ("bench", ["export", "/none/here"]),
        ("bench", ["compare", "/none/here"]),
        ("bench", ["profile", "/none/here"]),
        ("data", ["verify", "/none/here"]),
    ],
)
def test_a_wrong_path_is_refused_before_slow_imports(command, arguments):
    done = in_new_process(command, *arguments)
    assert done.stdout == "2 False\n"
    assert "/none/here" in done.stderr
    assert len(done.stderr.splitlines()) == 1
