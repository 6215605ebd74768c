"""``kind: fit``: the largest batch of a rank that fits into a budget of memory, and its time.

What a rank holds while it trains, from shapes alone (fp32 but for what mixed precision halves):

* weights, gradients and the optimizer's state: parameters times 4 bytes, once each;
* what autograd keeps for backward: the storages that a forward pass on the meta device saves, which
  are none of the parameters; twice, at two batch sizes, so a constant and a part per example;
* K-FAC's state, the statistics of a batch and its messages: the plan's peak on the heaviest rank.

Left out: fragments, workspaces of libraries, the second copy of gradients in DDP's buckets.

Words: those of ``kind: plan``, ``budget_gb=``, ``hardware=`` (conf/hardware), ``optimizer_copies=``
of the parameters' size (1: momentum), ``global=N`` (one batch in parts: what fits is a part).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kfac_bench.benchmark.plan_cells import MB, OWN, config_of
from kfac_bench.benchmark.simulated import IMAGENET
from kfac_bench.config import TrainConfig, compose
from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware, workload
from kfac_bench.simulate.sweep import SGD, Intervals, sweep, variant
from kfac_bench.training import dry_run
from kfac_bench.training.blueprint import Blueprint

_OWN = (*OWN, "budget_gb", "hardware", "optimizer_copies", "global")
_FEW, _MORE = 2, 6
"""Examples of the two passes: batch norm needs more than one."""


def saved_bytes(config: TrainConfig, examples: int) -> int:
    """What one forward pass of so many examples keeps for backward, parameters apart."""
    blueprint = Blueprint.of(config)
    with torch.device("meta"):
        model = blueprint.assumed_model()
        inputs = blueprint.example_inputs(examples)
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = (
            x  # which keeps the storage, so its address stays its own
        )
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs: Any = getattr(model, "outline", model)(inputs)
    del outputs
    return sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in own)


@functools.cache
def _activations(overrides: tuple[str, ...]) -> tuple[float, float]:
    """Bytes whatever the batch, and of each example more."""
    config = compose.load(overrides)
    few, more = saved_bytes(config, _FEW), saved_bytes(config, _MORE)
    each = (more - few) / (_MORE - _FEW)
    half = 0.5 if config.trainer.precision != "fp32" else 1.0
    return half * (few - _FEW * each), half * each


def numbers(words: Mapping[str, str]) -> dict[str, float]:
    """Raises :class:`UsageError` where not even one example fits."""
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
    found = {
        "batch": float(batch),
        "kfac_mb": kfac / MB,
        "activations_mb_per_example": each / MB,
        "weights_mb": state / MB,
    }
    if "hardware" not in words:
        return found
    machine = hardware.load(compose.CONF_DIR / "hardware" / f"{words['hardware']}.yaml")
    examples = batch
    if "global" in words:
        examples = math.ceil(int(words["global"]) / ranks / batch) * batch
    timed = workload.of_config(config_of({**words, "examples": str(examples), "ranks": "1"}, _OWN))
    fraction = float(words["fraction"]) if "fraction" in words else None
    each_kind = variant(SGD if words["strategy"] == SGD else "hybrid_opt@" + words["fraction"])
    intervals = Intervals(config.kfac.factor_update_freq, config.kfac.update_freq)
    (cell,) = sweep(timed, machine, [each_kind], [ranks], intervals)
    assert fraction is None or fraction > 0
    found["ms_per_step"] = 1e3 * cell.step_s
    found["examples_per_s_per_rank"] = cell.examples_per_s / ranks
    found["epoch_s"] = cell.epoch_s(IMAGENET)
    return found
