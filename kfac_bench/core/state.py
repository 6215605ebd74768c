"""K-FAC's state on disk: by layer, in fp32, independent of wrapper, world size and strategy.

:class:`KFAC` calls these functions for ``state_dict`` and ``load_state_dict``.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac_bench.core.execution.adam import AdamMoments
from kfac_bench.core.execution.background import factors_of
from kfac_bench.core.execution.decomposition import Decomposition, Eigen, FactorKey, type_of
from kfac_bench.core.execution.executor import Executor
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.estimate import has_second_moment
from kfac_bench.core.planning.layer_spec import FACTORS, side_of
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.core.schedule import first_step

LayersState = dict[str, dict[str, Any]]
"""The state of each layer, by name of the layer.

A layer has entries "A" and "G", and with EKFAC "second_moment" and "second_moment_weight". A
factor that is divided into blocks has entries "A.0", "A.1" and so on.

An entry of a factor has the running "factor", its "weight", and its decomposition under "eigen"
(values and vectors, or a diagonal's values; EKFAC's, too) or "inverse" (one tensor). With
eigen_adam a layer also has "adam": the moments "first" and "second", their "steps", and the
number of steps that were "skipped" because a gradient had overflowed. If another decomposition is
not in use yet (``background=True``), it is under "pending" in the same form, with the "step" in
which it comes into use. It has no tensors if the factor could not be decomposed.
"""


def is_whole(run: Executor) -> bool:
    """Return whether each rank holds everything."""
    plan = run.plan
    if plan.world_size == 1:
        return True
    if run.background is not None:
        return False  # only the rank that decomposes a factor holds what is not in use yet
    every = tuple(range(plan.world_size))
    return plan.factors_on == "all" and all(p.grad_workers == every for p in plan.placements)


def empty_layers(run: Executor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each layer's state before the first step, with all shapes; all numbers are 0.

    torch.distributed.checkpoint loads only what is in the state of the object that it loads into.
    """
    for name, layer in run.layers.items():
        spec, dtype = layer.spec, torch.promote_types(layer.weight.dtype, torch.float32)
        zeros = partial(torch.zeros, dtype=dtype, device=layer.weight.device)
        entries: dict[str, Any] = {}
        for factor in spec.factors if run.plan.factors else ():
            shape = spec.factor_shape(factor)
            kind = type_of(run.plan.method, is_diagonal=spec.is_diagonal(factor))
            shapes = [shape[:2], shape] if kind is Eigen else [shape]
            entries[factor] = {
                "factor": zeros(shape),
                "weight": zeros(()),
                _kind(run): [zeros(each) for each in shapes],
            }
        if has_second_moment(spec, run.plan.method):
            entries["second_moment"] = zeros(spec.grad_shape)
            entries["second_moment_weight"] = zeros(())
        if run.plan.method == EIGEN_ADAM:
            entries["adam"] = {
                "first": zeros(spec.grad_shape),
                "second": zeros(spec.grad_shape),
                "steps": 0,
                "skipped": zeros((spec.groups, 1, 1)),
            }
        yield name, entries


def layers_state(run: Executor, *, shard: bool) -> LayersState:
    """Return the state that this rank holds, or with ``shard`` only of what it decomposes.

    The rank that decomposes A, or its first block, has the layer's second moments in its shard.
    """
    layers: LayersState = {}
    pending = _pending(run)
    for placement in run.plan.placements:
        name = placement.layer.name
        layers[name] = {}
        for factor in placement.layer.factors:
            key = (name, factor)
            if shard and placement.worker(factor) != run.collective.rank:
                continue
            entry: dict[str, Any] = {}
            if key in run.store.factors:
                entry |= {"factor": run.store.factor(key), "weight": run.store.weights[key]}
            if key in run.store.decompositions:
                entry[_kind(run)] = _alone(run.store.decompositions[key].saved(), shard=shard)
            if key in pending:
                entry["pending"] = pending[key]
            if entry:
                layers[name][factor] = entry
            is_first = factor == placement.layer.factors[0]
            if is_first and name in run.store.second_moments:
                layers[name]["second_moment"] = run.store.second_moments[name]
                layers[name]["second_moment_weight"] = run.store.moment_weights[name]
            if is_first and name in run.store.adam:
                moments = run.store.adam[name]
                tensors = [moments.first, moments.second, moments.skipped]
                first, second, skipped = _alone(tensors, shard=shard)
                layers[name]["adam"] = {
                    "first": first,
                    "second": second,
                    "steps": moments.steps,
                    "skipped": skipped,
                }
    return layers


def _alone(tensors: Sequence[Tensor], *, shard: bool) -> list[Tensor]:
    """Return the tensors, in a shard as copies if they are parts of a stack or a message.

    torch.save writes the whole memory of a view, so every shard would have the layers of others.
    """
    return [x.clone() if shard and x.numel() < _memory_numel(x) else x for x in tensors]


def _memory_numel(x: Tensor) -> int:
    """Return the number of elements that the memory of a tensor holds."""
    return x.untyped_storage().nbytes() // x.element_size()


def _pending(run: Executor) -> dict[FactorKey, dict[str, Any]]:
    """Return by factor what this rank decomposed beside training and does not use yet."""
    if run.background_slices is None:
        return {}
    return {
        key: {"step": step, _kind(run): [] if made is None else made.saved()}
        for key, step, made in run.background_slices.pending()
    }


