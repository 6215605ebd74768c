"""The Python file that ``problem=FILE`` names: who may run it, and which options follow from it.

A file runs only if the user's own command line names it. The commands call :func:`run_named` with
their words, and nothing else runs a problem file. Composing a configuration looks a file up among
those that have run. So a configuration file, a run directory or a table that names another file is
refused: it may come from somebody else.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kfac_bench.config.command_options import quoted
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.problem import Problem

T = TypeVar("T")

WORD = "problem="
GROUPS = ("data", "task", "model")


@dataclass(frozen=True)
class ProblemFile:
    """A problem file that has run."""

    path: str
    """The path as the command line gives it."""
    sha256: str
    problem: Problem

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Return the result of the user's function.

        Raises:
            UsageError: The function failed. The line says where.
        """
        try:
            return function()
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{place(self.path, error)}: {what}: {described(error)}") from error


_files: dict[str, ProblemFile] = {}
"""The files that have run in this process, by their paths."""


def run_named(words: Sequence[str]) -> None:
    """Run the problem file that the words of the user's own command line name.

    A word of another file, such as an override in a table, must never come here.

    Raises:
        UsageError: The file cannot be read, fails, or has no ``problem``.
    """
    found = _paths(words)
    if len(found) > 1:
        raise UsageError(f"problem={found[0]} and problem={found[1]}: name one problem")
    for path in found:
        if path not in _files:
            _files[path] = _run(path)


def paths() -> list[str]:
    """Return the paths of the files that have run, for processes that this one starts."""
    return list(_files)


def named(path: str | None, option: str = "problem") -> ProblemFile:
    """Return a file that the user's command line has named.

    Args:
        path: The path, as the configuration gives it.
        option: The option that has this path, for the message.

    Raises:
        UsageError: The command line names another file or none.
    """
    if path is None:
        raise UsageError(f"{option} is missing: name the file of your problem with problem=FILE")
    if path not in _files:
        raise UsageError(
            f"{option}={path}: a configuration or a table names this Python file, but your command "
            f"line does not. The file is a program: read it, and then add problem={path} to the "
            "command"
        )
    return _files[path]


def expand(words: Sequence[str]) -> list[str]:
    """Replace ``problem=FILE`` by the options that follow from the file.

    The problem's batch size and target come first, so that words of the user replace them.

    Raises:
        UsageError: The file has not been named on the command line.
    """
    found = _paths(words)
    if not found:
        return list(words)
    if len(found) > 1:
        raise UsageError(f"problem={found[0]} and problem={found[1]}: name one problem")
    file = named(found[0])
    for word in words:
        group, _, value = word.partition("=")
        if group in GROUPS and value != "problem":
            raise UsageError(
                f"{word} does not fit problem={file.path}, which has its own model, data and loss. "
                f"Remove {word}"
            )
    options = [f"{group}=problem" for group in GROUPS]
    quoted = _quoted(file.path)
    options += [f"{group}.file={quoted}" for group in GROUPS]
    # A digest of digits only would be read as a number.
    options += [f"data.sha256='{file.sha256}'", f"trainer.batch_size={file.problem.batch_size}"]
    if file.problem.target is not None:
        # A number of NumPy shows its type.
        options.append(f"trainer.target={float(file.problem.target)!r}")
    return [*options, *(word for word in words if not word.startswith(WORD))]


def _paths(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(w.removeprefix(WORD) for w in words if w.startswith(WORD)))


def _quoted(path: str) -> str:
    """Return a path in the quotes of Hydra's grammar."""
    if not path.isprintable() or "${" in path:
        raise UsageError(f"problem={path}: rename the file: its path has special characters")
    return quoted(path)


def title(path: str) -> str:
    """Return the name of a problem in names of runs and in tables: that of its file."""
    return re.sub(r"[^\w.=+-]", "_", Path(path).stem)[:40] or "problem"


def _run(path: str) -> ProblemFile:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"problem={path}: cannot be read ({error.strerror}). Give the path of a Python file"
        ) from None
    from kfac_bench import randomness
    from kfac_bench.problem import Problem

    module = types.ModuleType(f"kfac_problem_{title(path)}")
    module.__file__ = str(Path(path).resolve())
    # Classes of the file look up their module, for example when they are pickled.
    sys.modules[module.__name__] = module
    # Last, so that a file beside the problem hides no installed package.
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        with randomness.kept():
            # A random split of the data must be the same at each start and on each rank.
            randomness.seed_all(0)
            exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 - the user named it
    except (Exception, SystemExit) as error:
        raise UsageError(f"{place(path, error)}: {described(error)}") from error
    problem = module.__dict__.get("problem")
    if not isinstance(problem, Problem):
        has = "has no variable `problem`" if problem is None else "has another kind of `problem`"
        raise UsageError(
            f"{path}: the file {has}. Write `from kfac_bench import Problem` and "
            "`problem = Problem(...)`"
        )
    return ProblemFile(path, hashlib.sha256(source).hexdigest()[:16], problem)


def place(path: str, error: BaseException) -> str:
    """Return ``path:line`` of the innermost line of the file that raised, or the path alone."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == path), None)
    return path if line is None else f"{path}:{line}"


def described(error: BaseException) -> str:
    """Return class and message of an exception on one line of moderate length."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    # The message of an error of ours is a sentence of its own.
    if isinstance(error, ValueError) and text.startswith("Problem: "):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
