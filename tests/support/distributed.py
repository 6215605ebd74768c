"""Run functions on real gloo ranks: one pool of processes per world size, started once.

A function runs on every rank of the pool; an exception on any rank is raised in the test with
that rank's traceback, and the pool, whose other ranks may hang in a message, is replaced.

Ranks are forks of a process that has imported torch (:mod:`tests.support.forks`). Each worker of
pytest-xdist has pools of its own.
"""

import atexit
import faulthandler
import os
import signal
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist

from tests.support import forks

TIMEOUT_S = 60
_pools = {}


class RankFailed(AssertionError):
    """A rank raised, or died."""


def _worker(rank, world_size, port, pipe):
    forks.prepare()
    faulthandler.enable()  # a crash in C code prints where each thread is
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world_size,
        store=dist.TCPStore("127.0.0.1", port),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        while (job := pipe.recv()) is not None:
            function, args = job
            try:
                pipe.send((True, function(*args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


class Pool:
    """``world_size`` processes in one gloo group."""

    def __init__(self, world_size):
        # The store takes a free port and keeps it: two pools that start at once cannot collide.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        self.start(_worker, [(rank, world_size, port) for rank in range(world_size)])

    def start(self, worker, arguments):
        """Start a process for each rank, which calls ``worker(*arguments[rank], pipe)``."""
        context = forks.server()
        self.pipes, self.processes = [], []
        for own in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=worker, args=(*own, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *args):
        """Results of all ranks, in rank order."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results, waiting = {}, dict(enumerate(self.pipes))
        while waiting:
            ready = wait(list(waiting.values()), timeout=2 * TIMEOUT_S)
            if not ready:
                raise RankFailed(f"ranks {list(waiting)} hang")
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    try:
                        good, result = pipe.recv()
                    except EOFError:
                        good, result = False, self._end_of(rank)
                    if not good:
                        raise RankFailed(f"rank {rank}:\n{result}")
                    results[rank] = result
                    del waiting[rank]
        return [results[rank] for rank in sorted(results)]

    def _end_of(self, rank):
        """How the process of ``rank``, which has closed its pipe, ended."""
        process = self.processes[rank]
        process.join(10)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"the process died ({how})"

    def close(self, kill=False):
        """Let the processes go."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(10)


OF_TORCH = {
    "Numpy is not available": "torch sends objects between ranks with NumPy",
    "'Stream' object has no attribute 'record_event'": "FSDP2 of torch 2.6 needs a GPU",
}
"""Errors of torch in functions that cannot work here, and why."""


def run_ranks(world_size, function, *args):
    """``function(*args)`` on every one of ``world_size`` ranks; their results."""
    pool = _pools.get(world_size) or _pools.setdefault(world_size, Pool(world_size))
    try:
        return pool.run(function, *args)
    except RankFailed as error:
        _pools.pop(world_size).close(kill=True)
        for text, reason in OF_TORCH.items():
            if text in str(error):
                pytest.skip(reason)
        raise


@atexit.register
def close_pools():
    """Let all ranks go: the next test starts new ones."""
    while _pools:
        _pools.popitem()[1].close()
