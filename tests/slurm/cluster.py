"""The throw-away cluster of the tests: submit, wait, look."""

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
    *("profile=smoke", "trainer.device=cpu", "trainer.threads=1", "trainer.predictions=0"),
    *("trainer.batch_size=16", "trainer.target=null", "trainer.checkpoint_freq=1000"),
)
RUN = (*SMALL, "trainer.max_steps=16", "trainer.eval_freq=8", "kfac.update_freq=4", "logger=none")
"""16 steps of K-FAC that take seconds, with two evaluations and four decompositions."""


class Cluster:
    """Jobs run in ``folder``, where their output and their runs are."""

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
        """What the command says; an error with all it said if it fails."""
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
        """For code of ours that calls sbatch."""
        return self._env

    def submit(self, script, *overrides, options=(), **env):
        """The id of a job of slurm/SCRIPT.sbatch."""
        path = ROOT / "slurm" / f"{script}.sbatch"
        words = (*overrides, f"runs_dir={self.runs}")
        return self("sbatch", "--parsable", "--time=10", *options, path, *words, **env)

    def show(self, job, key):
        """What scontrol says of a job (of each of an array)."""
        said = self("scontrol", "--oneliner", "show", "job", job).split()
        return [word.partition("=")[2] for word in said if word.startswith(f"{key}=")]

    def wait(self, job, done=None, patience_s=PATIENCE_S):
        """Until it has ended, or ``done()``; its states.

        What is requeued is held for as long as its old credential lives (10 s; elsewhere 120): to
        start it at once (StartTime=now) can kill it.
        """
        deadline, final_since = time.monotonic() + patience_s, None
        while True:
            states = set(self.show(job, "JobState"))
            # on its way back into the queue a job passes through these
            final_since = (final_since or time.monotonic()) if states <= FINAL else None
            lasting = 0 if states == {"COMPLETED"} else LASTING_S
            ended = final_since is not None and time.monotonic() >= final_since + lasting
            if done() if done is not None else ended:
                return states
            assert time.monotonic() < deadline, f"{states}\n{self.said()}"
            assert not ended, f"{states}\n{self.said()}"
            time.sleep(0.2)

    def wait_until_held(self, job, place, start=0, ranks=2):
        """Every rank stands there, in that start of the job."""
        marks = [self.folder / f"{job}-{place}-{start}-{rank}" for rank in range(ranks)]
        self.wait(job, lambda: all(mark.exists() for mark in marks))
        for mark in marks:
            mark.unlink()

    def lose(self, node):
        """Take a node down, and back. Refused is what it has done by itself (ReturnToService)."""
        self("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        for _ in range(50):
            self("scontrol", "update", f"nodename={node}", "state=resume", check=False)
            if "State=DOWN" not in self("scontrol", "--oneliner", "show", "node", node):
                return
            time.sleep(0.2)
        raise AssertionError(f"{node} stays down\n{self.log()}")

    def finish(self, job):
        """Wait for a job that must go well."""
        states = self.wait(job)
        assert states == {"COMPLETED"}, f"{states}\n{self.said()}\n{self.log()}"

    def said(self):
        """The output of all jobs."""
        return "\n".join(f"{p.name}:\n{p.read_text()}" for p in self.folder.rglob("*.out"))

    def log(self):
        """What the controller did last."""
        return "\n".join(self._log.read_text().splitlines()[-30:])


def weights_of(path):
    """The hash at the end of a run that is complete."""
    ended = of_kind(path, RunEnded)[-1]
    assert ended.status == "finished"
    return ended.weights_sha256
