"""PyTorch's DistributedDataParallel, and the process group that DDP, FSDP2 and DeepSpeed use.

torchrun or srun starts the ranks. Messages go through gloo on CPUs and through NCCL on GPUs.

Ranks that meet at a loopback address listen where no other machine can connect. torch's own store
listens on all addresses of the machine, wherever the ranks meet, and gloo listens at the address of
the machine's name. Neither of them authenticates.
"""

import errno
import ipaddress
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kfac_bench.config import BackendConfig
from kfac_bench.core.distributed.collective import Collective, TorchCollective
from kfac_bench.distributed.backend import Backend, find_device
from kfac_bench.distributed.ranks import Ranks, lost_rank
from kfac_bench.errors import LostRanksError, OneRankError, UsageError
from kfac_bench.output import say

SPARE_S = 5.0
"""Time for torch's own timeout, whose error says more: torch waits a second longer than asked."""


class DDP(Backend):
    """The backend that averages gradients with PyTorch's DDP while backward runs."""

    def collective(self) -> Collective:
        return TorchCollective()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        device = self.ranks.device
        on = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=on), optimizer

    def bare(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    @contextmanager
    def part(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """See `Backend.part`.

        Raises:
            UsageError: The loss of the part before did not depend on all parameters.
        """
        assert isinstance(model, DistributedDataParallel)
        try:
            with nullcontext() if last else model.no_sync():
                yield
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            # torch counts the parameters that are trained.
            names = [name for name, p in model.module.named_parameters() if p.requires_grad]
            numbers = re.search(r"receive grad for rank \d+: ([\d ]+)", str(error))
            unused = [names[int(n)] for n in numbers[1].split()] if numbers else ["some parameters"]
            raise UsageError(
                f"backend=ddp: the loss of the last step did not depend on {', '.join(unused[:3])}"
                f"{' and others' if len(unused) > 3 else ''}. Freeze parameters without use with "
                "requires_grad_(False), or add 0 times their sum to the loss"
            ) from None


@contextmanager
def launched(
    config: BackendConfig, device: str, make: Callable[[Ranks], Backend]
) -> Iterator[Backend]:
    """Join the ranks that torchrun or srun started, and yield their backend.

    Args:
        config: The options of the backend.
        device: The option trainer.device.
        make: Makes the backend if there are several ranks.
    """
    on = local_device(device)
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        yield Backend(Ranks(on))
        return
    with process_group(on, config.timeout_s) as ranks:
        yield make(ranks)


def local_device(device: str) -> torch.device:
    """Return this rank's device on its node."""
    return find_device(device, int(os.environ.get("LOCAL_RANK", "0")))


join = partial(launched, make=DDP)


@contextmanager
def process_group(device: torch.device, timeout_s: float) -> Iterator[Ranks]:
    """Make torch.distributed's default process group, and leave it at exit.

    Raises:
        LostRanksError: If another rank is gone, or a message waits longer than `timeout_s` seconds.
    """
    cuda = device.type == "cuda"
    timeout = timedelta(seconds=timeout_s)
    try:
        with _ending_after(timeout_s):
            store, rank, world_size = _meet(timeout)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=_of_this_start(store, rank, world_size, timeout_s),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
        yield Ranks(device, TorchCollective())
    except RuntimeError as error:
        if line := lost_rank(error):
            raise LostRanksError(line) from error
        raise
    finally:
        # Otherwise gloo's threads outlive the interpreter, and now and then abort the process at
        # exit, after its work is done.
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store in which the ranks find each other, this rank, and the number of ranks.

    Raises:
        OneRankError: The port of rank 0 is in use, or a variable is not set.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise OneRankError(
                f"the environment variable {name} is not set, so the ranks cannot meet. Start all "
                "ranks with torchrun or srun"
            )
    host = os.environ["MASTER_ADDR"]
    try:
        # torchrun may have opened the store before, at all addresses.
        if is_loopback(host) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            _confine()
            port, rank, world_size = (
                int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE")
            )
            return loopback_store(host, port, rank, world_size, timeout), rank, world_size
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        return store, rank, world_size
    except ValueError:
        raise OneRankError(
            f"MASTER_PORT={os.environ['MASTER_PORT']}: the ranks cannot meet at this port. Set a "
            "whole number"
        ) from None
    except (OSError, RuntimeError) as error:
        if getattr(error, "errno", None) != errno.EADDRINUSE and "EADDRINUSE" not in str(error):
            raise
        raise OneRankError(
            f"port {os.environ.get('MASTER_PORT')} is in use on this machine, so the ranks "
            "cannot meet there. Set another MASTER_PORT, the same one for all ranks"
        ) from None


@contextmanager
def _ending_after(timeout_s: float) -> Iterator[None]:
    """End this process if the block takes longer than `timeout_s` seconds and some more.

    torch's own timeout does not cover a port on which another program listens and never answers.
    """

    def end() -> None:
        say(
            f"kfac-train: rank {os.environ.get('RANK')}: rank 0 did not answer on "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within "
            f"{timeout_s:g} s (backend.timeout_s). Another program may use this port",
            sys.stderr,
        )
        os._exit(1)

    timer = threading.Timer(timeout_s + SPARE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _of_this_start(store: Store, rank: int, world_size: int, timeout_s: float) -> PrefixStore:
    """Return a store in which only the ranks of this start find each other.

    torchrun's store outlives a restart and keeps the addresses of ranks that are gone. torchrun's
    count of restarts cannot tell the starts apart, because it differs between nodes. Rank 0
    therefore invents a name for this start. Each other rank asks for the name with a random word,
    so no rank can mistake an answer of an earlier start for an answer to itself.
    """
    if rank > 0:
        word = uuid.uuid4().hex
        store.set(f"kfac/word/{rank}", word)
        name = store.get(f"kfac/name/{word}").decode()
        store.set(f"kfac/{name}/{rank}", "here")
        return PrefixStore(name, store)
    name, missing = uuid.uuid4().hex, list(range(1, world_size))
    deadline = time.monotonic() + timeout_s
    while missing:
        if time.monotonic() > deadline:
            raise LostRanksError(
                f"ranks {missing} did not start within {timeout_s:g} s (backend.timeout_s)"
            )
        for other in missing:
            # The word may be left from an earlier start. Then the answer reaches nobody, and this
            # loop answers again once the rank has set its new word.
            if store.check([f"kfac/word/{other}"]):
                word = store.get(f"kfac/word/{other}").decode()
                store.set(f"kfac/name/{word}", name)
        missing = [r for r in missing if not store.check([f"kfac/{name}/{r}"])]
        time.sleep(0.01)
    return PrefixStore(name, store)


_listening: dict[int, int] = {}
"""The descriptors of the sockets at which stores of this process listen, with their inodes."""


def _forget() -> None:
    for descriptor, inode in _listening.items():
        # After its store has ended, the number may belong to another file.
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                nowhere = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nowhere, descriptor)  # a copy of the store may close the number later
                os.close(nowhere)
    _listening.clear()


# Loader workers are forks. Without this they would keep the port of a run that was killed in use.
os.register_at_fork(after_in_child=_forget)


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _confine() -> None:
    """Let gloo and NCCL use the loopback interface, unless the user has named another one."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            os.environ.setdefault(variable, names[0])


def loopback_store(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta
) -> TCPStore:
    """Return the store of the ranks; on rank 0 it listens at `host` alone.

    Raises:
        OSError: Rank 0 cannot listen at this port.
    """
    if rank > 0:
        return TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        _listening[listener.fileno()] = os.fstat(listener.fileno()).st_ino
        return TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=timeout,
            # The store closes the socket at its end.
            master_listen_fd=listener.detach(),
            # The store of libuv takes no socket in torch 2.6.
            use_libuv=torch.__version__ >= "2.11",
        )
