"""What importing the package brings along, each time in a fresh process."""

import json
import subprocess
import sys

import pytest

import kfac_bench
from kfac_bench import core

HARNESS = ("hydra", "omegaconf", "wandb", "kfac_bench.config", "kfac_bench.training")


def modules_after(*statements):
    """Names in ``sys.modules`` of a new process after each of the statements."""
    shown = "\nprint(json.dumps(sorted(sys.modules)))\n"
    code = f"import json, sys\n{shown.join(statements)}{shown}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_importing_the_package_needs_no_torch():
    [modules] = modules_after("import kfac_bench.core, kfac_bench.core.planning.planner")
    assert "kfac_bench.core.planning.planner" in modules
    assert not modules & {"torch", "numpy", *HARNESS}


def test_kfac_and_muon_bring_no_part_of_the_harness():
    kfac, muon = modules_after("from kfac_bench import KFAC", "import kfac_bench; kfac_bench.muon")
    assert "torch" in kfac
    packages = {m.split(".")[1] for m in kfac if m.startswith("kfac_bench.")}
    assert packages == {"core"}
    assert not muon & {"pytorch_optimizer", *HARNESS}


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
