"""The Python file that ``problem=FILE`` names: who may run it, and which options follow from it.

A file runs only if the user's own command line names it. The commands call :func:`run_named` with
their words, and nothing else runs a problem file. Composing a configuration looks a file up among
those that have run. So a configuration file, a run directory or a table that names another file is
refused: it may come from somebody else.

The file's ``problem`` may be a function whose parameters have defaults. ``problem.NAME=VALUE`` sets
a parameter.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import re
import shlex
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kfac_bench.config.command_options import quoted
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from kfac_bench.problem import Problem

T = TypeVar("T")

WORD, ARGUMENT = "problem=", "problem."
GROUPS = ("data", "task", "model")


@dataclass(frozen=True)
class ProblemFile:
    """The problem of a file that has run."""

    path: str
    """The path as the command line gives it."""
    sha256: str
    problem: Problem
    arguments: str = ""
    """Arguments of the function ``problem`` that differ from its defaults, as shell words."""

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


@dataclass(frozen=True)
class _RunFile:
    """A file that has run."""

    path: str
    sha256: str
    made: Problem | Callable[..., Any]
    """The object that the file calls ``problem``."""
    built: dict[str, ProblemFile] = field(default_factory=dict)
    """The problems that were built, by their arguments."""

    def defaults(self) -> dict[str, Any]:
        """Return the parameters of the function ``problem``, with their defaults."""
        if not inspect.isfunction(self.made):
            return {}
        return {n: p.default for n, p in inspect.signature(self.made).parameters.items()}


_files: dict[str, _RunFile] = {}
"""The files that have run in this process, by their paths."""


def run_named(words: Sequence[str]) -> None:
    """Run the problem file that the words of the user's own command line name.

    A word of another file, such as an override in a table, must never come here.

    Raises:
        UsageError: The file cannot be read, fails, or has no ``problem``.
    """
    path = _path(words)
    if path is not None and path not in _files:
        _files[path] = _run(path)


def paths() -> list[str]:
    """Return the paths of the files that have run, for processes that this one starts."""
    return list(_files)


def named(path: str | None, option: str = "problem", arguments: str = "") -> ProblemFile:
    """Return the problem of a file that the user's command line has named.

    Args:
        path: The path, as the configuration gives it.
        option: The option that has this path, for the message.
        arguments: Arguments of the file's function ``problem``, as shell words.

    Raises:
        UsageError: The command line names another file or none, or the function fails.
    """
    if path is None:
        raise UsageError(f"{option} is missing: name the file of your problem with problem=FILE")
    if path not in _files:
        raise UsageError(
            f"{option}={path}: a configuration or a table names this Python file, but your command "
            f"line does not. The file is a program: read it, and then add problem={path} to the "
            "command"
        )
    file = _files[path]
    if arguments not in file.built:
        file.built[arguments] = _built(file, arguments)
    return file.built[arguments]


def chosen(words: Sequence[str]) -> ProblemFile | None:
    """Return the problem that ``problem=FILE`` and ``problem.NAME=VALUE`` choose, if any.

    Raises:
        UsageError: The file has not been named on the command line, or an argument is wrong.
    """
    path = _path(words)
    given = [word.removeprefix(ARGUMENT) for word in words if word.startswith(ARGUMENT)]
    if path is not None:
        return named(path, arguments=shlex.join(given))
    if given:
        raise UsageError(f"{ARGUMENT}{given[0]} is an argument of a problem file. Add problem=FILE")
    return None


def separated(words: Sequence[str]) -> list[list[str]]:
    """Return the words of each job of a sweep over problem files and their arguments.

    ``problem=a.py,b.py problem.width=8,16`` makes four jobs.
    """
    choices = []
    for word in words:
        name, equals, values = word.partition("=")
        if equals and word.startswith((WORD, ARGUMENT)):
            choices.append([f"{name}={value}" for value in values.split(",")])
        else:
            choices.append([word])
    return [list(job) for job in itertools.product(*choices)]


def expand(words: Sequence[str]) -> list[str]:
    """Replace ``problem=FILE`` by the options that follow from the file.

    The problem's batch size and target come first, so that words of the user replace them.

    Raises:
        UsageError: The file has not been named on the command line.
    """
    file = chosen(words)
    if file is None:
        return list(words)
    for word in words:
        group, _, value = word.partition("=")
        if group in GROUPS and value != "problem":
            raise UsageError(
                f"{word} does not fit problem={file.path}, which has its own model, data and loss. "
                f"Remove {word}"
            )
    options = [f"{group}=problem" for group in GROUPS]
    path, arguments = _quoted(file.path), quoted(file.arguments)
    options += [f"{group}.file={path}" for group in GROUPS]
    if file.arguments:
        options += [f"{group}.arguments={arguments}" for group in GROUPS]
    # A digest of digits only would be read as a number.
    options += [f"data.sha256='{file.sha256}'", f"trainer.batch_size={file.problem.batch_size}"]
    if file.problem.target is not None:
        # A number of NumPy shows its type.
        options.append(f"trainer.target={float(file.problem.target)!r}")
    return [*options, *(word for word in words if not word.startswith((WORD, ARGUMENT)))]


def _path(words: Sequence[str]) -> str | None:
    found = list(dict.fromkeys(w.removeprefix(WORD) for w in words if w.startswith(WORD)))
    if len(found) > 1:
        raise UsageError(f"problem={found[0]} and problem={found[1]}: name one problem")
    return found[0] if found else None


def _quoted(path: str) -> str:
    """Return a path in the quotes of Hydra's grammar."""
    if not path.isprintable() or "${" in path:
        raise UsageError(f"problem={path}: rename the file: its path has special characters")
    return quoted(path)


