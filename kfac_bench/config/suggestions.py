"""What the user may have meant by an unknown option, or by an unknown choice of a group."""

import difflib
import itertools
from collections.abc import Iterable, Sequence

from kfac_bench.config.option_table import every_option


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the most similar known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=5, cutoff=0.6)
    if not close:
        return ""

    def likeness(other: str) -> tuple[float, int]:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(other, word, strict=False))
        return difflib.SequenceMatcher(None, other, word).ratio(), len([*same])

    return f"; did you mean {max(close, key=likeness)}?"


def no_such_option(name: str, known: Iterable[str] = ()) -> str:
    """Return the line about an option that the configuration does not have.

    Args:
        name: The dotted name, as in ``optimizer.beta1``.
        known: Names without the group that are allowed in its place.
    """
    group, _, own_name = name.rpartition(".")
    every = every_option()
    if name in every:
        # Another optimizer has this option, for example.
        choices = "|".join(choice for choice, _ in every[name])
        return f"{name}: the chosen {group} has no such option; only {group}={choices} has it"
    siblings = [f"{group}.{key}" if group else key for key in known]
    by_own_name: dict[str, list[str]] = {}
    for each in every:
        by_own_name.setdefault(each.rpartition(".")[2], []).append(each)
    # A word without its group, such as lr=0.1, or an option of another group.
    same = by_own_name.get(own_name, [])
    if 0 < len(same) <= 3:
        return f"{name}: no such option; did you mean {' or '.join(same)}?"
    meant = did_you_mean(name, siblings) or did_you_mean(name, every)
    if not meant and (close := difflib.get_close_matches(own_name, by_own_name, n=1)):
        meant = f"; did you mean {by_own_name[close[0]][0]}?"
    return f"{name}: no such option{meant}"


_REMOVED = {
    (
        "backend",
        "apex",
    ): "NVIDIA has removed this wrapper after release 25.05 of Apex; use "
    "backend=ddp, which averages the same gradients",
}
"""Choices of earlier versions, with the reason and the replacement."""


def no_such_choice(group: str, word: str, choices: Sequence[str]) -> str:
    """Return the line about an unknown choice of a group, such as ``model=resnet51``."""
    if reason := _REMOVED.get((group, word)):
        return f"{group}={word}: {reason}"
    return f"{group}={word}: no such {group}{_instead(group, word, choices)}"


def what_to_choose(word: str, choices: Sequence[str]) -> str:
    """Say what to choose from: every name, or only similar names where a line has no room."""
    # The name of an experiment without its folder.
    in_folders = [choice for choice in choices if word == choice.rpartition("/")[2]]
    if in_folders:
        return f"; did you mean {in_folders[0]}?"
    if len(choices) <= 40:
        known = ", ".join(choices) or "none: the folder is empty"
        return f"{did_you_mean(word, choices)}; choose one of {known}"
    like = [name for name in choices if word in name] or difflib.get_close_matches(word, choices, 5)
    meant = f"; did you mean {', '.join(like[:5])}?" if like else ""
    return f"{meant or ';'} kfac-train --help lists all {len(choices)}"


def _instead(group: str, word: str, choices: Sequence[str]) -> str:
    for name, found in every_option().items():
        is_of_group = name.startswith(f"{group}.") and not name.endswith(".name")
        if is_of_group and any(word in option.declared["choices"] for _, option in found):
            # kfac=inverse names a method, and the group kfac has strategies.
            return f"; did you mean {name}={word}? {group}= chooses one of {', '.join(choices)}"
    return what_to_choose(word, choices)
