"""Functions and commands in forks of one process that has imported everything.

A fresh interpreter spends up to three seconds on imports before a short run begins. The server that
forks is multiprocessing's; a process has one, so its list of modules is here for all tests.

A fork is no fresh interpreter: tests of what is imported, of the console scripts and of how an
interpreter ends start one themselves.
"""

import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path
from subprocess import CompletedProcess

from kfac_bench.benchmark import forked

PRELOAD = (
    *forked.PRELOAD,
    "kfac_bench.cli",
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
    """In a fork: what multiprocessing starts here is forked, as in any other process."""
    multiprocessing.set_start_method("fork", force=True)


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


def _call(pipe, function, arguments):
    prepare()
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def command(name, *arguments, cwd, env=None):
    """Run a console command (``"train"`` for kfac-train) in a fork, as ``subprocess.run`` would."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        words = [str(argument) for argument in arguments]
        job = (name, words, str(cwd), dict(os.environ if env is None else env), out, err)
        process = server().Process(target=_command, args=job)
        process.start()
        process.join()
        return CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def _command(name, words, cwd, environment, out, err):
    prepare()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    from kfac_bench import cli

    getattr(cli, name)(words)
