"""Options of a command itself, in addition to the overrides of kfac-train.

A command such as ``kfac-plan --world-size 4 model=resnet50`` has options with two dashes, which
argparse reads, and overrides for Hydra, in any order.
"""

import argparse
import re
import shlex
from collections.abc import Sequence

from kfac_bench.errors import UsageError


def _long_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options of a command that take a value, by their names without dashes."""
    return {
        each.dest: each
        for each in parser._actions
        if each.option_strings and each.nargs is None and each.dest != "version"
    }


def refuse_old_words(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise :class:`UsageError` for a word such as ``world_size=4`` that is an option now."""
    known = _long_options(parser)
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in known:
            raise UsageError(f"{word}: write {known[name].option_strings[-1]} {value}")


def given_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the options with values that are not the defaults, as words of a command line."""
    words: list[str] = []
    for name, action in _long_options(parser).items():
        value = getattr(options, name)
        if value != action.default:
            words += [action.option_strings[-1], str(value)]
    return words


_OWN_SBATCH = re.compile(r"--(dep|j)|-[dJ]")
"""Options of sbatch that order the jobs: dependency and job name. sbatch also takes short forms."""


def sbatch_options(options: argparse.Namespace) -> list[str]:
    """Return the words of ``--sbatch``, which are quoted as in a shell.

    Raises:
        UsageError: A quote is not closed, no job is submitted, or kfac-bench sets an option itself.
    """
    try:
        words = shlex.split(options.sbatch)
    except ValueError as error:
        text = f"--sbatch {options.sbatch}: these are no words of a shell ({error})"
        raise UsageError(f"{text}. Close each quote") from None
    if words and options.launcher == "local":
        raise UsageError(
            "--sbatch has options of jobs, but --launcher is local: add --launcher slurm"
        )
    for word in words:
        if _OWN_SBATCH.match(word):
            raise UsageError(
                f"--sbatch {word}: kfac-bench sets this option of its jobs itself. Leave it out"
            )
    return words


def quoted(text: str) -> str:
    """Return a text in the quotes of Hydra's grammar, whatever characters it has."""
    text = re.sub(r"(\\*)'", lambda found: 2 * found[1] + r"\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"


def path_word(option: str, path: object) -> str:
    """Return the override ``option=path``, with quotes if Hydra would not read the path as it is.

    Without quotes Hydra refuses many characters, such as ``é`` and ``(``, and reads ``1e3`` as a
    number.
    """
    is_plain = re.fullmatch(r"[\w.+-]*/[\w./+-]*", str(path), re.ASCII)
    return f"{option}={path if is_plain else quoted(str(path))}"


def whole_number(name: str, text: str, most: int | None = None) -> int:
    """Return the whole number from 1 to `most`; raise :class:`UsageError` for other texts."""
    # isdecimal alone accepts digits of other scripts; 13 digits keep int() fast.
    is_whole = text.isascii() and text.isdecimal() and len(text) < 14
    if not is_whole or int(text) < 1 or (most is not None and int(text) > most):
        limit = "" if most is None else f" and at most {most}"
        raise UsageError(f"{_given(name, text)}: expected a whole number of at least 1{limit}")
    return int(text)


def real_number(name: str, text: str, *, allow_zero: bool = False) -> float:
    """Return the number above 0 (or from 0 on); raise :class:`UsageError` for other texts."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < 1e9 or (allow_zero and value == 0)):
        least = "of at least 0" if allow_zero else "above 0"
        raise UsageError(f"{_given(name, text)}: expected a number {least}")
    return value


def _given(name: str, text: str) -> str:
    """Return the option as the user wrote it: ``--rounds 0``, or ``ranks=0`` in a file."""
    return f"{name} {text}" if name.startswith("--") else f"{name}={text}"
