"""Workloads to simulate: from a configuration of kfac-train, or from a YAML list of layers."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kfac_bench import plain_yaml
from kfac_bench.config import TrainConfig
from kfac_bench.core.kfac_options import state_dtypes
from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.errors import UsageError
from kfac_bench.simulate.step import Workload
from kfac_bench.training import dry_run

IMAGENET_EXAMPLES = 1_281_167
"""Images of ImageNet's training set, which a simulation does not read."""
_TOP = {"parameters", "tensors", "step_flops_per_example", "family", "gradient_bytes", "layers"}
_MOST_SIZE, _MOST_REPEATS = 1 << 40, 100_000
_LAYER = {"name": str, "a_dim": int, "g_dim": int, "rows": int}


def of_config(config: TrainConfig) -> Workload:
    """Return the work of one rank; here ``trainer.batch_size`` counts one rank's examples."""
    run = dry_run.trace(config)
    layers = [] if run.report is None else [layer.spec for layer in run.report.layers]
    return Workload(
        config.model.name,
        layers,
        run.rows,
        run.step_flops,
        run.parameters,
        run.tensors,
        config.trainer.batch_size,
        family=config.model.name,
    )


def state_bytes(config: TrainConfig) -> int:
    """Return the bytes of an element of factors and decompositions."""
    return state_dtypes()[config.kfac.state_dtype].itemsize


def of_file(path: Path, examples: int) -> Workload:
    """Return the work of ``examples`` on one rank for the layers that a YAML file lists.

    A layer has ``rows`` per example (shared positions) and occurs ``repeat`` times. Raises
    :class:`UsageError` if the file cannot be read, or has a missing or invalid value.
    """
    try:
        content = plain_yaml.load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, Mapping) or not _TOP.issuperset(content) or "layers" not in content:
        raise UsageError(f"{path}: expected the keys {', '.join(sorted(_TOP))}")
    layers: list[LayerSpec] = []
    rows: dict[str, int] = {}
    if not isinstance(content["layers"], list):
        raise UsageError(f"{path}: layers: expected a list")
    for entry in content["layers"]:
        for spec, each in _layers(entry, path):
            if spec.name in rows:
                raise UsageError(f"{path}: layers: {spec.name} is there twice; rename one of them")
            layers.append(spec)
            rows[spec.name] = each * examples
    return Workload(
        path.stem,
        layers,
        rows,
        _positive(content, "step_flops_per_example", path) * examples,
        int(_positive(content, "parameters", path)),
        int(_positive(content, "tensors", path)),
        examples,
        family=str(content.get("family", "")),
        gradient_bytes=int(_positive({"gradient_bytes": 4, **content}, "gradient_bytes", path)),
    )


def _layers(entry: Any, path: Path) -> list[tuple[LayerSpec, int]]:
    """Return the layers that one entry of the list stands for, each with its rows per example."""
    if not isinstance(entry, Mapping) or not all(
        isinstance(entry.get(key), kind) for key, kind in _LAYER.items()
    ):
        raise UsageError(f"{path}: layers: expected {', '.join(_LAYER)} in {entry!r}")
    repeat = entry.get("repeat", 1)
    sizes = (entry["a_dim"], entry["g_dim"], entry["rows"], repeat)
    in_range = isinstance(repeat, int) and min(sizes) >= 1 and max(sizes) <= _MOST_SIZE
    if not in_range or repeat > _MOST_REPEATS:
        raise UsageError(
            f"{path}: layers: {entry['name']}: expected sizes from 1 to 2^40 "
            f"and at most {_MOST_REPEATS:,} repeats"
        )
    # A plan needs unique names of layers.
    names = [f"{entry['name']}{f'.{i}' if repeat > 1 else ''}" for i in range(repeat)]
    return [(LayerSpec(n, entry["a_dim"], entry["g_dim"]), entry["rows"]) for n in names]


def _positive(content: Mapping[str, Any], key: str, path: Path) -> float:
    try:
        value = float(content[key])
    except (KeyError, TypeError, ValueError, OverflowError):
        value = 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"{path}: {key}: expected a number above 0")
    return value
