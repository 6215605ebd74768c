"""K-FAC's state: per layer, in fp32, independent of wrapper, world size and strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kfac_bench.core.execution.executor import Executor
from kfac_bench.core.planning.layer_spec import FACTORS, Factor

Merged = dict[str, dict[str, Any]]
"""By layer: "A" and "G" entries, and "second_moment" where EKFAC has one."""


def layers_state(run: Executor, *, shard: bool) -> Merged:
    """What this rank holds; ``shard``: only what it decomposes, second moments with A."""
    layers: Merged = {}
    for placement in run.plan.placements:
        name = placement.layer.name
        layers[name] = {}
        for factor in FACTORS:
            key = (name, factor)
            if shard and placement.worker(factor) != run.collective.rank:
                continue
            entry: dict[str, Any] = {}
            if key in run.store.factors:
                entry |= {"factor": run.store.factor(key), "weight": run.store.weights[key]}
            if key in run.store.decompositions:
                entry[_kind(run)] = run.store.decompositions[key].saved()
            if entry:
                layers[name][factor] = entry
            if factor == "A" and name in run.store.second_moments:
                layers[name]["second_moment"] = run.store.second_moments[name]
    return layers


def _kind(run: Executor) -> str:
    """Eigendecompositions are EKFAC's, too."""
    return "inverse" if run.plan.method == "inverse" else "eigen"


def merge(states: Sequence[Mapping[str, Any]]) -> Merged:
    """One state from shards of several ranks."""
    merged: Merged = {}
    for state in states:
        for name, entries in state["layers"].items():
            for key, entry in entries.items():
                if key in FACTORS:
                    merged.setdefault(name, {}).setdefault(key, {}).update(entry)
                else:
                    merged.setdefault(name, {})[key] = entry
    return merged


def check(merged: Merged, run: Executor, steps: int) -> None:
    """Raise ``ValueError`` if a layer is missing, unknown or of another shape."""
    unknown = sorted(merged.keys() - run.layers.keys())
    if unknown:
        raise ValueError(f"K-FAC state has layers this model lacks: {unknown[:3]}")
    for name, layer in run.layers.items() if run.plan.factors else ():
        for factor in FACTORS:
            got = merged.get(name, {}).get(factor, {}).get("factor")
            shape = layer.spec.factor_shape(factor)
            if steps > 0 and (got is None or tuple(got.shape) != shape):
                found = "nothing" if got is None else list(got.shape)
                raise ValueError(
                    f"K-FAC state of {name}: expected a {list(shape)} {factor}, found {found}; "
                    "pass the state of every rank that saved one, and the same model"
                )


def take(merged: Merged, run: Executor) -> bool:
    """Replace what the executor holds; whether all decompositions were there."""
    complete = True
    run.store.clear()
    for placement in run.plan.placements:
        name = placement.layer.name
        device = run.layers[name].weight.device
        entries = merged.get(name, {})
        for factor in FACTORS:
            if factor not in entries:
                continue
            key: tuple[str, Factor] = (name, factor)
            entry = entries[factor]
            if run.plan.keeps(run.collective.rank, placement, factor):
                run.store.keep_factor(key, entry["factor"].to(device, copy=True))
                run.store.weights[key] = entry["weight"].to(device, copy=True)
            saved = entry.get(_kind(run))
            complete = complete and saved is not None
            if saved is not None and run.collective.rank in placement.grad_workers:
                run.store.load_decomposition(key, [x.to(device, copy=True) for x in saved])
        if run.plan.method == "ekfac" and "second_moment" in entries:
            run.store.second_moments[name] = entries["second_moment"].to(device, copy=True)
    if run.plan.method == "ekfac":
        run.store.start_missing_second_moments()
    return complete
