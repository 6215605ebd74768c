"""The test cluster: submit jobs, wait for them, and look at them."""

import os
import subprocess
import sys
import time
from pathlib import Path

from kfac_bench.record.events import RunEnded
from tests.support import ROOT
from tests.support.runs import of_kind

UP, DOWN = (ROOT / "scripts" / "test_cluster" / name for name in ("up.sh", "down.sh"))
PATIENCE_S = 240
LASTING_S = 15.0
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL"}

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=1")
SMALL = (
    "profile=smoke",
    "trainer.device=cpu",
    "trainer.threads=1",
    "trainer.predictions=0",
    "trainer.batch_size=16",
    "trainer.target=null",
    "trainer.checkpoint_freq=1000",
)
RUN = (
    *SMALL,
    "trainer.max_steps=16",
    "trainer.eval_freq=8",
    "kfac.update_freq=4",
    "logger=none",
    # At the recipe's rate the loss of this small run rises, and rounding grows with it.
    "optimizer.lr=0.005",
)
"""16 steps of K-FAC that take seconds, with two evaluations and four decompositions."""


class Cluster:
    """A Slurm cluster whose jobs run in `folder`, with their output and their run directories."""

    def __init__(self, state, folder):
        self.folder, self.runs = folder, folder / "runs"
        self._log = state / "log" / "slurmctld.log"
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {
            "SLURM_CONF": str(state / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/sbin:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'tests' / 'slurm' / 'hold'}:{ROOT}",
            "KFAC_SLURM": str(ROOT / "slurm"),
            "KFAC_TEST_FOLDER": str(folder),
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, *command, check=True, timeout=60, **env):
        """Run a command, and return its output. A failed command raises its output."""
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.folder,
            env=self._env | env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not check or not done.returncode, done.stdout + done.stderr
        return done.stdout.strip()

    def environment(self):
        """Return the environment for our own code that calls sbatch."""
        return self._env

    def submit(self, script, *overrides, options=(), **env):
        """Submit slurm/SCRIPT.sbatch, and return the job's id."""
        path = ROOT / "slurm" / f"{script}.sbatch"
        words = (*overrides, f"runs_dir={self.runs}")
        return self("sbatch", "--parsable", "--time=10", *options, path, *words, **env)

    def show(self, job, key):
        """Return a field of scontrol for a job, or for each job of an array."""
        said = self("scontrol", "--oneliner", "show", "job", job).split()
        return [word.partition("=")[2] for word in said if word.startswith(f"{key}=")]

    def wait(self, job, done=None, patience_s=PATIENCE_S):
        """Wait until the job has ended or `done()` is true, and return the job's states.

        Slurm holds a requeued job as long as its old credential is valid: 10 s here, 120 s by
        default. Starting the job earlier (StartTime=now) can kill it.
        """
        deadline, final_since = time.monotonic() + patience_s, None
        while True:
            states = set(self.show(job, "JobState"))
            # A requeued job passes through final states, so a final state must last for a while.
            final_since = (final_since or time.monotonic()) if states <= FINAL else None
            lasting = 0 if states == {"COMPLETED"} else LASTING_S
            ended = final_since is not None and time.monotonic() >= final_since + lasting
            if done() if done is not None else ended:
                return states
            assert time.monotonic() < deadline, f"{states}\n{self.said()}"
            assert not ended, f"{states}\n{self.said()}"
            time.sleep(0.2)

    def wait_until_held(self, job, place, start=0, ranks=2):
        """Wait until every rank stands still at `place`, in the job's start number `start`."""
        marks = [self.folder / f"{job}-{place}-{start}-{rank}" for rank in range(ranks)]
        self.wait(job, lambda: all(mark.exists() for mark in marks))
        for mark in marks:
            mark.unlink()

    def lose(self, node):
        """Take a node down and back. The node may return by itself first (ReturnToService)."""
        self("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        for _ in range(50):
            self("scontrol", "update", f"nodename={node}", "state=resume", check=False)
            if "State=DOWN" not in self("scontrol", "--oneliner", "show", "node", node):
                return
            time.sleep(0.2)
        raise AssertionError(f"{node} stays down\n{self.log()}")

    def finish(self, job):
        """Wait for a job that must succeed."""
        states = self.wait(job)
        assert states == {"COMPLETED"}, f"{states}\n{self.said()}\n{self.log()}"

    def said(self):
        """Return the output of all jobs."""
        return "\n".join(f"{p.name}:\n{p.read_text()}" for p in self.folder.rglob("*.out"))

    def log(self):
        """Return the last lines of the controller's log."""
        return "\n".join(self._log.read_text().splitlines()[-30:])


def weights_of(path):
    """Return the hash of the final weights of a finished run."""
    ended = of_kind(path, RunEnded)[-1]
    assert ended.status == "finished"
    return ended.weights_sha256
