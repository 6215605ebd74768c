"""What importing the package brings along, each time in a fresh process."""

import json
import subprocess
import sys

import pytest

import kfac_bench
from kfac_bench import core

HARNESS = ("hydra", "omegaconf", "wandb", "kfac_bench.config", "kfac_bench.training")


def modules_after(statement):
    """Names in ``sys.modules`` of a new process that has run ``statement``."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_package_needs_no_torch():
    modules = modules_after("import kfac_bench, kfac_bench.core, kfac_bench.core.planning.planner")
    assert "kfac_bench.core.planning.planner" in modules
    assert not modules & {"torch", "numpy", *HARNESS}


def test_importing_kfac_brings_no_part_of_the_harness():
    modules = modules_after("from kfac_bench import KFAC")
    assert "torch" in modules
    packages = {m.split(".")[1] for m in modules if m.startswith("kfac_bench.")}
    assert packages == {"core"}
    assert not modules & set(HARNESS)


def test_muon_brings_torch_alone():
    modules = modules_after("import kfac_bench; kfac_bench.muon")
    assert not modules & {"pytorch_optimizer", *HARNESS}


@pytest.mark.parametrize("name", ["train", "bench", "plan", "data"])
def test_a_command_without_its_extra_says_what_to_install(name):
    code = (
        f"import sys; sys.modules['omegaconf'] = None; from kfac_bench import cli; cli.{name}([])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    install = "in your clone of kfac_bench type pip install '.[train]'"
    line = f"kfac-{name}: omegaconf is not installed: {install}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_both_names_are_the_same_class():
    assert kfac_bench.KFAC is core.KFAC
    assert "KFAC" in dir(kfac_bench)
    assert "KFAC" in dir(core)
    assert not hasattr(kfac_bench, "SGD")
    assert not hasattr(core, "SGD")
