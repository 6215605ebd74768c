"""`keep_freed_memory` spares a process page faults."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from kfac_bench.training.environment import keep_freed_memory

def page_faults():
    for round in range(6):
        if round == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        x = [torch.ones(1 << 24) for _ in range(4)]  # 64 MiB each, mapped again by default
        del x
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

by_default = page_faults()
print(by_default, page_faults() if keep_freed_memory() else "no glibc")
"""


def test_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_default, _, kept = done.stdout.strip().partition(" ")
    if kept == "no glibc":
        pytest.skip("no glibc")
    assert int(kept) < 0.1 * int(by_default)
