"""What the commands share: errors as one line and an exit code, the parser, printing."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from kfac_bench.errors import LostRanksError, OneRankError, UsageError

RANK_0_SPEAKS_S = 10


def exit_with(name: str, main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and leave the process with its exit code, its errors said in one line."""
    try:
        code = main()
    except OneRankError as error:
        _say_as_rank(name, str(error))
        code = 2
    except UsageError as error:
        say_once(f"{name}: {error}")
        code = 2
    except LostRanksError as error:
        _say_as_rank(name, f"lost another rank: {error}")
        code = 1
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:  # argparse has printed its help
        code = int(stop.code or 0)
    except BrokenPipeError:
        code = 0
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if int(_launched("WORLD_SIZE", "HOROVOD_SIZE", "1")) > 1:
        # Now and then a gloo thread aborts the process in C++'s destructors, its work done.
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


def say_once(text: str) -> None:
    """On rank 0, or alone: all ranks parse the same command line.

    The others give it time: launchers kill all ranks as soon as the first is gone.
    """
    if _launched("RANK", "HOROVOD_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)
    else:
        time.sleep(RANK_0_SPEAKS_S)


def _launched(torchrun: str, horovodrun: str, alone: str) -> str:
    """What the launcher, whichever it was, says in its variable."""
    return os.environ.get(horovodrun) or os.environ.get(torchrun) or alone


class Parser(argparse.ArgumentParser):
    """argparse, in one line and without its usage dump; options may stand between words."""

    _between = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's intermixed form, which subcommands (they are called here) lack."""
        if self._between or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._between = True  # the intermixed form calls this method
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._between = False

    def error(self, message: str) -> NoReturn:
        """Raises :class:`UsageError`."""
        raise UsageError(f"{message}; see {self.prog} --help")


def _say_as_rank(name: str, text: str) -> None:
    rank = _launched("RANK", "HOROVOD_RANK", "")
    print(f"{name}: rank {rank}: {text}" if rank else f"{name}: {text}", file=sys.stderr)


def say(text: str) -> None:
    """Print a line, at once."""
    print(text, flush=True)


def check_config_dir(folder: Path | None) -> None:
    """Raises :class:`UsageError` if ``--config-dir`` names no folder."""
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--config-dir {folder}: no such folder")
