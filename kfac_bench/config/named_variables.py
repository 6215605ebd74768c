"""Environment variables in options: only those that the user's own command line names.

A word such as ``data.root='${oc.env:SCRATCH}'`` takes its value from the environment, where users
also keep passwords. Configuration files may come from somebody else, and options are written to
records and to W&B. So a file cannot read a variable that no word of the command line names.
"""

import os
import re
from collections.abc import Iterable

_NAME = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)")
_MISSING = "kfac_bench: no default"

_named: set[str] = set()


def allow(words: Iterable[str]) -> None:
    """Allow the variables that the words of the user's own command line name.

    A word of another origin, such as an override in a table, must never come here.
    """
    _named.update(name for word in words for name in _NAME.findall(word))


def allowed() -> list[str]:
    """Return words that name the allowed variables, for processes that this one starts."""
    return [f"${{oc.env:{name}}}" for name in sorted(_named)]


def value_of(name: str, default: str | None = _MISSING) -> str | None:
    """Return the value of a variable, in place of OmegaConf's resolver ``oc.env``.

    Raises:
        ValueError: The command line does not name the variable, or the variable is not set.
    """
    if name not in _named:
        raise ValueError(
            f"a configuration file asks for the environment variable {name!r}, but your command "
            "line does not. If its value may be written to records, set the option to "
            f"'${{oc.env:{name}}}' on the command line"
        )
    if name in os.environ:
        return os.environ[name]
    if default == _MISSING:
        raise ValueError(f"the environment variable {name!r} is not set")
    return default