def _kind(run: Executor) -> str:
    """Return the name of a decomposition on disk; EKFAC's are eigendecompositions."""
    return "inverse" if run.plan.method == "inverse" else "eigen"


def merge(states: Sequence[Mapping[str, Any]]) -> LayersState:
    """Return one state made of the shards of several ranks.

    Raises:
        ValueError: There is no state, or one of them is not K-FAC's.
    """
    if not states:
        raise ValueError("load_state_dict() got no state: pass what state_dict() returned")
    merged: LayersState = {}
    for state in states:
        if missing := {"steps", "layers"} - _mapping("the argument", state).keys():
            raise ValueError(
                f"K-FAC state: the key {min(missing)!r} is missing; pass what state_dict() of a "
                "KFAC returned, not the state of a model or an optimizer"
            )
        for name, entries in _mapping("layers", state["layers"]).items():
            for key, entry in _mapping(f"layer {name}", entries).items():
                # The keys come from a file, so they may be anything.
                if isinstance(key, str) and side_of(key) in FACTORS:
                    # A rank may hold the factor and another rank the decomposition.
                    factor = merged.setdefault(name, {}).setdefault(key, {})
                    factor.update(_mapping(f"{key} of {name}", entry))
                else:
                    merged.setdefault(name, {})[key] = entry
    return merged


def _mapping(what: str, value: Any) -> Mapping[Any, Any]:
    """Return a part of a state that must be a mapping: the state may come from any file."""
    if not isinstance(value, Mapping):
        raise ValueError(
            f"K-FAC state: {what} is a {type(value).__name__}, expected a dict; pass what "
            "state_dict() of a KFAC returned"
        )
    return value


def load_layers(merged: LayersState, run: Executor, steps: int) -> bool:
    """Replace what the executor holds by copies.

    Returns:
        Whether all decompositions were there that a run has after ``steps`` steps.
    """
    missing: set[FactorKey] = set()
    run.store.clear()
    for placement in run.plan.placements:
        name = placement.layer.name
        layer = run.layers[name]
        entries = merged.get(name, {})
        for factor in placement.layer.factors:
            if factor not in entries:
                continue
            key: FactorKey = (name, factor)
            entry = entries[factor]
            # Copies: later steps change the store in place, but never the caller's state.
            if run.plan.keeps(run.collective.rank, placement, factor):
                run.store.keep_factor(key, _copy(entry["factor"], layer))
                run.store.weights[key] = _copy(entry["weight"], layer)
            saved = entry.get(_kind(run))
            if saved is None:
                missing.add(key)
            elif run.collective.rank in placement.grad_workers:
                run.store.load_decomposition(key, [_copy(x, layer) for x in saved])
        is_grad_worker = run.collective.rank in placement.grad_workers
        if run.plan.method == EIGEN_ADAM and "adam" in entries and is_grad_worker:
            # If the state lacks the basis of the moments, they start again with the next basis.
            saved = entries["adam"]
            names = ("first", "second", "skipped")
            first, second, skipped = (_copy(saved[k], layer) for k in names)
            run.store.adam[name] = AdamMoments(first, second, skipped, int(saved["steps"]))
        if run.plan.method == "ekfac" and "second_moment" in entries:
            moments = run.store.second_moments[name] = _copy(entries["second_moment"], layer)
            # States of older versions have no weight.
            weight = entries.get("second_moment_weight", moments.new_ones(()))
            run.store.moment_weights[name] = _copy(weight, layer)
    run.store.start_missing_second_moments()
    if run.background_slices is not None:
        missing -= _take_pending(merged, run, steps)
    return not missing


def _copy(saved: Tensor, layer: Layer) -> Tensor:
    """Return a copy on the device of a layer and in the precision of its statistics."""
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    return saved.to(layer.weight.device, dtype, copy=True)


def _take_pending(merged: LayersState, run: Executor, steps: int) -> set[FactorKey]:
    """Load the slices that had begun; return the factors that need no decomposition now.

    A slice of which something is missing (a state of few ranks, of another ``update_freq``, or of
    another method) does not count as begun. All ranks load the same state, so they agree.
    """
    assert run.background_slices is not None
    due: dict[int, int] = {}
    made: dict[FactorKey, Decomposition] = {}
    covered: set[FactorKey] = set()
    for i, ops in enumerate(run.plan.slices):
        keys = factors_of(ops)
        entries = [merged.get(name, {}).get(f, {}).get("pending", {}) for name, f in keys]
        # A slice of another method cannot be used. A decomposition that failed is there, but empty.
        at: set[Any] = {entry.get("step") if _kind(run) in entry else None for entry in entries}
        if len(at) == 1 and None not in at:
            (due[i],) = at
            covered.update(keys)
            for key, entry in zip(keys, entries, strict=True):
                layer = run.layers[key[0]]
                tensors = [_copy(x, layer) for x in entry.get(_kind(run), ())]
                if tensors:
                    kind = type_of(run.plan.method, is_diagonal=layer.spec.is_diagonal(key[1]))
                    made[key] = kind(*tensors)
        elif first_step(i, len(run.plan.slices)) >= steps:
            covered.update(keys)  # their first decomposition has not begun
    run.background_slices.restore(due, made)
    return covered
