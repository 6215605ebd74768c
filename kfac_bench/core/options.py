"""A table of options: one TypedDict, whose fields have an :class:`Option` each.

The table is written once. A class that takes its fields as keywords gets its signature and its
docstring from the table (:func:`takes_options`), and so do the options of ``kfac-train``. The
tables are in :mod:`.kfac_options`. The command line must start fast, so this file needs no torch.
"""

import difflib
import inspect
import math
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """The default, the meaning and the range of an option."""

    default: Any
    meaning: str
    """A sentence without its capital and its stop. ``kfac-train --help`` prints it."""
    details: str = ""
    """Further sentences for the docstring, and lists."""
    choices: tuple[str, ...] = ()
    """The allowed strings; empty if any value is allowed."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    is_compared: bool = False
    """True if ranks compare the option itself before the first step. Most options are part of the
    plan or of the schedules, which ranks compare as well."""

    def entry(self, name: str, default: object) -> str:
        """Return the whole text under ``name``, as the section ``Args`` of a docstring has it."""
        text = f"{name}: {self.meaning[0].upper()}{self.meaning[1:]}. Default: ``{default!r}``."
        details = inspect.cleandoc(self.details)
        if details.startswith("*"):  # a list stays as it is, only the first paragraph is wrapped
            details = f"\n\n{details}"
        first, gap, others = details.partition("\n\n")
        lines = textwrap.wrap(f"{text} {first}", 92, subsequent_indent="    ")
        return "\n".join(lines) + gap + textwrap.indent(others, "    ")

    def check(self, name: str, value: Any, hint: Any) -> None:
        """Raise ValueError if the value is not among the choices, or outside the range.

        A number above a bound must be finite, and a number with a smallest value must be whole.
        """
        may_be_none = type(None) in get_args(hint)
        if self.choices and value not in self.choices:
            raise ValueError(f"{name}={value!r}: choose one of {', '.join(self.choices)}")
        if value is None and may_be_none:
            return
        suffix = ", or None" if may_be_none else ""
        if self.above is not None and not _is_between(value, self.above, self.at_most):
            most = "finite" if self.at_most is None else f"at most {self.at_most:g}"
            raise ValueError(f"{name}={value!r}: must be above {self.above:g} and {most}{suffix}")
        if self.at_least is not None and not (type(value) is int and value >= self.at_least):
            raise ValueError(
                f"{name}={value!r}: must be a whole number of at least {self.at_least:g}{suffix}"
            )


def _is_between(value: Any, above: float, at_most: float | None) -> bool:
    try:
        return bool(above < value < math.inf) and (at_most is None or bool(value <= at_most))
    except TypeError:  # no number
        return False


def table(options: Any) -> dict[str, Option]:
    """Return the options of a TypedDict by name."""
    return {name: hint.__metadata__[0] for name, hint in options.__annotations__.items()}


def types(options: Any) -> dict[str, Any]:
    """Return the type of each option of a TypedDict."""
    import torch

    return get_type_hints(options, localns={"torch": torch})


def checked(owner: str, options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all options of a TypedDict.

    Args:
        owner: The class that takes the options, for the message.
        options: The TypedDict.
        given: The values that the user has given. All others are defaults.

    Raises:
        TypeError: There is no such option.
        ValueError: A value is out of range.
    """
    known, hints = table(options), types(options)
    check_names(owner, known, given)
    values = {name: option.default for name, option in known.items()} | dict(given)
    for name, option in known.items():
        option.check(name, values[name], hints[name])
    return values


def check_names(owner: str, known: Mapping[str, Option], given: Collection[str]) -> None:
    """Raise TypeError if the class has no such keyword, as Python does for other functions."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{owner}.__init__() got an unexpected keyword argument {name!r}{hint}")


def takes_options(options: Any, **other_defaults: Any) -> Callable[[type[T]], type[T]]:
    """Show the options of a TypedDict in the signature and the docstring of a class.

    Type checkers and editors read ``Unpack[...]``. ``help``, ``inspect.signature`` and the
    documentation site read what this decorator makes of it.

    Args:
        options: The TypedDict.
        other_defaults: Defaults that the class takes in another form than the table has.
    """

    def decorate(owner: type[T]) -> type[T]:
        hints, known = types(options), table(options)
        values = {name: option.default for name, option in known.items()} | other_defaults
        init: Any = owner.__init__
        signature = inspect.signature(init)
        explicit = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=values[name], annotation=hint
            )
            for name, hint in hints.items()
        ]
        init.__signature__ = signature.replace(parameters=[*explicit, *keywords])
        explicit_hints = {p.name: p.annotation for p in explicit if p.annotation is not p.empty}
        init.__annotations__ = explicit_hints | hints | {"return": None}
        each = (option.entry(name, values[name]) for name, option in known.items())
        entries = textwrap.indent("".join(f"{entry}\n" for entry in each), " " * 4)
        if owner.__doc__ is not None:  # python -OO removes it
            # Python 3.13 removes the indentation of docstrings, as cleandoc does.
            before, _, after = inspect.cleandoc(owner.__doc__).partition("    options: ")
            owner.__doc__ = before + entries + after[after.index("\n") + 1 :]
        return owner

    return decorate
