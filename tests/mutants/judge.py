"""Run the tests of a change in a scratch copy of the repository.

A fork of this process, which has imported torch, runs pytest. That saves the seconds that an import
of torch takes.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch  # noqa: F401 - the forks need not import it

from kfac_bench.errors import UsageError
from tests.mutants.rows import ROOT, Mutant

SURVIVED, NOTICED, TIMEOUT = "survived", "noticed", "too slow"


def copy_to(scratch: Path) -> None:
    """Copy the files that git knows, as they are in the working tree, and new ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, scratch / name)


def judge(mutant: Mutant, scratch: Path, limit_s: float) -> tuple[str, float]:
    """Apply a change to the scratch copy, run its tests, and undo the change.

    Returns:
        Whether the tests noticed the change, and the seconds that they took.

    Raises:
        UsageError: The old text is not in the file exactly once, or there are no such tests.
    """
    file = scratch / mutant.file
    text = file.read_text()
    file.write_text(mutant.apply(text))
    began = time.monotonic()
    try:
        code = run_tests(mutant.tests, scratch, limit_s)
    finally:
        file.write_text(text)
    seconds = time.monotonic() - began
    if code is None:
        return TIMEOUT, seconds
    if code == pytest.ExitCode.OK:
        return SURVIVED, seconds
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise UsageError(f"{mutant}: there are no tests {' '.join(mutant.tests)}")
    return NOTICED, seconds


def run_tests(tests: Sequence[str], scratch: Path, limit_s: float) -> int | None:
    """Return pytest's exit code, or None if the tests took longer than the limit."""
    child = multiprocessing.get_context("fork").Process(target=_run, args=(tests, scratch))
    child.start()
    try:
        child.join(limit_s)
        return child.exitcode
    finally:
        # Ctrl-C does not reach the tests: they are in a process group of their own. The tests may
        # have started processes, which are in the same group.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join()


def _run(tests: Sequence[str], scratch: Path) -> None:
    os.setsid()
    # Only torch may stay: everything of the repository must come from the scratch copy.
    for name in [
        n for n in sys.modules if n.partition(".")[0] in ("kfac_bench", "benchmarks", "tests")
    ]:
        del sys.modules[name]
    os.chdir(scratch)
    os.environ["PYTHONPATH"] = str(scratch)
    sys.path[:] = [str(scratch), *(p for p in sys.path if p not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not alone"]
    options += ["--rootdir", str(scratch), "-c", str(scratch / "pyproject.toml")]
    # os._exit: exit handlers of this copy of the parent must not run.
    os._exit(int(pytest.main([*options, *tests])))
