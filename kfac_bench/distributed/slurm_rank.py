"""A task of srun knows its place among the others from Slurm's variables; no launcher is needed."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Self

FIRST_PORT, PORTS = 12000, 20000
"""Below 32768, from where on Linux hands out ports by itself."""


@dataclass(frozen=True)
class Task:
    """One of several tasks of a job step: a rank."""

    rank: int
    world_size: int
    local_rank: int
    per_node: tuple[int, ...]
    """Tasks of each node."""
    node: int
    """Which of them this one is."""
    address: str
    """The first node: rank 0 is there."""
    port: int
    """A function of cluster, job and step: ranks agree on it, neighbouring jobs on others."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """None outside of srun, and in a step of one task.

        The shell of a batch script has most of these variables too, but is no step.
        """
        world_size = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if world_size == 1:
            return None
        cluster = environ.get("SLURM_CLUSTER_NAME", "")  # a machine may be a node of two
        step = f"{cluster}.{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
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
    """Set the variables that torchrun would have set, unless it or horovodrun did.

    MASTER_ADDR and MASTER_PORT that the user has set are left alone.
    """
    task = Task.of(environ)
    if task is None or "RANK" in environ or "HOROVOD_RANK" in environ:
        return
    environ["RANK"] = str(task.rank)
    environ["WORLD_SIZE"] = str(task.world_size)
    environ["LOCAL_RANK"] = str(task.local_rank)
    environ["LOCAL_WORLD_SIZE"] = str(task.per_node[task.node])
    environ.setdefault("MASTER_ADDR", task.address)
    environ.setdefault("MASTER_PORT", str(task.port))


def has_its_own_gpus(visible: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Slurm hides the GPUs of the node's other tasks (``--gpus-per-task``, ``--gpu-bind``).

    ``visible`` is how many the process sees; each such task counts its own from 0.
    """
    return "SLURM_STEP_ID" in environ and int(environ.get("SLURM_GPUS_ON_NODE", "0")) > visible


def first_host(nodes: str) -> str:
    """The first name of a list in Slurm's short form: ``gpu[02-04,7],x`` is ``gpu02``.

    Containers have no scontrol that would say it.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"{nodes!r}: not a list of nodes")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> tuple[int, ...]:
    """``2(x3),1``, as Slurm writes it, is (2, 2, 2, 1)."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return tuple(counts)
