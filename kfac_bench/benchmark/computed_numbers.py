"""The numbers of computed cells: a plan's bytes, a simulated step, the largest batch that fits.

Each function takes the words of a cell (conf/benchmark/NAME.yaml).

``kind: plan`` (:func:`plan_numbers`), what K-FAC stores and sends, from the plan that ranks would
execute: ``ranks=N``, ``examples=N`` (of a rank in a step), ``strategy=``, ``fraction=``, and
``hardware=`` to add the simulated time of a step. All other words are overrides of kfac-train.

``kind: simulate`` (:func:`step_numbers`), the seconds of a step on many ranks of a machine:

* ``hardware=NAME``: the machine, and ``epoch_s=0`` to replace a value of its file
* ``model=NAME`` on ImageNet, or ``file=NAME`` of conf/simulation: the work
* ``examples=N``: examples of a rank; or ``global=N part=N``: a global batch in whole parts
* ``strategy=sgd|comm_opt|hybrid_opt@1/2...`` and ``ranks=N``
* ``factors=N decompose=N``: intervals in steps, which belong to ``at=N`` ranks
* ``steps=N``: the steps of a training, for the seconds to target
* ``conduct=ours|sc20|paper``: use the machine as this code, in place of its file's ``conduct``

``kind: phases`` (:func:`phases_numbers`), the time of both phases of BERT's pre-training, and that
of LAMB: ``hardware=NAME``, ``ranks=N``, ``factors=N decompose=N`` as above, and

* ``phase1=sgd|hybrid_opt@1/2...``, ``steps1=N``, ``part1=N``: strategy, steps and sequences of a
  part in phase 1; ``sgd`` is LAMB alone, whose own step is not simulated
* ``phase2=...``, ``steps2=N``, ``part2=N``: the same for phase 2
* ``lamb_part1=N``, ``lamb_part2=N``: sequences of a part of the LAMB with which the phases are
  compared; without these words those of section 6.3.3

``kind: fit`` (:func:`fit_numbers`), the largest batch of a rank that fits into a budget of memory.
The memory follows from shapes alone, in fp32; mixed precision halves the second part.

* Weights, gradients and the optimizer's state have 4 bytes per parameter each.
* Autograd keeps activations for backward. A forward pass on the meta device shows which storages it
  keeps. Two batch sizes give a constant part and a part per example.
* K-FAC's state, the statistics of a batch and the messages are the peak of the heaviest rank.

Memory fragments, workspaces of libraries and the copy of gradients in DDP's buckets are left out.
Its words are those of ``kind: plan``, ``budget_gb=`` (the memory of a rank), ``hardware=`` (to add
the time of a step), ``optimizer_copies=`` (state of the optimizer in sizes of the parameters; 1:
momentum) and ``global=N`` (a global batch that each rank computes in parts; a part is what fits).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kfac_bench.config import TrainConfig, compose
from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware, plan_report, workload
from kfac_bench.simulate.step import Workload
from kfac_bench.simulate.sweep import SGD, Intervals, SimulatedCell, sweep, variant
from kfac_bench.training import dry_run
from kfac_bench.training.build import Builders

MB = 1e6
OWN = {"ranks", "examples", "strategy", "fraction", "hardware"}
OWN |= {"budget_gb", "global", "optimizer_copies"}  # of kind: fit alone
"""Words of the cells that are not overrides of kfac-train."""


def config_of(words: Mapping[str, str]) -> TrainConfig:
    """Return the configuration that the words describe; ``strategy=sgd`` means no K-FAC."""
    overrides = [f"{name}={value}" for name, value in words.items() if name not in OWN]
    ranks, examples = int(words.get("ranks", 1)), int(words.get("examples", 1))
    overrides.append(f"trainer.batch_size={ranks * examples}")
    strategy = words.get("strategy", "")
    if strategy:
        overrides.append("kfac.enabled=false" if strategy == "sgd" else f"kfac.strategy={strategy}")
    if "fraction" in words:
        overrides.append(f"kfac.grad_worker_fraction={words['fraction']}")
    return compose.load(overrides)


def plan_numbers(words: Mapping[str, str]) -> dict[str, float]:
    """Return the megabytes of the heaviest rank, and the messages and megabytes of a mean step."""
    config = config_of(words)
    if not config.kfac.enabled:
        raise UsageError("kind plan: strategy=sgd has no plan; leave it out of the axes")
    run = dry_run.trace(config, int(words.get("ranks", 1)))
    ranks = plan_report.as_dict(run)["ranks"]
    memory = [rank["memory_bytes"] for rank in ranks]
    step = [rank["per_step"] for rank in ranks]
    times = _times(words, config, int(words.get("examples", 1))) if "hardware" in words else {}
    return times | {
        "state_mb": max(m["factors"] + m["decompositions"] + m.get("moments", 0) for m in memory)
        / MB,
        "peak_mb": max(m["peak"] for m in memory) / MB,
        "wire_mb_per_step": max(s["wire_bytes"] for s in step) / MB,
        "messages_per_step": max(s["messages"] for s in step),
    }


@functools.cache
def _of_model(name: str, examples: int) -> Workload:
    overrides = [f"model={name}", "data=imagefolder", f"trainer.batch_size={examples}"]
    return workload.of_config(compose.load(overrides))


def _work(words: Mapping[str, str], ranks: int) -> Workload:
    if "global" in words:
        examples = in_whole_parts(int(words["global"]), ranks, int(words["part"]))
    else:
        examples = int(words["examples"])
    if "file" not in words:
        return _of_model(words["model"], examples)
    return workload.of_file(compose.CONF_DIR / "simulation" / f"{words['file']}.yaml", examples)


def in_whole_parts(batch: int, ranks: int, part: int) -> int:
    """Return a rank's examples of a global batch, rounded up to whole parts of `part` examples."""
    return math.ceil(batch / ranks / part) * part


