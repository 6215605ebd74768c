"""docs/how-to/training_frameworks.md shows lines of examples/; frameworks may be missing."""

import importlib
import re
import runpy
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT
from tests.support.examples import run_on_ranks

PAGE = (ROOT / "docs/how-to/training_frameworks.md").read_text()
SHOWN = re.findall(r"/(\w+\.py)\) is a complete .*?:\n\n```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_lines_of_the_page_are_those_of_the_files():
    assert len(SHOWN) == PAGE.count("```python") == 5
    for name, block in SHOWN:
        lines = (ROOT / "examples" / name).read_text().splitlines()
        assert "(1)" in block
        assert {*block.splitlines()} <= {*lines, ""}, f"the page shows other lines than {name}"
        assert len(lines) <= 30, name


@pytest.mark.parametrize(
    ("module", "missing", "message"),
    [
        ("huggingface", ["transformers"], "pip install 'transformers>=.*' 'accelerate>="),
        ("lightning", ["lightning.pytorch", "pytorch_lightning"], "pip install 'lightning>="),
        ("accelerate", ["accelerate"], "pip install 'accelerate>="),
    ],
)
def test_a_missing_framework_is_named(module, missing, message, monkeypatch):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    name = f"kfac_bench.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=f"{name} needs .*{message}"):
        importlib.import_module(name)


def test_the_package_imports_no_framework():
    code = (
        "import sys, kfac_bench.integrations; "
        "print({'torch', 'transformers', 'accelerate', 'lightning', 'timm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_the_tagging_problem_reads_modules_that_are_packages():
    """Such as zipfile from Python 3.12 on."""
    text, kinds = runpy.run_path(str(ROOT / "examples/unseen/tag.py"))["tagged"]("json")
    assert len(text) == len(kinds)
    assert set(kinds) == set(range(7))


def test_the_heat_equation_has_the_solution_that_errors_are_measured_against(double):
    example = runpy.run_path(str(ROOT / "examples/physics_informed.py"))
    error = example["residual"](example["exact"], torch.rand(50, 2))
    torch.testing.assert_close(error, torch.zeros(50, 1))
    for name, settings in example["SETTINGS"].items():
        size, steps = example["train"](name, settings[1], 0, 0.1)
        assert 0 < size < 10
        assert steps > 0, name


@pytest.mark.slow
@pytest.mark.ranks
def test_the_plain_example_runs_and_learns():
    """On two ranks: both have the same weights, so both print the same loss."""
    losses = re.findall(r"loss ([\d.]+)", run_on_ranks("plain_training.py"))
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert float(losses[0]) < 0.5
