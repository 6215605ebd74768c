"""Loggers as a list, W&B's variables as options, and `from=FILE`, the options of an earlier run."""

from dataclasses import asdict

import pytest

from kfac_bench.config import compose, options
from kfac_bench.config.train import LOGGERS
from kfac_bench.training.run_directory import run_id
from tests.support import ROOT
from tests.support.configs import Own, quick_load, refused

SMALL = ["model=autoencoder", "optimizer.lr=0.02", "kfac.skip=[fc]", "seed=3"]


def loggers(found):
    return [name for name in LOGGERS if getattr(found.logger, name)]


def test_each_logger_has_a_row_a_file_and_an_option():
    names = {name for name, value, _ in options(compose.load([])) if name.startswith("logger.")}
    assert {f"logger.{name}" for name in LOGGERS} <= names
    assert compose.options_of("logger") == sorted([*LOGGERS, "none"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["wandb"]),
        (["logger=csv"], ["csv"]),
        (["logger=[wandb,tensorboard,csv]"], ["csv", "tensorboard", "wandb"]),
        (["logger.csv=true"], ["csv", "wandb"]),
        (["logger=[]"], []),
        (["logger=null"], []),
        (["logger=none"], []),
    ],
)
def test_loggers_are_those_that_the_command_line_names(words, expected):
    assert loggers(compose.load(words)) == expected


def test_a_file_chooses_loggers(tmp_path):
    own = Own(tmp_path)
    own.write("two", "# @package _global_\ndefaults: [override /logger: [csv, tensorboard]]\n")
    own.write("none", "# @package _global_\ndefaults: [override /logger: null]\n")
    assert loggers(own.load("experiment=two")) == ["csv", "tensorboard"]
    assert loggers(own.load("experiment=none")) == []


def test_loggers_are_no_part_of_the_run_id():
    ids = {run_id(compose.load(words)) for words in ([], ["logger=[csv]", "logger.id=x"])}
    assert len(ids) == 1


def test_variables_of_wandb_fill_options(monkeypatch):
    for name in ("PROJECT", "ENTITY", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    assert compose.load([]).logger.project == "kfac_bench"
    for name in ("PROJECT", "ENTITY", "RUN_ID"):
        monkeypatch.setenv(f"WANDB_{name}", f"my-{name}")
    logger = compose.load(["logger.entity=me"]).logger
    assert (logger.project, logger.entity, logger.id) == ("my-PROJECT", "me", "my-RUN_ID")
    assert compose.load(["logger=csv"]).logger.project is None


# ---- from=FILE ----


def written(folder, *words):
    file = folder / "config.yaml"
    file.write_text(compose.to_yaml(compose.load([*SMALL, *words])))
    return file


@pytest.mark.parametrize("more", [["logger=[csv]"], ["optimizer=adam", "kfac=none", "run_id=a"]])
def test_a_run_starts_again_from_its_config_file(tmp_path, more):
    file = written(tmp_path, *more)
    again = compose.load([f"from={file}"])
    assert asdict(again) == asdict(compose.load([*SMALL, *more]))
    assert compose.load([f"from={tmp_path}"]) == again


def test_words_win_over_the_file_and_a_choice_replaces_its_group(tmp_path):
    file = written(tmp_path)
    found = compose.load([f"from={file}", "optimizer=adam", "seed=4", "logger=csv"])
    expected = compose.load([*SMALL[:1], *SMALL[2:], "optimizer=adam", "seed=4", "logger=csv"])
    assert asdict(found) == asdict(expected)


def test_another_run_has_a_page_of_its_own_in_wandb(tmp_path):
    file = written(tmp_path, "logger=wandb", "logger.id=old")
    for words, id in (
        ([], "old"),
        (["trainer.max_steps=90", "trainer.device=cpu"], "old"),  # the same run goes on
        (["seed=7"], None),
        (["optimizer=adam"], None),
        (["run_id=other"], None),
        (["seed=7", "logger.id=new"], "new"),
    ):
        assert compose.load([f"from={file}", *words]).logger.id == id, words


def test_a_file_of_an_older_version_has_one_logger(tmp_path):
    file = written(tmp_path, "logger=none")
    text = file.read_text()
    start, end = text.index("logger:"), text.index("seed:")
    old = "logger: {name: tensorboard, mode: auto, project: kfac_bench, entity: null}\n"
    file.write_text(text[:start] + old + text[end:])
    assert loggers(compose.load([f"from={file}"])) == ["tensorboard"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["from=/no/such"], "from=/no/such: cannot be read (No such file or directory). Give the"),
        (["from=a", "from=b"], "from=a and from=b: name one file"),
        (["from=a", "experiment=digits/resnet"], "from=a and experiment=: the file has all"),
        ([f"from={ROOT / 'conf/train.yaml'}"], "this is not the config.yaml of a run"),
        ([f"from={ROOT / 'README.md'}"], "not valid YAML"),
    ],
)
def test_what_is_no_config_file_is_refused(words, said):
    assert said in refused(words)


def test_a_file_of_another_version_with_an_unknown_option_is_refused(tmp_path):
    file = written(tmp_path)
    file.write_text(file.read_text().replace("  lr: 0.02", "  lr: 0.02\n  warmth: 3"))
    said = refused([f"from={file}"])
    assert said.startswith("the file that from= names: optimizer.warmth: no such option")


def test_a_problem_still_needs_its_word(tmp_path, monkeypatch):
    from kfac_bench.config import problem_file

    word = f"problem={ROOT / 'examples/problems/digits.py'}"
    problem_file.run_named([word])
    first = compose.load([word, "trainer.batch_size=7"])
    file = tmp_path / "config.yaml"
    file.write_text(compose.to_yaml(first))
    assert asdict(compose.load([f"from={file}", word])) == asdict(first)
    monkeypatch.setattr(problem_file, "_files", {})
    assert "add problem=" in refused([f"from={file}"])


def test_quick_load_is_the_same_for_loggers():
    assert quick_load(["logger=csv"]) == compose.load(["logger=csv"])
