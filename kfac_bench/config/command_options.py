"""Options of a command itself, in addition to the overrides of kfac-train.

``kfac-plan``, ``kfac-plan simulate`` and ``kfac-bench run|scaling`` take words such as
``world_size=4 model=resnet50`` in any order: here the first word is an option of the command, and
the second word is an override.
"""

import re
from collections.abc import Mapping, Sequence

from kfac_bench.errors import UsageError


def split_words(
    words: Sequence[str], defaults: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the command's own options, with `defaults` filled in, and all other words."""
    own, overrides = dict(defaults), []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in own:
            own[name] = value
        else:
            overrides.append(word)
    return own, overrides


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


def one_of(name: str, text: str, choices: Sequence[str]) -> str:
    """Return `text`; raise :class:`UsageError` if it is not one of the choices."""
    if text not in choices:
        raise UsageError(f"{name}={text}: choose one of {', '.join(choices)}")
    return text


def whole_number(name: str, text: str, most: int | None = None) -> int:
    """Return the whole number from 1 to `most`; raise :class:`UsageError` for other texts."""
    # isdecimal alone accepts digits of other scripts; 13 digits keep int() fast.
    is_whole = text.isascii() and text.isdecimal() and len(text) < 14
    if not is_whole or int(text) < 1 or (most is not None and int(text) > most):
        limit = "" if most is None else f" and at most {most}"
        raise UsageError(f"{name}={text}: expected a whole number of at least 1{limit}")
    return int(text)


def real_number(name: str, text: str, *, allow_zero: bool = False) -> float:
    """Return the number above 0 (or from 0 on); raise :class:`UsageError` for other texts."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < 1e9 or (allow_zero and value == 0)):
        least = "of at least 0" if allow_zero else "above 0"
        raise UsageError(f"{name}={text}: expected a number {least}")
    return value
