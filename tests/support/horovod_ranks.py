"""Run functions on ranks that horovodrun starts; as `distributed.py` does on gloo ranks.

``python -m tests.support.horovod_ranks SOCKET`` is such a rank.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path

import torch

from kfac_bench.core.distributed.horovod_collective import HorovodCollective
from kfac_bench.distributed.backends.horovod import Horovod
from kfac_bench.distributed.ranks import Ranks
from tests.support.distributed import Pool, RankFailed

BIN = Path(sys.executable).parent
START_S = 120
_pools = {}


def here():
    """This rank's backend."""
    return Horovod(Ranks(torch.device("cpu"), HorovodCollective()))


class HorovodPool(Pool):
    """``world_size`` processes of one horovodrun."""

    def __init__(self, world_size):
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        self._log = open(f"{self._folder.name}/log", "w+")  # noqa: SIM115
        with Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(START_S)
            command = ["horovodrun", "-np", str(world_size), "--gloo"]
            self._launcher = subprocess.Popen(
                [BIN / command[0], *command[1:], sys.executable, "-m", __name__, address],
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
            try:
                joined = [listener.accept() for _ in range(world_size)]
                by_rank = dict(zip((pipe.recv() for pipe in joined), joined, strict=True))
            except (TimeoutError, EOFError):
                self._log.seek(0)
                raise RankFailed(f"horovodrun starts no ranks:\n{self._log.read()}") from None
        self.pids = [pid for _, pid in sorted(by_rank)]
        self.pipes = [by_rank[key] for key in sorted(by_rank)]

    def close(self, kill=False):
        """Let the processes go."""
        for pid, pipe in zip(self.pids, self.pipes, strict=True):
            with contextlib.suppress(OSError):
                if kill:
                    os.kill(pid, signal.SIGKILL)
                else:
                    pipe.send(None)
        try:
            self._launcher.wait(30)
        except subprocess.TimeoutExpired:
            self._launcher.terminate()
            self._launcher.wait(30)
        self._log.close()
        self._folder.cleanup()


def run_ranks(world_size, function, *args):
    """``function(*args)`` on every one of ``world_size`` ranks; their results."""
    if world_size not in _pools:
        _pools[world_size] = HorovodPool(world_size)
    try:
        return _pools[world_size].run(function, *args)
    except RankFailed:
        _pools.pop(world_size).close(kill=True)
        raise


def close_pools():
    """Idle ranks are not idle: Horovod asks around a thousand times a second."""
    while _pools:
        _pools.popitem()[1].close()


def _serve(address):
    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    pipe = Client(address, "AF_UNIX")
    pipe.send((hvd.rank(), os.getpid()))
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    hvd.shutdown()


if __name__ == "__main__":
    _serve(sys.argv[1])
