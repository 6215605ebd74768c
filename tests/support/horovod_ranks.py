"""Run functions on ranks of Horovod; as `distributed.py` does on gloo ranks.

The ranks are forks of a process that has imported torch (:mod:`tests.support.forks`), because
starting programs takes most of the time of these tests. The ranks have the variables that
horovodrun gives to its ranks, and meet at horovodrun's own server. Tests of the command start a
real horovodrun.
"""

import os
import sys
import traceback
from pathlib import Path

import torch

from kfac_bench.core.distributed.collective import HorovodCollective
from kfac_bench.distributed.backends.horovod import Horovod
from kfac_bench.distributed.ranks import Ranks
from tests.support import forks
from tests.support.distributed import Pool, RankFailed

BIN = Path(sys.executable).parent
_pools = {}


def here():
    """This rank's backend."""
    return Horovod(Ranks(torch.device("cpu"), HorovodCollective()))


class HorovodPool(Pool):
    """``world_size`` processes that have joined one Horovod job."""

    def __init__(self, world_size):
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer

        self._server = RendezvousServer(verbose=0)
        port = self._server.start()
        slots = get_host_assignments(parse_hosts(f"localhost:{world_size}"), world_size)
        self._server.init(slots)
        job = create_run_env_vars("127.0.0.1", ["lo"], port)
        self.start(_serve, [({**job, **create_slot_env_vars(slot)},) for slot in slots])

    def close(self, kill=False):
        """Let the processes go."""
        super().close(kill)
        self._server.stop()
        self._server._httpd.server_close()


def run_ranks(world_size, function, *args):
    """``function(*args)`` on every one of ``world_size`` ranks; their results."""
    if world_size not in _pools:
        close_pools()
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


def _serve(environment, pipe):
    forks.prepare()
    os.environ |= {name: str(value) for name, value in environment.items()}
    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    hvd.shutdown()