def title(path: str, arguments: str = "") -> str:
    """Return the name of a problem in names of runs and in tables: its file and its arguments."""
    stem = Path(path).stem[:40] or "problem"
    return re.sub(r"[^\w.=+-]", "_", f"{stem}-{arguments}" if arguments else stem)[:70]


def _run(path: str) -> _RunFile:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"problem={path}: cannot be read ({error.strerror}). Give the path of a Python file"
            f"{', or add --multirun for several files' if ',' in path else ''}"
        ) from None
    from kfac_bench.problem import Problem

    module = types.ModuleType(f"kfac_problem_{title(path)}")
    module.__file__ = str(Path(path).resolve())
    # Classes of the file look up their module, for example when they are pickled.
    sys.modules[module.__name__] = module
    # Last, so that a file beside the problem hides no installed package.
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    # Without `dont_inherit` the annotations of the file would become text, as those of this file.
    compiled = partial(compile, source, path, "exec", dont_inherit=True)
    _seeded(path, lambda: exec(compiled(), module.__dict__))  # noqa: S102
    _check_modules(path, folder)
    problem = module.__dict__.get("problem")
    if not isinstance(problem, Problem) and not inspect.isfunction(problem):
        has = "has no variable `problem`" if problem is None else "has another kind of `problem`"
        how = "`from kfac_bench import Problem` and `problem = Problem(...)`"
        raise UsageError(f"{path}: the file {has}. Write {how}")
    file = _RunFile(path, hashlib.sha256(source).hexdigest()[:16], problem)
    for name, default in file.defaults().items():
        if default is inspect.Parameter.empty:
            raise UsageError(
                f"{path}: the parameter `{name}` of the function `problem` has no default. Give "
                f"it one, as in `def problem({name}=64):`"
            )
    return file


def _check_modules(path: str, folder: str) -> None:
    """Refuse a file that may have got a module of another problem's folder instead of its own."""
    others = {Path(other).resolve().parent for other in _files} - {Path(folder)}
    for name, module in list(sys.modules.items()):
        place = Path(getattr(module, "__file__", None) or "")
        place = place.parent if place.name == "__init__.py" else place
        is_other = place.parent in others and not name.startswith("kfac_problem_")
        if is_other and (Path(folder) / place.name).exists():
            raise UsageError(
                f"{path}: the module {name} comes from {place.parent}, the folder of another "
                "problem file. Run the two files one by one"
            )


def _seeded(path: str, function: Callable[[], T]) -> T:
    """Call code of the file; its random numbers, as of a split, are the same at each start."""
    from kfac_bench import randomness

    try:
        with randomness.preserve_rng():
            randomness.seed_all(0)
            return function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{place(path, error)}: {described(error)}") from error


def _built(file: _RunFile, arguments: str) -> ProblemFile:
    """Return the problem of a file with these arguments."""
    from kfac_bench.problem import Problem

    defaults, made = file.defaults(), file.made
    given = {}
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UsageError(f"data.arguments={arguments}: {error}. Use problem.NAME=VALUE") from None
    for word in words:
        name, _, text = word.partition("=")
        if name not in defaults:
            raise UsageError(f"problem.{word}: {_no_parameter(file, name)}")
        given[name] = _value(word, text, defaults[name])
    changed = {name: given[name] for name in sorted(given) if given[name] != defaults[name]}
    if isinstance(made, Problem):
        return ProblemFile(file.path, file.sha256, made)
    problem = _seeded(file.path, lambda: made(**changed))
    if not isinstance(problem, Problem):
        raise UsageError(
            f"{file.path}: the function `problem` returned an object of class "
            f"{type(problem).__name__}. Return a kfac_bench.Problem"
        )
    canonical = shlex.join(f"{name}={_text(value)}" for name, value in changed.items())
    return ProblemFile(file.path, file.sha256, problem, canonical)


def _no_parameter(file: _RunFile, name: str) -> str:
    if defaults := file.defaults():
        return f"the function `problem` in {file.path} has the parameters {', '.join(defaults)}"
    return (
        f"{file.path} takes no arguments. Write a function `def problem({name or 'width'}=64):` "
        "that returns Problem(...)"
    )


def _value(word: str, text: str, default: Any) -> Any:
    """Return the value of an argument, which has the type of its default."""
    kinds: Mapping[type, tuple[str, Callable[[str], Any]]] = {
        bool: ("true or false", {"true": True, "false": False}.__getitem__),
        int: ("a whole number", int),
        float: ("a number", float),
        str: ("a text", str),
    }
    if type(default) not in kinds:
        raise UsageError(
            f"problem.{word}: its default in the file is {default!r}. Only a number, a text or "
            "True/False can be set"
        )
    name, parse = kinds[type(default)]
    try:
        return parse(text.lower() if isinstance(default, bool) else text)
    except (ValueError, KeyError):
        several = "; several values need --multirun" if "," in text else ""
        raise UsageError(
            f"problem.{word}: must be {name}, as its default {_text(default)}{several}"
        ) from None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
