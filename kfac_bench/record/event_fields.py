"""Check values from JSON against the annotations of a dataclass, because files are not trusted.

:func:`kfac_bench.record.events.read` builds its events from what :func:`checked` returns.
"""

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

Check = Callable[[Any], Any]


def checked(cls: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in ``found`` that are fields of ``cls``, as keyword arguments of ``cls``.

    Numbers become ``int`` or ``float`` as the field asks. An entry of a mapping that has a wrong
    type is left out. A field that must be a list and is none becomes an empty list.

    Raises:
        ValueError: Another field has a wrong type, or a field without a default is missing. The
            message names the field.
    """
    made = {}
    for name, (check, required) in _checks(cls).items():
        if name not in found:
            if required:
                raise ValueError(f"{cls.__name__} lacks {name!r}")
            continue
        try:
            made[name] = check(found[name])
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{cls.__name__}: {name!r} is not of its type") from None
    return made


@cache
def _checks(cls: type) -> Mapping[str, tuple[Check, bool]]:
    hints = typing.get_type_hints(cls)
    return {
        f.name: (_check(hints[f.name]), f.default is MISSING and f.default_factory is MISSING)
        for f in fields(cls)
    }


def _check(hint: Any) -> Check:
    """Return a function that returns its argument as the type ``hint``, or raises."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (types.UnionType, typing.Union):  # X | None
        (some,) = (_check(x) for x in arguments if x is not type(None))
        return lambda value: None if value is None else some(value)
    if origin is Mapping:
        of = _check(arguments[1])
        return lambda value: _those_that_are(of, value)
    if origin is Sequence:  # the readers of the list check its items
        return lambda value: value if isinstance(value, list) else []
    if hint in (int, float):
        return lambda value: hint(_exactly(value, int, float))
    if hint is str:
        return lambda value: str(_exactly(value, str, int, float, type(None)))
    return lambda value: _exactly(value, hint)


def _those_that_are(of: Check, value: Any) -> dict[str, Any]:
    """Return the entries of a mapping whose values have the right type."""
    found = {}
    for key, each in _exactly(value, dict).items():
        with suppress(TypeError, ValueError, OverflowError):
            found[key] = of(each)
    return found


def _exactly(value: Any, *kinds: type) -> Any:
    """Return the value if its type is one of ``kinds``; raise ``TypeError`` otherwise."""
    # isinstance() would take True for an int.
    if type(value) not in kinds:
        raise TypeError
    return value
