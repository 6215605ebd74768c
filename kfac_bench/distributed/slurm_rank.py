"""A rank's place among the others, from the variables that its launcher set.

A task that srun started finds its place in Slurm's own variables, so Slurm needs no other launcher.
This file imports no torch: the commands use it before they know what the user wants.
"""

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# Linux hands out ports from 32768 upwards by itself, so our ports stay below.
FIRST_PORT, PORTS = 12000, 20000


@dataclass(frozen=True)
class SlurmTask:
    """One of several tasks of a Slurm job step. Each task is a rank."""

    rank: int
    world_size: int
    local_rank: int
    per_node: tuple[int, ...]
    """Number of tasks on each node."""
    node: int
    """Index of this task's node."""
    address: str
    """Name of the first node, where rank 0 runs."""
    port: int
    """Port of rank 0. All ranks compute the same port; neighbouring jobs compute other ports."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """Return this process's task, or None outside of srun and in a step of one task."""
        # A batch script's shell has most of these variables too, but it is no job step.
        world_size = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if world_size == 1:
            return None
        # One machine may be a node of two clusters, whose job numbers may be equal.
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        step = f"{cluster}.{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
        # A requeued job takes another port: the old port may be why it ended.
        if restarts := environ.get("SLURM_RESTART_COUNT"):
            step += f".{restarts}"
        return cls(
            int(environ["SLURM_PROCID"]),
            world_size,
            int(environ["SLURM_LOCALID"]),
            tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"]),
            int(environ["SLURM_NODEID"]),
            first_host(environ["SLURM_STEP_NODELIST"]),
            FIRST_PORT + zlib.crc32(step.encode()) % PORTS,
        )


def adopt(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables from Slurm's, unless torchrun or horovodrun started this process.

    MASTER_ADDR and MASTER_PORT stay as they are if the user has set them.
    """
    task = SlurmTask.of(environ)
    if task is None or "RANK" in environ or "HOROVOD_RANK" in environ:
        return
    environ["RANK"] = str(task.rank)
    environ["WORLD_SIZE"] = str(task.world_size)
    environ["LOCAL_RANK"] = str(task.local_rank)
    environ["LOCAL_WORLD_SIZE"] = str(task.per_node[task.node])
    environ.setdefault("MASTER_ADDR", task.address)
    environ.setdefault("MASTER_PORT", str(task.port))


def from_launcher(name: str, alone: str) -> str:
    """Return a variable of torchrun, or the same variable of horovodrun.

    Args:
        name: Torchrun's name: RANK, WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE.
        alone: The value of a process that no launcher started.
    """
    horovod_name = "HOROVOD_" + name.replace("WORLD_", "")
    return os.environ.get(horovod_name) or os.environ.get(name) or alone


def has_its_own_gpus(visible: int) -> bool:
    """Return whether Slurm hides the GPUs of the node's other tasks from this task.

    Slurm does so with `--gpus-per-task` and `--gpu-bind`. Each task then counts its GPUs from 0.

    Args:
        visible: The number of GPUs that this process sees.
    """
    environ = os.environ
    return "SLURM_STEP_ID" in environ and int(environ.get("SLURM_GPUS_ON_NODE", "0")) > visible


def first_host(nodes: str) -> str:
    """Return the first name of a node list in Slurm's short form: `gpu[02-04,7],x` gives `gpu02`.

    Slurm's own `scontrol` does the same, but it is missing in containers.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"{nodes!r}: not a list of nodes")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Return the number of tasks of each node: Slurm writes (2, 2, 2, 1) as `2(x3),1`."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return tuple(counts)


def launched_ranks() -> int:
    """Return the number of ranks that the launcher has started, of which this process is one."""
    return int(from_launcher("WORLD_SIZE", "1"))


def forget_state_of_job() -> None:
    """Remove $KFAC_STATE_FILE, if it is set: a run has ended, and the command goes on.

    slurm/common.sh would otherwise take the state of this run for that of the job.
    """
    if path := os.environ.get("KFAC_STATE_FILE"):
        with suppress(OSError):
            Path(path).unlink()


def is_main_process() -> bool:
    """Return whether this process is rank 0 by its launcher's variables."""
    return from_launcher("RANK", "0") == "0"
