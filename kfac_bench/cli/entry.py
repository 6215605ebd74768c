"""The common parts of all commands: errors as one line and an exit code, the parser, last lines."""

import argparse
import atexit
import io
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kfac_bench import __version__, output
from kfac_bench.distributed import slurm_rank
from kfac_bench.distributed.slurm_rank import from_launcher
from kfac_bench.errors import (
    LostRanksError,
    OneRankError,
    UsageError,
    WorkerLostError,
    missing_package,
    printable,
    shortage,
    unusable_path,
)

RANK_0_SPEAKS_S = 10


def exit_with(name: str, main: Callable[[], int]) -> NoReturn:
    """Run `main` and end the process with its exit code. Errors are printed as one line."""
    _prepare_streams()
    # By default Python adds the file and the line of the code that warns.
    warnings.formatwarning = lambda message, *_, **__: (
        f"{name}: warning: {printable(' '.join(str(message).split()))}\n"
    )
    try:
        code = main()
    except OneRankError as error:
        _say_as_rank(name, str(error))
        code = 2
    except UsageError as error:
        say_once(f"{name}: {error}")
        code = 2
    except ModuleNotFoundError as error:
        if (missing := missing_package(error)) is None:
            raise
        say_once(f"{name}: {missing}")
        code = 2
    except LostRanksError as error:
        _say_as_rank(name, f"lost another rank: {error}")
        code = 1
    except WorkerLostError as error:
        _say_as_rank(name, str(error))
        code = 1
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:
        # argparse has printed its help. A program of the user may end with a text.
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            _say_as_rank(name, printable(" ".join(stop.code.split())))
    except BrokenPipeError:
        code = 0
    except (MemoryError, OSError, RuntimeError) as error:
        if (line := shortage(error)) is not None:
            code = 1
        elif (line := unusable_path(error)) is not None:
            code = 2
        else:
            raise
        _say_as_rank(name, line)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader is gone, as in `kfac-bench list | head`. Python would complain at its exit when
        # it flushes stdout again, so stdout now goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if slurm_rank.launched_ranks() > 1:
        # Now and then a gloo thread aborts a process in C++'s destructors, after all work is done.
        # os._exit skips the destructors. It also skips the exit handlers, so call these first.
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


def _prepare_streams() -> None:
    """Let every text be printed, also where the shell has closed a stream (`>&-`)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 -- open until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            # rich prints tables, and their dashes are in no Latin-1 locale.
            stream.reconfigure(errors="backslashreplace")


def say_once(text: str) -> None:
    """Print a line to stderr on rank 0 only: all ranks parse the same command line."""
    if slurm_rank.is_main_process():
        output.say(text, sys.stderr)
    else:
        # Launchers kill all ranks as soon as one ends, so give rank 0 time to print the line.
        time.sleep(RANK_0_SPEAKS_S)


def command_line(command: str, words: Sequence[object]) -> str:
    """Return a command with its words quoted for a shell."""
    return " ".join([command, *(shlex.quote(str(word)) for word in words)])


def say_next(command: str, why: str = "") -> None:
    """Print the command that the user may want next, as the last line."""
    output.say(f"next: {command}{f'   ({why})' if why else ''}")


if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    SubParsers = argparse._SubParsersAction


class _Subcommands(SubParsers):
    """The subcommands of a command. The help of each one begins with what it does."""

    def add_parser(self, name: str, **arguments: Any) -> Any:
        """Add a subcommand. By default its description is its line in the list of subcommands."""
        line = arguments.get("help", "")
        arguments.setdefault("description", f"{line[:1].upper()}{line[1:]}." if line else None)
        return super().add_parser(name, **arguments)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line. Options may stand between words.

    Every command and subcommand has ``--version``; only the help of the command itself lists it.
    """

    _is_intermixed = False

    def __init__(self, *, prog: str, **arguments: Any) -> None:
        super().__init__(prog=prog, **arguments)
        self.register("action", "parsers", _Subcommands)
        about = argparse.SUPPRESS if " " in prog else "print the version and stop"
        self.add_argument("--version", action="version", version=__version__, help=about)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse like argparse's intermixed form, also inside a subcommand.

        argparse has no intermixed form for subcommands. It calls this method of a subcommand's
        parser, which then uses the form itself.
        """
        if self._is_intermixed or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        # The intermixed form calls this method again.
        self._is_intermixed = True
        try:
            words = self._with_values(sys.argv[1:] if args is None else args)
            return self.parse_known_intermixed_args(words, namespace)
        finally:
            self._is_intermixed = False

    def _with_values(self, words: Sequence[str]) -> list[str]:
        """Return ``--sbatch=--gpus=4`` for ``--sbatch --gpus=4``: argparse takes no such value."""
        known, joined = self._option_string_actions, [""]
        for word in words:
            action = known.get(joined[-1]) if joined[-1].startswith("--") else None
            is_option = word == "--" or word.partition("=")[0] in known
            if action is not None and action.nargs is None and word[:1] == "-" and not is_option:
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined[1:]

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` instead of printing the usage and ending the process."""
        raise UsageError(f"{message}; see {self.prog} --help")


def _say_as_rank(name: str, text: str) -> None:
    rank = from_launcher("RANK", "")
    output.say(f"{name}: rank {rank}: {text}" if rank else f"{name}: {text}", sys.stderr)


def check_config_dir(folder: Path | None) -> None:
    """Raise `UsageError` if `--config-dir` names no folder."""
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--config-dir {folder}: no such folder")
