"""Functions in forks of one process that has imported everything.

A fresh interpreter spends up to three seconds on imports before a short run begins. The server that
forks is multiprocessing's; a process has one, so its list of modules is here for all tests.

A fork is no fresh interpreter: tests of what is imported, of the console scripts and of how an
interpreter ends start one themselves.
"""

import gc
import multiprocessing
import socket
import traceback
from contextlib import contextmanager
from multiprocessing import forkserver

PRELOAD = (
    "kfac_bench.benchmark.local_runs",
    "kfac_bench.cli",
    "kfac_bench.distributed",
    "kfac_bench.training.run",
    "pytorch_optimizer",
    "pytest",
    "tests.reliability.faults.inject",
    "tests.support.runs",
    "tests.support.training",
    "torch._dynamo",
)


def server():
    """Return the multiprocessing context whose processes are such forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def prepare():
    """In a fork: what multiprocessing starts here is forked, as in any other process.

    Who asks for a server here gets the server that made this fork. Garbage collections skip what
    the server imported; they would copy all pages of these objects.
    """
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)
    # A fork knows the address of its server, but would start another one.
    forkserver._forkserver.ensure_running = lambda: None


def call(function, *arguments):
    """Return ``function(*arguments)`` of a fork; what is raised there fails the test."""
    context = server()
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        good, result = ours.recv()
    except EOFError:
        good, result = False, "the process died"
    process.join()
    assert good, result
    return result


@contextmanager
def own_port():
    """Reserve a port for rank 0, which the system gives to nobody else within the block."""
    # A bound socket that does not listen reserves the port. torch's store can still listen there,
    # because both set SO_REUSEADDR.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield str(held.getsockname()[1])


def _call(pipe, function, arguments):
    prepare()
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
