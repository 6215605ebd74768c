"""``kind: fit``: the largest batch of a rank that fits into a budget of memory, and its time.

The memory of a rank that trains follows from shapes alone, in fp32. Mixed precision halves the
second part.

* Weights, gradients and the optimizer's state have 4 bytes per parameter each.
* Autograd keeps activations for backward. A forward pass on the meta device shows which storages it
  keeps. Two batch sizes give a constant part and a part per example.
* K-FAC's state, the statistics of a batch and the messages are the peak of the heaviest rank.

Memory fragments, workspaces of libraries and the copy of gradients in DDP's buckets are left out.

Words of a cell:

* all words of ``kind: plan``
* ``budget_gb=``: the memory of a rank
* ``hardware=``: a name in conf/hardware, to add the time of a step
* ``optimizer_copies=``: state of the optimizer in sizes of the parameters (1: momentum)
* ``global=N``: a global batch that each rank computes in parts; a part is what fits
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kfac_bench.benchmark.plan_cells import MB, OWN, config_of
from kfac_bench.benchmark.simulated import in_whole_parts, times_of
from kfac_bench.config import TrainConfig, compose
from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware, workload
from kfac_bench.simulate.sweep import SGD, Intervals, sweep, variant
from kfac_bench.training import dry_run
from kfac_bench.training.build import Builders

_OWN = (*OWN, "budget_gb", "hardware", "optimizer_copies", "global")
_FEW, _MORE = 2, 6
"""Examples of the two forward passes. Batch norm needs more than one example."""


def saved_bytes(config: TrainConfig, examples: int) -> int:
    """Return the bytes that autograd keeps from one forward pass, without the parameters."""
    builders = Builders.of(config)
    with torch.device("meta"):
        model = builders.assumed_model()
        inputs = builders.example_inputs(examples)
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        # Keeping the tensor keeps its storage, so no other storage can get the same address.
        kept[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs: Any = builders.output(model, inputs)
    del outputs
    return sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in own)


@functools.cache
def _activations(overrides: tuple[str, ...]) -> tuple[float, float]:
    """Return the bytes that every batch needs, and the bytes of each example."""
    config = compose.load(overrides)
    few, more = saved_bytes(config, _FEW), saved_bytes(config, _MORE)
    # Both sizes lie on a straight line: its slope is the bytes of an example.
    each = (more - few) / (_MORE - _FEW)
    half = 0.5 if config.trainer.precision != "fp32" else 1.0
    return half * (few - _FEW * each), half * each


def numbers(words: Mapping[str, str]) -> dict[str, float]:
    """Return the largest batch that fits, its memory, and with ``hardware=`` its time.

    Raises :class:`UsageError` if not even one example fits.
    """
    ranks, budget = int(words["ranks"]), float(words["budget_gb"]) * 1e9
    config = config_of({**words, "examples": str(_FEW)}, _OWN)
    run = dry_run.trace(config, ranks)
    kfac = max((cost.peak_bytes for cost in run.ranks), default=0)
    state = (2 + float(words.get("optimizer_copies", 1))) * 4 * run.parameters
    base = tuple(f"{k}={v}" for k, v in words.items() if k not in _OWN)
    fixed, each = _activations((*base, f"trainer.batch_size={_MORE}"))
    batch = math.floor((budget - state - kfac - fixed) / each)
    if batch < 1:
        raise UsageError(f"budget_gb={words['budget_gb']}: not even one example fits beside K-FAC")
    memory = {
        "batch": float(batch),
        "kfac_mb": kfac / MB,
        "activations_mb_per_example": each / MB,
        "weights_mb": state / MB,
    }
    return memory | (_times(words, config, batch) if "hardware" in words else {})


def _times(words: Mapping[str, str], config: TrainConfig, batch: int) -> dict[str, float]:
    """Return the simulated times of a step with this batch on each rank."""
    ranks = int(words["ranks"])
    machine = hardware.load(compose.CONF_DIR / "hardware" / f"{words['hardware']}.yaml")
    machine.check_precision(config.trainer.precision)
    examples = in_whole_parts(int(words["global"]), ranks, batch) if "global" in words else batch
    # One rank's share of the work: the simulation multiplies by the ranks itself.
    work = workload.of_config(config_of({**words, "examples": str(examples), "ranks": "1"}, _OWN))
    each = variant(SGD if words["strategy"] == SGD else f"hybrid_opt@{words['fraction']}")
    intervals = Intervals(config.kfac.factor_update_freq, config.kfac.update_freq)
    (cell,) = sweep(work, machine, [each], [ranks], intervals)
    return times_of(cell)
