"""What an option is: a dataclass field with its meaning, its range and its default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from kfac_bench.errors import UsageError


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with its meaning and its range, both read by people and by :func:`check`."""
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    metadata = {
        "help": help,
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


def check_option(name: str, value: Any, meta: dict[str, Any]) -> None:
    """Raise :class:`UsageError` if the value is out of the range that ``meta`` gives."""
    choices, bounds = meta.get("choices", ()), meta.get("bounds", {})
    if choices and value not in choices:
        raise UsageError(f"{name}={value}: choose one of {', '.join(choices)}")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not math.isfinite(value) and not bounds:
        raise UsageError(f"{name}={value}: must be a finite number ({meta['help']})")
    holds = {
        "at least": lambda bound: value >= bound,
        "above": lambda bound: value > bound,
        "at most": lambda bound: value <= bound,
        "below": lambda bound: value < bound,
    }
    for word, bound in bounds.items():
        if not holds[word](bound) or value in (float("inf"), float("-inf")):
            said = " and ".join(f"{w} {b:g}" for w, b in bounds.items())
            raise UsageError(f"{name}={value}: must be {said} ({meta['help']})")
