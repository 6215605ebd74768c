"""The winner of a tuning as an experiment file."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from kfac_bench.benchmark import schema
from kfac_bench.benchmark.schema import Tuning
from kfac_bench.benchmark.trials import TuningTrial, shown_s


def experiment_yaml(
    tuning: Tuning,
    point: Mapping[str, str],
    reached: int,
    best: TuningTrial,
    times: Sequence[float],
) -> str:
    """Return the best trial as a file for conf/experiment, with a comment on how it was found.

    ``reached`` of all trials met the target; ``times`` are those of the best one by seed.
    """
    groups = {k: v for k, v in best.settings.items() if "." not in k}
    tree: dict[str, Any] = {}
    for key, value in best.settings.items():
        group, _, option = key.partition(".")
        if option:
            tree.setdefault(group, {})[option] = value
    if label := tuning.labels.get(point["optimizer"]):
        tree = {"label": label, **tree}
    parent: str = schema.fill_in(tuning.overrides[0], point).removeprefix("experiment=")
    defaults = [
        f"/experiment/{parent}",
        *({f"override /{k}": v} for k, v in groups.items()),
        "_self_",
    ]
    said = ", ".join(map(shown_s, times))
    header = (
        f"# Written by kfac-bench tune: the best of {len(tuning.seeds) * tuning.trials} trials, "
        f"{tuning.trials} on each of the seeds\n# {', '.join(map(str, tuning.seeds))}, of which "
        f"{reached} reached the target before they were stopped;\n"
        f"# its own times to target on these seeds: {said}.\n"
    )
    # Two dumps, because the defaults list reads best with one line per entry.
    blocks = [
        yaml.safe_dump({"defaults": defaults}, sort_keys=False, default_flow_style=None),
        yaml.safe_dump(tree, sort_keys=False),
    ]
    return "".join(["# @package _global_\n", header, *blocks])