def times_of(cell: SimulatedCell) -> dict[str, float]:
    """Return the times of a simulated step, by the names of the measures of runs."""
    return {
        "ms_per_step": 1e3 * cell.step_s,
        "examples_per_s_per_rank": cell.epoch_rate(workload.IMAGENET_EXAMPLES) / cell.world_size,
        "epoch_s": cell.epoch_s(workload.IMAGENET_EXAMPLES),
    }


def step_numbers(words: Mapping[str, str]) -> dict[str, float]:
    """Return times in the units of :mod:`kfac_bench.benchmark.measures`.

    The time of a stage is that of one run of the stage.
    """
    ranks = int(words["ranks"])
    machine = hardware.load(compose.CONF_DIR / "hardware" / f"{words['hardware']}.yaml")
    if "epoch_s" in words:
        machine = replace(machine, epoch_s=float(words["epoch_s"]))
    machine = replace(machine, conduct=words.get("conduct", machine.conduct))
    work, each = _work(words, ranks), variant(words["strategy"])
    at = int(words["at"]) if "at" in words else None
    intervals = Intervals(float(words.get("factors", 1)), float(words.get("decompose", 1)), at)
    (cell,) = sweep(work, machine, [each], [ranks], intervals)
    result = times_of(cell) | {"steps_per_s_per_rank": 1 / cell.step_s / ranks}
    if "steps" in words:
        train_s = int(words["steps"]) * cell.step_s
        result |= {"seconds_to_target": train_s, "train_s": train_s}
        result["steps_to_target"] = float(words["steps"])
        result["targets_per_s_per_rank"] = 1 / train_s / ranks
    if each.strategy == SGD:
        return result
    result |= {f"stage {kind}": 1e3 * s for kind, s in cell.time.kinds_s.items()}
    result["update_extra_s"] = sum(cell.time.stages_s.values())
    # The longest message: decompositions in comm_opt, else gradients.
    shares = [result.get(f"stage Share{what}", 0.0) for what in ("Decompositions", "Gradients")]
    result["stage share"] = shares[0] or shares[1]
    return result


WORK = {"1": ("bert_large_128", 65536), "2": ("bert_large_512", 32768)}
"""By phase, its file in conf/simulation and its global batch."""
LAMB = {"1": (7038, 96), "2": (1563, 16)}
"""By phase, the steps and the sequences of a part with LAMB alone (TPDS 2022, 6.3.3)."""


def phases_numbers(words: Mapping[str, str]) -> dict[str, float]:
    """Return the time of both phases, and what they save compared with LAMB, in percent."""
    parts = {phase: int(words.get(f"lamb_part{phase}", LAMB[phase][1])) for phase in WORK}
    lamb_s = {phase: _phase_s(words, phase, SGD, LAMB[phase][0], parts[phase]) for phase in WORK}
    steps = {phase: int(words[f"steps{phase}"]) for phase in WORK}
    own_s = {
        phase: _phase_s(
            words, phase, words[f"phase{phase}"], steps[phase], int(words[f"part{phase}"])
        )
        for phase in WORK
    }
    fewer = {phase: 100 * (1 - steps[phase] / LAMB[phase][0]) for phase in WORK}
    return {
        "both_phases_s": sum(own_s.values()),
        "less_phase2_time": 100 * (1 - own_s["2"] / lamb_s["2"]),
        "less_time": 100 * (1 - sum(own_s.values()) / sum(lamb_s.values())),
        "fewer_phase1_steps": fewer["1"],
        "fewer_phase2_steps": fewer["2"],
    }


def _phase_s(words: Mapping[str, str], phase: str, strategy: str, steps: int, part: int) -> float:
    """Return the seconds of a phase."""
    file, batch = WORK[phase]
    common = {name: words[name] for name in ("hardware", "ranks", "factors", "decompose")}
    own = {"file": file, "global": f"{batch}", "part": f"{part}", "steps": f"{steps}"}
    return step_numbers(common | own | {"strategy": strategy})["train_s"]


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


def fit_numbers(words: Mapping[str, str]) -> dict[str, float]:
    """Return the largest batch that fits, its memory, and with ``hardware=`` its time.

    Raises :class:`UsageError` if not even one example fits.
    """
    ranks, budget = int(words["ranks"]), float(words["budget_gb"]) * 1e9
    config = config_of({**words, "examples": str(_FEW)})
    run = dry_run.trace(config, ranks)
    kfac = max((cost.peak_bytes for cost in run.ranks), default=0)
    state = (2 + float(words.get("optimizer_copies", 1))) * 4 * run.parameters
    base = tuple(f"{k}={v}" for k, v in words.items() if k not in OWN)
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
    work = workload.of_config(config_of({**words, "examples": str(examples), "ranks": "1"}))
    fraction = words.get("fraction")
    each = variant(words["strategy"] if fraction is None else f"hybrid_opt@{fraction}")
    intervals = Intervals(config.kfac.factor_update_freq, config.kfac.update_freq)
    method, itemsize = config.kfac.method, workload.state_bytes(config)
    (cell,) = sweep(work, machine, [each], [ranks], intervals, method, itemsize=itemsize)
    return times_of(cell)
