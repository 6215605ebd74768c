"""Forked runs start from the server of all tests: a process has one."""

from kfac_bench.benchmark import local_runs
from tests.support import forks

local_runs.PRELOAD = forks.PRELOAD
