"""Settings of all tests, shared fixtures, and the record of what backends support."""

import gc
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.support.wandb_here import fresh_wandb as fresh_wandb
from tests.support.wandb_here import stand_in as stand_in

# Tensors are tiny: a second thread would only wait. The variable is for programs that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# pytest imports readline, and readline exports the width of a terminal to the workers of
# pytest-xdist. Programs that a test starts on a terminal of its own must ask that terminal.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
# A shell starts background commands with these two ignored, and programs that a test starts would
# ignore them too.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


settings.register_profile("quick", max_examples=15)
settings.register_profile("long", max_examples=20_000)


@pytest.fixture(autouse=True)
def quick_composition(monkeypatch):
    """Compose each set of choices once in a process. tests/config composes as users do."""
    # Nothing has imported it where no test composes, and where Hydra is not installed.
    if (compose := sys.modules.get("kfac_bench.config.compose")) is not None:
        from tests.support.configs import quick_load

        monkeypatch.setattr(compose, "load", quick_load)


@pytest.fixture(autouse=True)
def forgotten_problems(monkeypatch):
    """Forget the problem files of a test after it: the runs that a process starts run all of them.

    Those with a relative path would not be found from the folder of another test.
    """
    if (problem_file := sys.modules.get("kfac_bench.config.problem_file")) is not None:
        monkeypatch.setattr(problem_file, "_files", {**problem_file._files})


@pytest.fixture
def double():
    """The same random numbers, in float64; no hook outlives the test."""
    from tests.support.layer_checks import MADE

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    for kfac in MADE:
        kfac.detach()


_outcomes = defaultdict(set)
"""Outcomes of the tests that show a feature, by (backend, feature)."""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep modules and tests out of all garbage collections, which would visit each of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collectstart(collector):
    """Tensors that a test file makes when it is imported are the same in each collection."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


def pytest_configure(config):
    """Try fewer examples of property tests in the quick run, which leaves out slow tests."""
    has_profile = config.getoption("--hypothesis-profile", None)
    if "not slow" in config.option.markexpr and not has_profile:
        settings.load_profile("quick")


def pytest_addoption(parser):
    parser.addoption("--support", type=Path, help="write what tests marked supports show: JSON")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for mark in item.iter_markers("supports"):
        # A user property travels with the report from a worker of pytest-xdist to the controller.
        report.user_properties.append(("supports", [arg.format(**params) for arg in mark.args]))
    return report


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        for name, value in report.user_properties:
            if name == "supports":
                _outcomes[tuple(value)].add(report.outcome)


def pytest_sessionfinish(session):
    path = session.config.getoption("--support")
    is_worker = hasattr(session.config, "workerinput")
    if path is not None and not is_worker:
        table = defaultdict(dict)
        for (backend, feature), outcomes in _outcomes.items():
            table[backend][feature] = "passed" if outcomes == {"passed"} else "failed"
            if outcomes == {"skipped"}:
                table[backend][feature] = "skipped"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
