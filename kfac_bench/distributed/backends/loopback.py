"""Ranks that meet at a loopback address: they listen where no other machine can connect.

torch's store listens on all addresses of the machine, wherever the ranks meet. gloo listens at the
address of the machine's name. Neither of them authenticates.
"""

import ipaddress
import os
import socket
from contextlib import suppress
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

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


def confine() -> None:
    """Let gloo and NCCL use the loopback interface, unless the user has named another one."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            os.environ.setdefault(variable, names[0])


def store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
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
