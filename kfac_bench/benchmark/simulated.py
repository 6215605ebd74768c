"""``kind: simulate``: the seconds of a step of one strategy on many ranks of a machine.

Words of a cell:

* ``hardware=NAME``: the machine, and ``epoch_s=0`` to replace a value of its file
* ``model=NAME`` on ImageNet, or ``file=NAME`` of conf/simulation: the work
* ``examples=N``: examples of a rank; or ``global=N part=N``: a global batch in whole parts
* ``strategy=sgd|comm_opt|hybrid_opt@1/2...`` and ``ranks=N``
* ``factors=N decompose=N``: intervals in steps, which belong to ``at=N`` ranks
* ``steps=N``: the steps of a training, for the seconds to target
* ``conduct=ours|sc20|paper``: use the machine as this code, in place of its file's ``conduct``
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

from kfac_bench.benchmark.plan_cells import MB
from kfac_bench.config import compose
from kfac_bench.core.planning.estimate import payload_bytes
from kfac_bench.simulate import hardware, workload
from kfac_bench.simulate.step import Workload
from kfac_bench.simulate.sweep import SGD, Intervals, SimulatedCell, plan_of, sweep, variant


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


def numbers(words: Mapping[str, str]) -> dict[str, float]:
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
    plan = plan_of(work, each, ranks, "eigen")
    result["payload_mb"] = sum(payload_bytes(plan).values()) / MB
    return result
