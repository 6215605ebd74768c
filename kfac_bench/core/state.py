"""K-FAC's state on disk: by layer, in fp32, independent of wrapper, world size and strategy.

:class:`KFAC` calls these functions for ``state_dict`` and ``load_state_dict``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kfac_bench.core.execution.decomposition import FactorKey
from kfac_bench.core.execution.executor import Executor
from kfac_bench.core.planning.layer_spec import FACTORS

LayersState = dict[str, dict[str, Any]]
"""By layer: entries "A" and "G", and "second_moment" if EKFAC has one.

An entry of a factor has the running "factor", its "weight", and its decomposition under "eigen"
(values and vectors, or a diagonal's values; EKFAC's, too) or "inverse" (one tensor).
"""


def layers_state(run: Executor, *, shard: bool) -> LayersState:
    """Return what this rank holds, or with ``shard`` only what it decomposes.

    The rank that decomposes A has the layer's second moments in its shard.
    """
    layers: LayersState = {}
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
    """Return the name of a decomposition on disk; EKFAC's are eigendecompositions."""
    return "inverse" if run.plan.method == "inverse" else "eigen"


def merge(states: Sequence[Mapping[str, Any]]) -> LayersState:
    """Return one state made of the shards of several ranks."""
    merged: LayersState = {}
    for state in states:
        for name, entries in state["layers"].items():
            for key, entry in entries.items():
                if key in FACTORS:
                    # A rank may hold the factor and another rank the decomposition.
                    merged.setdefault(name, {}).setdefault(key, {}).update(entry)
                else:
                    merged.setdefault(name, {})[key] = entry
    return merged


def check(merged: LayersState, run: Executor, steps: int) -> None:
    """Raise ``ValueError`` if a layer is missing, unknown or of another shape."""
    unknown = sorted(merged.keys() - run.layers.keys())
    if unknown:
        raise ValueError(
            f"K-FAC state has layers this model lacks: {unknown[:3]}; "
            "load the state of the same model"
        )
    for name, layer in run.layers.items() if run.plan.factors else ():
        for factor in FACTORS:
            saved = merged.get(name, {}).get(factor, {}).get("factor")
            shape = layer.spec.factor_shape(factor)
            if steps > 0 and (saved is None or tuple(saved.shape) != shape):
                found = "nothing" if saved is None else list(saved.shape)
                raise ValueError(
                    f"K-FAC state of {name}: expected a {list(shape)} {factor}, found {found}; "
                    "pass the state of every rank that saved one, and the same model"
                )


def take(merged: LayersState, run: Executor) -> bool:
    """Replace what the executor holds by copies; return whether all decompositions were there."""
    is_complete = True
    run.store.clear()
    for placement in run.plan.placements:
        name = placement.layer.name
        device = run.layers[name].weight.device
        entries = merged.get(name, {})
        for factor in FACTORS:
            if factor not in entries:
                continue
            key: FactorKey = (name, factor)
            entry = entries[factor]
            # Copies: later steps change the store in place, but never the caller's state.
            if run.plan.keeps(run.collective.rank, placement, factor):
                run.store.keep_factor(key, entry["factor"].to(device, copy=True))
                run.store.weights[key] = entry["weight"].to(device, copy=True)
            saved = entry.get(_kind(run))
            is_complete = is_complete and saved is not None
            if saved is not None and run.collective.rank in placement.grad_workers:
                run.store.load_decomposition(key, [x.to(device, copy=True) for x in saved])
        if run.plan.method == "ekfac" and "second_moment" in entries:
            run.store.second_moments[name] = entries["second_moment"].to(device, copy=True)
    run.store.start_missing_second_moments()
    return is_complete
