"""Fixtures with a real Slurm of two nodes on this machine, for `make slurm-test`."""

import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import DOWN, RUN, TWO_NODES, UP, Cluster

NOT_HERE = 77
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""The number of this worker of pytest-xdist. Each worker has a cluster of its own."""
SETTINGS = {
    "SLURM_TEST_GRACE": "60",
    "SLURM_TEST_KILLWAIT": "30",
    # Another cluster on this machine may have nodes, and so cgroups, of the same names.
    "SLURM_TEST_CGROUP": "0",
    "SLURM_TEST_PORT": str(random.randrange(17000, 29000, 100) + 10 * (WORKER % 10)),
}
# The ranks of a job meet at a port that follows from the job's number. So the numbers of the
# workers' clusters, which share the ports of this machine, must differ.
FIRST_JOB = f"FirstJobId={1 + 500 * WORKER}\n"


def pytest_collection_modifyitems(items):
    """Start the longest test first, so that no worker waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_try.py")


@pytest.fixture(scope="session")
def nodes():
    """Return the cluster's state directory, whose path must be short and open to munge."""
    state = Path(tempfile.mkdtemp(prefix="kfac-slurm-"))
    state.chmod(0o755)
    extra = state / "extra.conf"
    extra.write_text(FIRST_JOB)
    env = os.environ | SETTINGS
    env |= {"SLURM_TEST_DIR": str(state), "SLURM_TEST_EXTRA_CONF": str(extra)}
    up = subprocess.run([UP], env=env, capture_output=True, text=True, timeout=280)
    if up.returncode == NOT_HERE:
        pytest.skip(f"NO SLURM HERE, SO SLURM WAS NOT TESTED: {up.stderr.strip()}")
    assert up.returncode == 0, up.stderr
    yield state
    down = subprocess.run([DOWN, "--purge"], env=env, capture_output=True, text=True, timeout=120)
    shutil.rmtree(state, ignore_errors=True)
    assert down.returncode == 0, down.stderr


@pytest.fixture
def cluster(nodes, tmp_path):
    """Return the cluster. At the end of a test no job is left and both nodes are up."""
    cluster = Cluster(nodes, tmp_path)
    yield cluster
    for job in cluster("squeue", "--noheader", "--format=%A").split():
        cluster("scancel", job, check=False)
    idle = cluster("sinfo", "--noheader", "--partition=main", "--states=all", "--format=%T")
    assert "down" not in idle, idle


@pytest.fixture(scope="session")
def straight(nodes, tmp_path_factory):
    """Run `RUN` on two nodes without any disturbance, and return its run directory."""
    cluster = Cluster(nodes, tmp_path_factory.mktemp("straight"))
    job = cluster.submit("resnet32_cifar10", *RUN, "run_id=straight", options=TWO_NODES)
    cluster.finish(job)
    return cluster.runs / "straight"


@pytest.fixture
def here(cluster, monkeypatch):
    """Let this process call the sbatch of the cluster, in the cluster's folder."""
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(cluster.folder)
    return cluster
