"""`keep_freed_memory` spares a process page faults."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from kfac_bench.training.environment import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
for round in range(6):
    if round == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = [torch.ones(1 << 24) for _ in range(4)]  # 64 MiB each, mapped again by default
    del x
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how):
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip("no glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_freed_memory_is_kept():
    assert page_faults("keep") < 0.1 * page_faults("do not")
