"""Options: dataclass fields with a meaning, a role, a range and a default."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from itertools import pairwise
from typing import Any

from omegaconf import MISSING

from kfac_bench.errors import UsageError


class Role(Enum):
    """The part of a run that an option changes. Four decisions depend on the role.

    * **Run id**: a hash of the RESULT and PLACE options that are not at their original values (see
      :func:`option`), and of the number of the Slurm job. So another data folder is another run
      directory. A later version with a new option, or with another default, changes no id of an
      equal configuration.
    * **Same run**: a run directory is continued only with the RESULT options that its run has,
      except those that are ``resumable``. PLACE and RECORD options may change.
    * **Rows of tables**: runs are one row if all RESULT options except the seed are equal.
    * **Ranks of one run** have the same RESULT and RECORD options, except those that are
      ``per_node``. PLACE options may differ.
    """

    RESULT = "result"
    """The computation, or the time that it takes. ``trainer.device``, ``trainer.threads``,
    ``trainer.pin`` and ``data.workers`` are RESULT options, because tables compare seconds."""
    PLACE = "place"
    """The place of files that the run reads: its data, and the checkpoint that it starts from."""
    RECORD = "record"
    """The output of the run, and its checks. Neither the weights nor the training seconds
    of a run that succeeds depend on a RECORD option."""


RESULT, PLACE, RECORD = Role.RESULT, Role.PLACE, Role.RECORD


class Section:
    """A group of options; the base of the options of every model, dataset, task and so on."""

    def check(self, config: Any) -> None:
        """Raise :class:`UsageError` if these options clash with other options of the run.

        Each option alone is already known to be in its range.

        Args:
            config: All options of the run, a ``TrainConfig``. It is typed as Any here, because
                ``TrainConfig`` consists of sections: naming it would be an import circle.
        """


def option(
    default: Any,
    help: str,
    role: Role,
    *,
    original: Any = MISSING,
    resumable: bool = False,
    per_node: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Collection[str] = (),
) -> Any:
    """Return a dataclass field with its meaning, its role and its range.

    Args:
        default: Value where neither YAML nor the command line sets one.
        help: Meaning, as ``kfac-train --help`` prints it.
        role: What the value changes; see :class:`Role`.
        original: Value of runs that older versions made without naming the option: the default of
            that time, or what they did before the option existed. By default ``default``. Never
            change it: run ids leave out options at this value.
        resumable: A run may be continued with another value of this RESULT option.
        per_node: The ranks of one run may have different values of this option.
        at_least: Smallest value that is allowed.
        above: The value must be greater than this.
        at_most: Largest value that is allowed.
        below: The value must be smaller than this.
        choices: The allowed strings; empty if any string is allowed.
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    metadata = {
        "help": help,
        "role": role,
        "original": default if original is MISSING else original,
        "resumable": resumable,
        "per_node": per_node,
        "bounds": {k: v for k, v in bounds.items() if v is not None},
        "choices": choices,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def options(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(dotted name, value, metadata) of every option below ``config``."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from options(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value, dict(f.metadata)


MOST = 2**62
"""Limit of all numbers. The length of a range can hold this number, and float32 its square."""


def check_option(name: str, value: Any, meta: dict[str, Any]) -> None:
    """Raise :class:`UsageError` if the value is out of the range that ``meta`` gives."""
    choices, bounds = meta.get("choices", ()), meta.get("bounds", {})
    if choices and value not in choices:
        raise UsageError(f"{name}={value}: choose one of {', '.join(choices)}")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    # math.isfinite() fails for a whole number that is too large for a float.
    is_finite = isinstance(value, int) or math.isfinite(value)
    if not is_finite and not bounds:
        raise UsageError(f"{name}={value}: must be a finite number ({meta['help']})")
    holds = {
        "at least": lambda bound: value >= bound,
        "above": lambda bound: value > bound,
        "at most": lambda bound: value <= bound,
        "below": lambda bound: value < bound,
    }
    for word, bound in bounds.items():
        if not holds[word](bound) or not is_finite:
            said = range_in_words(bounds)
            raise UsageError(f"{name}={value}: must be {said} ({meta['help']})")
    if value > MOST:
        shown = f"{str(value)[:25]}..." if isinstance(value, int) else value
        raise UsageError(f"{name}={shown}: must be at most {MOST} ({meta['help']})")


def allows_one_value(meta: Mapping[str, Any]) -> bool:
    """Return whether the option has no meaning: for example, the image size of a text dataset."""
    bounds = meta.get("bounds", {})
    return "at least" in bounds and bounds["at least"] == bounds.get("at most")


def range_in_words(bounds: Mapping[str, float]) -> str:
    """Return the bounds of an option as ``at least 0 and below 1``; nothing without bounds."""
    if len(set(bounds.values())) == 1 < len(bounds):
        return f"{next(iter(bounds.values())):.10g}"  # at least 28 and at most 28
    # Ten digits hold the largest bound, that of the seed.
    return " and ".join(f"{word} {bound:.10g}" for word, bound in bounds.items())


MOST_EPOCHS = 1e9
"""Limit of options in epochs. Times the steps of an epoch they must still be a whole number."""


def check_rising(name: str, epochs: Sequence[float]) -> None:
    """Raise :class:`UsageError` if a list of epochs does not rise, or has other numbers."""
    if not all(0 < a < b for a, b in pairwise([*epochs, MOST_EPOCHS])):
        raise UsageError(
            f"{name}={epochs}: must be epochs above 0 in rising order, below {MOST_EPOCHS:.10g}"
        )


def check_patterns(name: str, patterns: Sequence[str]) -> None:
    """Raise :class:`UsageError` if one of the patterns is not a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{name}: {pattern!r} is not a regular expression: {error}") from None
