"""The settings of a command for the C library and for OpenMP."""

import os
import subprocess
import sys

import pytest

from kfac_bench import cli

PROGRAM = """
import resource, sys, torch
from kfac_bench.training.environment import keep_freed_memory

def page_faults():
    for round in range(9):
        if round == 6:  # with torch 2.6 the heap grows in the first five
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        x = [torch.ones(1 << 24) for _ in range(4)]  # 64 MiB each, mapped again by default
        del x
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

by_default = page_faults()
print(by_default, page_faults() if keep_freed_memory() else "no glibc")
"""


@pytest.mark.slow
def test_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_default, _, kept = done.stdout.strip().partition(" ")
    if kept == "no glibc":
        pytest.skip("no glibc")
    assert int(kept) < 0.1 * int(by_default)


def test_waiting_threads_of_a_command_sleep_soon(tmp_path):
    program = "from kfac_bench import cli; cli.plan(['model=resnet8', 'data=digits'])"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=kept | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has no GNU OpenMP")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}])
def test_what_the_user_says_of_waiting_threads_stays(given, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(given))
        cli._sleep_sooner()
        assert os.environ == given
