"""The model of a machine, and how conf/hardware/NAME.yaml describes it: each rate with its source.

:class:`Rates` times one piece of work. :class:`Network` times one message by Hockney's model: a
latency per hop and a bandwidth. Messages travel in rings or in trees, inside a node or between
nodes. With p ranks, alpha seconds per hop and beta bytes per second, a payload of m bytes takes

====================  =========================================  ============================
message               ring                                       tree
====================  =========================================  ============================
all-reduce            2 (p-1) alpha + 2 (p-1)/p m / beta         2 ceil(log2 p) alpha + 2 m / beta
broadcast or reduce   (p-1) alpha + m / beta                     ceil(log2 p) alpha + m / beta
====================  =========================================  ============================

The formulas are those of Thakur, Rabenseifner and Gropp (2005). Trees are pipelined, like NCCL's
double binary trees. Nothing here imports torch.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from kfac_bench import plain_yaml
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.errors import UsageError, first_line
from kfac_bench.simulate.conduct import CONDUCTS

ALGORITHMS = ("ring", "tree", "best")


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """The connection between two ranks."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes of ``ranks_per_node`` consecutive ranks; each node has one ``inter`` link."""

    ranks_per_node: int
    intra: NetworkLink
    inter: NetworkLink
    algorithm: str = "best"
    """``ring``, ``tree``, or ``best``: the faster of both for each message."""

    def link(self, ranks: Sequence[int]) -> NetworkLink:
        """Return the link of each hop of a message among ``ranks``.

        A group with m ranks on a node shares the node's link with the other groups of that node.
        The model assumes that all groups send at the same time, so this group gets
        m / ranks_per_node of the bandwidth.
        """
        if ranks[-1] - ranks[0] == len(ranks) - 1:  # neighbours, in their order
            nodes = ranks[-1] // self.ranks_per_node - ranks[0] // self.ranks_per_node + 1
        else:
            nodes = len({rank // self.ranks_per_node for rank in ranks})
        if nodes == 1:
            return self.intra
        share = min(1.0, len(ranks) / nodes / self.ranks_per_node)
        return NetworkLink(self.inter.latency_s, self.inter.bandwidth_bytes_per_s * share)

    def all_reduce_s(self, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds until all of ``ranks`` have the sum of a message."""
        return self._seconds(2, payload_bytes, ranks)

    def rooted_s(self, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a broadcast from one of ``ranks``, or of a reduction to it."""
        return self._seconds(1, payload_bytes, ranks)

    def _seconds(self, passes: int, payload_bytes: float, ranks: Sequence[int]) -> float:
        p = len(ranks)
        if p == 1:
            return 0.0
        link = self.link(ranks)
        wire = payload_bytes / link.bandwidth_bytes_per_s
        # In an all-reduce a rank need not send its own part of the payload to itself.
        share = (p - 1) / p if passes == 2 else 1.0
        ring = passes * ((p - 1) * link.latency_s + share * wire)
        tree = passes * (math.ceil(math.log2(p)) * link.latency_s + wire)
        return {"ring": ring, "tree": tree, "best": min(ring, tree)}[self.algorithm]


DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Rates:
    """The sustained rates of one rank."""

    step_flops_per_s: Mapping[str, float]
    """Rate of forward and backward, by model; ``default`` holds for all others."""
    factor_flops_per_s: float
    precondition_flops_per_s: float
    eigen_s: Mapping[int, float]
    """Seconds of the eigendecomposition of an [n, n] matrix, by n. A single n is scaled by n^3."""
    inverse_s: Mapping[int, float]
    """Seconds of the inverse of an [n, n] matrix, by n."""
    qr_s: Mapping[int, float] | None = None
    """Seconds of one QR step from the last eigenvectors, by n. None: ``eigen_s``, because both
    take about 14/3 n^3 FLOPs. Then eigen_adam's decompositions may be simulated too long."""
    step_s: float = 0.0
    """Seconds of each step beside its FLOPs and its calls, such as waiting for images."""
    op_s: float = 0.0
    """Seconds of the host for one call of :class:`.Conduct`: a kernel launch, a message that is
    started or awaited, or a scalar that is read."""

    def step(self, flops: float, family: str) -> float:
        """Return the seconds of forward and backward."""
        rate = self.step_flops_per_s.get(family, self.step_flops_per_s[DEFAULT])
        return self.step_s + flops / rate

    def decompose(self, n: int, method: str) -> float:
        """Return the seconds to decompose one [n, n] factor; eigen_adam takes QR steps."""
        if method == "inverse":
            return interpolate(self.inverse_s, n)
        return interpolate((method == EIGEN_ADAM and self.qr_s) or self.eigen_s, n)


def interpolate(seconds: Mapping[int, float], n: int) -> float:
    """Return the time of size `n`, on straight lines between the logarithms of sizes and times.

    The first and the last line continue beyond the sizes that were measured.
    """
    sizes = sorted(seconds)
    if len(sizes) == 1:
        return seconds[sizes[0]] * math.pow(n / sizes[0], 3)
    # Between sizes[i - 1] and sizes[i]; the limits choose an outer line for an `n` outside of all.
    i = min(max(bisect_left(sizes, n), 1), len(sizes) - 1)
    low, high = sizes[i - 1], sizes[i]
    slope = math.log(seconds[high] / seconds[low]) / math.log(high / low)
    return seconds[low] * math.pow(n / low, slope)


KEYS = ("network", "rates", "overlap", "crowding", "epoch_s", "precision", "conduct", "errors")


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """The mean relative errors of a simulation, where it was compared with real times."""

    time: float
    """Of a time. A rate or an efficiency is a quotient of times, and is assumed to be as wrong."""
    ratio: float
    """Of the time of K-FAC divided by the time of SGD."""


NEAREST = "longhorn_v100"
"""The machine whose published times :data:`NEAREST_ERRORS` were compared with."""
NEAREST_ERRORS: Mapping[str, PredictionErrors] = {
    **dict.fromkeys(CONDUCTS, PredictionErrors(time=0.121, ratio=0.131)),
    "ours": PredictionErrors(time=0.167, ratio=0.135),
}
"""The errors of that comparison by conduct (docs/lab/simulation_folds.md), which machines without
errors of their own borrow."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine, or one cluster."""

    name: str
    network: Network
    rates: Rates
    overlap: float = 0.0
    """Share of backward during which gradients are already sent."""
    crowding: Mapping[int, float] = field(default_factory=dict)
    """The slowdown of each rank by ranks on a node, because ranks share cores, caches and memory.
    Empty if each rank has a device of its own, such as a GPU."""
    epoch_s: float = 0.0
    """Seconds of each epoch beside its steps, such as the start of the processes that read data.
    The number of ranks does not change them."""
    precision: str = "fp32"
    """The ``trainer.precision`` of the rates."""
    conduct: str = "ours"
    """The implementation whose use of the machine the rates describe, one of :data:`.CONDUCTS`."""
    errors: PredictionErrors | None = None
    """The errors where this machine was compared with real times; None: nowhere."""

    @property
    def nearest_errors(self) -> PredictionErrors:
        """The errors of this machine, or those of the nearest comparison."""
        return self.errors or NEAREST_ERRORS[self.conduct]

    def check_precision(self, precision: str) -> None:
        """Raise :class:`UsageError` if the rates are those of another precision."""
        if precision != self.precision:
            raise UsageError(
                f"trainer.precision={precision}: the rates of {self.name} are those of "
                f"{self.precision}; set trainer.precision={self.precision} or choose other hardware"
            )

    def slowdown(self, world_size: int) -> float:
        """Return the factor by which a rank computes longer than a rank alone on its node.

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
        raise UsageError(f"hardware file {path}: not valid YAML ({first_line(error)})") from None
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
    errors = None
    if "errors" in top:
        place = f"{where}: errors"
        errors = PredictionErrors(**_numbers(top["errors"], PredictionErrors, place))
    return Hardware(name, network, rates, overlap, crowding, epoch_s, precision, conduct, errors)


def _network(content: Any, where: str) -> Network:
    values = dict(_fields(content, Network, f"{where}: network"))
    for key in ("intra", "inter"):
        values[key] = NetworkLink(**_numbers(values[key], NetworkLink, f"{where}: network.{key}"))
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


def _numbers(content: Any, kind: type, where: str) -> dict[str, float]:
    """Return the values of a dataclass whose fields are all numbers above 0."""
    values = _fields(content, kind, where)
    return {key: _number(value, f"{where}.{key}") for key, value in values.items()}


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
