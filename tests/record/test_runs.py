"""runs.py: which runs are repeats of one setting, and so one row of a table."""

import copy
from pathlib import Path
from typing import Any

import pytest

from kfac_bench.record import runs
from kfac_bench.record.events import RunStarted

CONFIG: dict[str, Any] = {
    "data": {"name": "digits", "root": None, "image_size": 8, "workers": 0},
    "model": {"name": "resnet8", "weights": None},
    "optimizer": {"name": "adam", "lr": 0.1, "beta2": 0.999},
    "schedule": {"name": "constant"},
    "kfac": {"enabled": True, "strategy": "comm_opt", "damping": 0.003},
    "trainer": {
        "batch_size": 256,
        "max_steps": None,
        "target": 0.97,
        "eval_freq": None,
        "predictions": 8,
        "device": "auto",
        "threads": None,
        "pin": False,
    },
    "backend": {"name": "ddp", "timeout_s": 600.0},
    "logger": {"name": "wandb", "mode": "auto"},
    "label": None,
    "seed": 0,
    "resume": None,
}
DELETED = object()


def run(world_size: int = 1, **changes: Any) -> runs.Run:
    """Return a run of ``CONFIG`` with changes such as ``trainer__target=0.9``."""
    config = copy.deepcopy(CONFIG)
    for name, value in changes.items():
        *groups, key = name.split("__")
        section = config
        for group in groups:
            section = section.setdefault(group, {})
        if value is DELETED:
            del section[key]
        else:
            section[key] = value
    started = RunStarted(0, 0.0, "r", "accuracy", True, config, {"world_size": world_size})
    path = Path(f"/runs/{world_size}-{sorted(map(str, changes.items()))}")
    return runs.Run(path, started, (started,))


def rows(*found: runs.Run) -> list[int]:
    """Return the number of runs of each row."""
    return [len(setting.runs) for setting in runs.group(found)]


@pytest.mark.parametrize(
    "changes",
    [
        {"data__root": "/elsewhere"},
        {"resume": "runs/a"},
        {"trainer__predictions": 0},
        {"trainer__predictions": DELETED},
        {"logger__name": "none", "logger__mode": "offline"},
        {"logger": DELETED},
        {"backend__timeout_s": 60.0},
        {"label": "mine"},
    ],
)
def test_place_and_record_options_do_not_separate_rows(changes: dict[str, Any]) -> None:
    assert rows(run(), run(seed=1, **changes), run(seed=2)) == [3]


@pytest.mark.parametrize(
    "changes",
    [
        {"kfac__damping": 0.01},
        {"kfac__strategy": "mem_opt"},
        {"data__workers": 2},
        {"trainer__device": "cpu"},
        {"trainer__threads": 1},
        {"trainer__pin": True},
        {"trainer__max_steps": 5},
        {"trainer__target": 0.9},
        {"trainer__eval_freq": 5},
        {"backend__name": "fsdp2"},
    ],
)
def test_result_options_separate_rows(changes: dict[str, Any]) -> None:
    assert rows(run(), run(seed=1), run(seed=2, **changes)) in ([2, 1], [1, 2])


def test_runs_on_other_numbers_of_ranks_are_other_rows() -> None:
    settings = runs.group([run(), run(seed=1), run(8), run(8, seed=1)])
    assert [s.optimizer for s in settings] == [
        "K-FAC + Adam (world_size 1)",
        "K-FAC + Adam (world_size 8)",
    ]
    assert [len(s.runs) for s in settings] == [2, 2]


def test_an_option_that_this_version_does_not_know_separates_rows() -> None:
    assert rows(run(), run(seed=1, trainer__predictions_of_later=1)) == [1, 1]
    assert rows(run(), run(seed=1, logger_of_later="x")) == [1, 1]
    assert rows(run(seed_of_later=1), run(seed=1, seed_of_later=1)) == [2]


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("trainer__drop_last", True, False),
        ("kfac__skip", ["Norm", "Embedding"], []),
        ("optimizer__eps", 1e-8, 1e-6),
        ("schedule__warmup_epochs", 0.0, 2.0),
    ],
)
def test_an_old_run_without_an_option_has_its_default(name: str, default: Any, other: Any) -> None:
    old, new = run(), run(seed=1, **{name: default})
    assert rows(old, new) == [2]
    assert rows(run(seed=2, **{name: other}), old, new) in ([1, 2], [2, 1])


def test_an_option_that_another_choice_has_is_not_added() -> None:
    settings = runs.group([run(), run(schedule__name="step", schedule__gamma=0.1)])
    assert [s.optimizer for s in settings] == [
        "K-FAC + Adam (gamma 0.1, milestones [30.0, 60.0, 80.0], name step)",
        "K-FAC + Adam (gamma unset, milestones unset, name constant)",
    ]
    off = run(kfac__enabled=False)
    assert all("kfac.damping" not in s.options for s in runs.group([off]))
    assert "kfac.damping" not in runs.group([run(), off])[0].options
