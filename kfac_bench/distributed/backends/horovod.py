"""Horovod, started by horovodrun or srun: gloo on CPUs, NCCL on GPUs."""

import importlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from kfac_bench.config import BackendConfig
from kfac_bench.core.distributed.collective import Collective, HorovodCollective
from kfac_bench.distributed import slurm_rank
from kfac_bench.distributed.backend import Backend, find_device
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import LostRanksError, OneRankError, UsageError, first_line


class Horovod(Backend):
    """The backend that averages gradients with `hvd.DistributedOptimizer` during backward."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        # The optimizer in Horovod's wrapper, and the one from which K-FAC reads learning rates.
        self._averaging: Any = None
        self._plain: Optimizer | None = None

    def collective(self) -> Collective:
        return HorovodCollective()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        hvd, collective = _import(), self.collective()
        everyone = tuple(range(collective.world_size))
        with torch.no_grad():
            for work in [
                collective.broadcast(tensor, 0, everyone, name)
                for name, tensor in model.state_dict().items()
            ]:
                work.wait()
        names = list(model.named_parameters())
        self._averaging = hvd.DistributedOptimizer(optimizer, named_parameters=names)
        # Horovod makes another optimizer from the groups alone, so settings that are attributes
        # would have the defaults of their class.
        kept = {"state", "param_groups"}
        vars(self._averaging).update(
            {k: v for k, v in vars(optimizer).items() if k[0] != "_" and k not in kept}
        )
        self._plain = optimizer
        return model, self._averaging

    def part(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        # Horovod counts backward passes and sends a gradient after this many. 2 means "not yet".
        self._averaging.set_backward_passes_per_step(1 if last else 2)
        return nullcontext()

    def synchronize(self, optimizer: Optimizer) -> None:
        self._averaging.synchronize()

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        with self._averaging.skip_synchronize():
            scaler.step(optimizer)

    def load(
        self, model: nn.Module, optimizer: Optimizer, shards: Sequence[Mapping[str, Any]]
    ) -> None:
        super().load(model, optimizer, shards)
        assert self._plain is not None
        # Loading made new groups, but both optimizers must share them.
        self._plain.param_groups = optimizer.param_groups


@contextmanager
def join(config: BackendConfig, device: str) -> Iterator[Backend]:
    """Join the ranks that horovodrun or srun started."""
    hvd = _import()
    task = slurm_rank.SlurmTask.of(os.environ)
    if task is not None and "HOROVOD_RANK" not in os.environ:
        _replace_horovodrun(task, config.timeout_s)
    # dynamic: groups of ranks are known only after K-FAC has seen the model.
    hvd.init(process_sets="dynamic")
    on = find_device(device, hvd.local_rank())
    if hvd.size() == 1:
        yield Backend(Ranks(on))
        return
    if on.type == "cuda" and not hvd.nccl_built():
        raise UsageError(
            "backend=horovod: Horovod was built for CPUs here; run HVD_CUDA=1 make "
            "install-horovod, or set trainer.device=cpu"
        )
    # No hvd.shutdown() at the end: ranks could not meet again for the next run of --multirun, and
    # Horovod shuts itself down when the process ends.
    try:
        yield Horovod(Ranks(on, HorovodCollective()))
    except hvd.HorovodInternalError as error:
        # Another rank is gone.
        raise LostRanksError(first_line(error)) from error


def _replace_horovodrun(task: slurm_rank.SlurmTask, timeout_s: float) -> None:
    """Do what horovodrun does: start a server where ranks find each other, and set variables.

    The server runs in rank 0's process until this ends. Groups of ranks that are made later meet at
    the server too.
    """
    http = importlib.import_module("horovod.runner.http.http_server")
    hosts = importlib.import_module("horovod.runner.common.util.hosts")
    gloo = importlib.import_module("horovod.runner.gloo_run")
    nodes = [hosts.HostInfo(f"node{i}", tasks) for i, tasks in enumerate(task.per_node)]
    slots = hosts.get_host_assignments(nodes, task.world_size)
    mine = slots[task.rank]
    if (mine.hostname, mine.local_rank) != (f"node{task.node}", task.local_rank):
        raise OneRankError(
            "backend=horovod: Slurm did not fill node after node; start with srun "
            "--distribution=block"
        )
    if task.rank == 0:
        server = http.RendezvousHTTPServer(("", task.port), http.RendezvousHandler, 0)
        server.init(slots)
        threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
    _wait_for(task.address, task.port, timeout_s)
    os.environ |= gloo.create_slot_env_vars(mine) | {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": task.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(task.port),
    }


def _wait_for(address: str, port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LostRanksError(
                    f"rank 0 does not answer at {address}:{port} within {timeout_s:g} s "
                    f"(backend.timeout_s): {error}"
                ) from None
            time.sleep(0.1)


def _import() -> Any:
    try:
        return importlib.import_module("horovod.torch")
    except ModuleNotFoundError:
        raise UsageError(
            "backend=horovod: Horovod is not installed here; run make install-horovod"
        ) from None
