"""``kind: plan``: what K-FAC stores and sends, from the plan that ranks would execute.

Words of a cell: ``ranks=N``, ``examples=N`` (of a rank in a step), ``strategy=``, ``fraction=``.
All other words are overrides of kfac-train.
"""

from collections.abc import Mapping

from kfac_bench.config import TrainConfig, compose
from kfac_bench.simulate import plan_report
from kfac_bench.training import dry_run

MB = 1e6
OWN = ("ranks", "examples", "strategy", "fraction")


def config_of(words: Mapping[str, str], own: tuple[str, ...] = OWN) -> TrainConfig:
    """Return the configuration that the words describe; ``strategy=sgd`` means no K-FAC."""
    overrides = [f"{name}={value}" for name, value in words.items() if name not in own]
    ranks, examples = int(words.get("ranks", 1)), int(words.get("examples", 1))
    overrides.append(f"trainer.batch_size={ranks * examples}")
    strategy = words.get("strategy", "")
    if strategy:
        overrides.append("kfac.enabled=false" if strategy == "sgd" else f"kfac.strategy={strategy}")
    if "fraction" in words:
        overrides.append(f"kfac.grad_worker_fraction={words['fraction']}")
    return compose.load(overrides)


def numbers(words: Mapping[str, str]) -> dict[str, float]:
    """Return the megabytes of the heaviest rank, and the messages and megabytes of a mean step."""
    run = dry_run.trace(config_of(words), int(words.get("ranks", 1)))
    ranks = plan_report.as_dict(run)["ranks"]
    memory = [rank["memory_bytes"] for rank in ranks]
    step = [rank["per_step"] for rank in ranks]
    return {
        "state_mb": max(m["factors"] + m["decompositions"] + m.get("moments", 0) for m in memory)
        / MB,
        "factors_mb": max(m["factors"] for m in memory) / MB,
        "decompositions_mb": max(m["decompositions"] for m in memory) / MB,
        "peak_mb": max(m["peak"] for m in memory) / MB,
        "wire_mb_per_step": max(s["wire_bytes"] for s in step) / MB,
        "messages_per_step": max(s["messages"] for s in step),
        "gflop_per_step": max(s["flops"] for s in step) / 1e9,
        "parameters_mb": 4 * run.parameters / MB,
    }
