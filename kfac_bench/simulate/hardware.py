"""conf/hardware/NAME.yaml: the rates of a machine, each with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from kfac_bench.errors import UsageError
from kfac_bench.simulate.network import ALGORITHMS, Network, NetworkLink
from kfac_bench.simulate.rates import DEFAULT, Rates

KEYS = ("network", "rates", "overlap", "crowding")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine, or cluster."""

    name: str
    network: Network
    rates: Rates
    overlap: float = 0.0
    """Share of backward during which gradients are already sent."""
    crowding: Mapping[int, float] = field(default_factory=dict)
    """How many times as long a rank computes with so many on its node: they share cores, caches
    and memory. Empty where each has a machine of its own, a GPU."""

    def slowdown(self, world_size: int) -> float:
        """How many times as long a rank computes as one alone.

        Straight lines between the numbers of ranks that are known, from the origin beyond the most.
        """
        ranks = min(world_size, self.network.ranks_per_node)
        low, factor = 1, 1.0
        for high, more in sorted(self.crowding.items()):
            if ranks < high:
                return factor + (more - factor) * (ranks - low) / (high - low)
            low, factor = high, more
        return factor * ranks / low if self.crowding else 1.0


def load(path: Path) -> Hardware:
    """Read a file; raises :class:`UsageError` for what is missing, unknown or out of range."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"hardware file {path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise UsageError(f"hardware file {path}: no YAML ({error})") from None
    return parse(found, path.stem, str(path))


def parse(found: Any, name: str, where: str) -> Hardware:
    """Make it of what the file holds; ``where`` is named in errors."""
    top = _mapping(found, where)
    for key in top:
        if key not in KEYS:
            raise UsageError(f"{where}: unknown key {key!r}; there are {', '.join(KEYS)}")
    network = dict(_fields(top.get("network"), Network, f"{where}: network"))
    for key in ("intra", "inter"):
        place = f"{where}: network.{key}"
        link = _fields(network[key], NetworkLink, place)
        network[key] = NetworkLink(**{k: _number(v, f"{place}.{k}") for k, v in link.items()})
    if network.get("algorithm", "best") not in ALGORITHMS:
        raise UsageError(f"{where}: network.algorithm: choose one of {', '.join(ALGORITHMS)}")
    each = network["ranks_per_node"]
    if not _is_size(each):
        raise UsageError(f"{where}: network.ranks_per_node={each!r}: expected a whole number >= 1")
    place = f"{where}: network.coordination_s"
    network["coordination_s"] = _number(network.get("coordination_s", 0.0), place, zero=True)
    rates = dict(_fields(top.get("rates"), Rates, f"{where}: rates"))
    for key, value in rates.items():
        place = f"{where}: rates.{key}"
        if key in ("step_flops_per_s", "eigen_s", "inverse_s"):
            table = _mapping(value, place)
            rates[key] = {k: _number(v, f"{place}[{k}]") for k, v in table.items()}
            if key != "step_flops_per_s" and not (table and all(_is_size(n) for n in table)):
                raise UsageError(f"{place}: expected matrix sizes, and seconds for each")
        else:
            rates[key] = _number(value, place, zero=key in ("step_s", "op_s"))
    if DEFAULT not in rates["step_flops_per_s"]:
        raise UsageError(f"{where}: rates.step_flops_per_s: {DEFAULT!r} is missing")
    overlap = _number(top.get("overlap", 0.0), f"{where}: overlap", zero=True)
    if overlap > 1:
        raise UsageError(f"{where}: overlap={overlap:g}: must be in [0, 1]")
    place = f"{where}: crowding"
    table = _mapping(top.get("crowding", {}), place)
    crowding = {k: _number(v, f"{place}[{k}]") for k, v in table.items()}
    if not all(_is_size(n) and n > 1 for n in crowding):
        raise UsageError(f"{place}: expected numbers of ranks above 1, and a factor for each")
    return Hardware(name, Network(**network), Rates(**rates), overlap, crowding)


def _mapping(found: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(found, Mapping):
        raise UsageError(f"{where}: expected names and values")
    return found


def _fields(found: Any, kind: type, where: str) -> Mapping[str, Any]:
    mapping = _mapping(found, where)
    known = {f.name: f for f in fields(kind)}
    for key in mapping:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}; there are {', '.join(known)}")
    for key, each in known.items():
        if each.default is MISSING and key not in mapping:
            raise UsageError(f"{where}: {key} is missing")
    return mapping


def _number(value: Any, where: str, *, zero: bool = False) -> float:
    """YAML reads 1e9 as a text: a number without a point."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and (number > 0 or (zero and number == 0))):
        least = "of at least 0" if zero else "above 0"
        raise UsageError(f"{where}={value!r}: expected a number {least}")
    return number


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0
