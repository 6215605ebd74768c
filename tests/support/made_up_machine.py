"""A made-up machine and models of any depth, for tests of the simulator."""

from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.simulate.hardware import Hardware, Network, NetworkLink, Rates
from kfac_bench.simulate.step import Workload

BETA = 1e10
"""Bytes per second of each link."""
LINK = NetworkLink(1e-6, BETA)
RATES = Rates({"default": 1e12}, 1e13, 1e13, {64: 0.01, 256: 0.2, 4608: 1.0}, {64: 0.001})
MACHINE = Hardware("made up", Network(4, LINK, LINK, "ring"), RATES, overlap=1.0)


def work_of(depth: int) -> Workload:
    """Return a model of `depth` equal layers and a wide one."""
    layers = [LayerSpec(f"layer{i}", 64, 256) for i in range(depth)]
    layers.append(LayerSpec("wide", 512, 64))
    rows = {spec.name: 100 for spec in layers}
    return Workload(f"net{depth}", layers, rows, depth * 1e10, depth * 10_000, 3 * depth, 8)
