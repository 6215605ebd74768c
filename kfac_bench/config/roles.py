"""What every option declares, looked up by its dotted name, for names that come from files.

Files of older and newer versions name options that this version does not have, and lack options
that it has. An unknown option counts as a RESULT option, because one row too many in a table is
better than two settings in one row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from omegaconf import MISSING

from kfac_bench.config.options import RECORD, RESULT, Role, options
from kfac_bench.config.registry import TABLES, options_class
from kfac_bench.config.train import TrainConfig


@dataclass(frozen=True)
class DeclaredOption:
    """What an option declares; ``original`` is MISSING if it has no default."""

    role: Role = RESULT
    resumable: bool = False
    original: Any = MISSING


def declared(name: str, given: Mapping[str, Any]) -> DeclaredOption:
    """Return what the option called ``name`` declares.

    Args:
        name: The dotted name of the option, such as ``optimizer.beta2``.
        given: Options by their dotted names. ``optimizer.name`` among them says whose ``beta2``.
    """
    group = name.partition(".")[0]
    # All options of the loggers are records, also logger.name of older versions.
    unknown = DeclaredOption(RECORD if group == "logger" else RESULT)
    return _options_of(group, str(given.get(f"{group}.name"))).get(name, unknown)


def original_results(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and original value of each RESULT option of the groups that ``given`` names."""
    for group in {name.partition(".")[0] for name in given}:
        for name, option in _options_of(group, str(given.get(f"{group}.name"))).items():
            if option.role is RESULT and option.original != MISSING:
                yield name, option.original


@cache
def _options_of(group: str, choice: str) -> Mapping[str, DeclaredOption]:
    """Return the options of a choice by name; of an unknown choice, those all choices have."""
    schema: Any = get_type_hints(TrainConfig).get(group)
    if is_dataclass(schema):
        if choice in TABLES.get(group, {}):
            schema = options_class(group, choice)
        every = options(schema(), f"{group}.")
    else:  # an option that belongs to no group, such as the seed
        every = options(TrainConfig())
    return {
        name: DeclaredOption(meta["role"], meta["resumable"], meta["original"])
        for name, _, meta in every
        if "role" in meta
    }
