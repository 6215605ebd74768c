"""conf/hardware/NAME.yaml: the rates of a machine, each with its source."""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from kfac_bench import plain_yaml
from kfac_bench.errors import UsageError
from kfac_bench.simulate.conduct import CONDUCTS
from kfac_bench.simulate.network import ALGORITHMS, Network, NetworkLink
from kfac_bench.simulate.rates import DEFAULT, Rates

KEYS = ("network", "rates", "overlap", "crowding", "epoch_s", "precision", "conduct", "ratio_error")

NEAREST, NEAREST_ERROR = "longhorn_v100", 0.131
"""The validated machine, and its :attr:`Hardware.ratio_error`, which others without one borrow."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine, or one cluster."""

    name: str
    network: Network
    rates: Rates
    overlap: float = 0.0
    """Share of backward during which gradients are already sent."""
    crowding: Mapping[int, float] = field(default_factory=dict)
    """By ranks on a node: how many times as long each rank then computes, because ranks share
    cores, caches and memory. Empty if each rank has a device of its own, such as a GPU."""
    epoch_s: float = 0.0
    """Seconds of each epoch beside its steps, such as the start of the processes that read data.
    The number of ranks does not change them."""
    precision: str = "fp32"
    """The ``trainer.precision`` of the rates."""
    conduct: str = "ours"
    """The implementation whose use of the machine the rates describe, one of :data:`.CONDUCTS`."""
    ratio_error: float | None = None
    """Mean relative error of K-FAC's time over SGD's, where it was compared; None: nowhere."""

    def check_precision(self, precision: str) -> None:
        """Raise :class:`UsageError` if the rates are those of another precision."""
        if precision != self.precision:
            raise UsageError(
                f"trainer.precision={precision}: the rates of hardware={self.name} are those of "
                f"{self.precision}; set trainer.precision={self.precision} or choose other hardware"
            )

    def slowdown(self, world_size: int) -> float:
        """Return how many times as long a rank computes as a rank that is alone on its node.

        Between two known numbers of ranks the factor lies on a straight line. Beyond the largest
        known number it grows in proportion to the ranks.
        """
        ranks = min(world_size, self.network.ranks_per_node)
        low, factor = 1, 1.0
        for high, more in sorted(self.crowding.items()):
            if ranks < high:
                return factor + (more - factor) * (ranks - low) / (high - low)
            low, factor = high, more
        return factor * ranks / low if self.crowding else 1.0


def load(path: Path) -> Hardware:
    """Read a hardware file; raise :class:`UsageError` for missing, unknown or invalid values."""
    try:
        content = plain_yaml.load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UsageError(f"hardware file {path}: not valid YAML ({error})") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: text, dates, long numbers
        raise UsageError(f"hardware file {path}: cannot be read ({error})") from None
    return parse(content, path.stem, str(path))


def parse(content: Any, name: str, where: str) -> Hardware:
    """Return the hardware that a file's content describes.

    Args:
        content: What the YAML file holds.
        name: The name of the hardware.
        where: What error messages call the file.

    Raises:
        UsageError: A value is missing, unknown or out of its range.
    """
    top = _mapping(content, where)
    for key in top:
        if key not in KEYS:
            raise UsageError(f"{where}: unknown key {key!r}; there are {', '.join(KEYS)}")
    overlap = _number(top.get("overlap", 0.0), f"{where}: overlap", allow_zero=True)
    if overlap > 1:
        raise UsageError(f"{where}: overlap={overlap:g}: must be in [0, 1]")
    network = _network(top.get("network"), where)
    rates = _rates(top.get("rates"), where)
    place = f"{where}: crowding"
    expected = "expected numbers of ranks above 1, and a factor for each"
    crowding = _table(top.get("crowding", {}), place, lambda n: _is_size(n) and n > 1, expected)
    epoch_s = _number(top.get("epoch_s", 0.0), f"{where}: epoch_s", allow_zero=True)
    precision, conduct = str(top.get("precision", "fp32")), top.get("conduct", "ours")
    if conduct not in CONDUCTS:
        raise UsageError(f"{where}: conduct={conduct!r}: choose one of {', '.join(CONDUCTS)}")
    error = top.get("ratio_error")
    error = None if error is None else _number(error, f"{where}: ratio_error")
    return Hardware(name, network, rates, overlap, crowding, epoch_s, precision, conduct, error)


def _network(content: Any, where: str) -> Network:
    values = dict(_fields(content, Network, f"{where}: network"))
    for key in ("intra", "inter"):
        place = f"{where}: network.{key}"
        link = _fields(values[key], NetworkLink, place)
        values[key] = NetworkLink(**{k: _number(v, f"{place}.{k}") for k, v in link.items()})
    if values.get("algorithm", "best") not in ALGORITHMS:
        raise UsageError(f"{where}: network.algorithm: choose one of {', '.join(ALGORITHMS)}")
    each = values["ranks_per_node"]
    if not _is_size(each):
        raise UsageError(f"{where}: network.ranks_per_node={each!r}: expected a whole number >= 1")
    return Network(**values)


def _rates(content: Any, where: str) -> Rates:
    values = dict(_fields(content, Rates, f"{where}: rates"))
    for key, value in values.items():
        place = f"{where}: rates.{key}"
        if key == "step_flops_per_s":
            values[key] = _table(value, place)
        elif key in ("eigen_s", "inverse_s", "qr_s"):
            expected = "expected matrix sizes, and seconds for each"
            values[key] = _table(value, place, _is_size, expected)
            if not values[key]:
                raise UsageError(f"{place}: {expected}")
        else:
            values[key] = _number(value, place, allow_zero=key in ("step_s", "op_s"))
    if DEFAULT not in values["step_flops_per_s"]:
        raise UsageError(f"{where}: rates.step_flops_per_s: {DEFAULT!r} is missing")
    return Rates(**values)


def _table(
    content: Any, where: str, is_key: Callable[[Any], bool] = lambda key: True, expected: str = ""
) -> dict[Any, float]:
    """Return a mapping of numbers above 0; raise an error with `expected` for a wrong key."""
    table = _mapping(content, where)
    numbers = {key: _number(value, f"{where}[{key}]") for key, value in table.items()}
    if not all(is_key(key) for key in numbers):
        raise UsageError(f"{where}: {expected}")
    return numbers


def _mapping(content: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(content, Mapping):
        raise UsageError(f"{where}: expected names and values")
    return content


def _fields(content: Any, kind: type, where: str) -> Mapping[str, Any]:
    """Return the values of a dataclass's fields; raise for unknown and for missing fields."""
    mapping = _mapping(content, where)
    known = {f.name: f for f in fields(kind)}
    for key in mapping:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}; there are {', '.join(known)}")
    for key, each in known.items():
        if each.default is MISSING and key not in mapping:
            raise UsageError(f"{where}: {key} is missing")
    return mapping


def _number(value: Any, where: str, *, allow_zero: bool = False) -> float:
    """Return the finite number above 0 (or from 0 on); raise :class:`UsageError` for others."""
    try:
        # YAML reads 1e9, a number without a point, as a text: float() accepts both.
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and (number > 0 or (allow_zero and number == 0))):
        least = "of at least 0" if allow_zero else "above 0"
        raise UsageError(f"{where}={value!r}: expected a number {least}")
    return number


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0
