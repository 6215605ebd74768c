"""Checks of a K-FAC state before it is loaded: layers, shapes and types.

:class:`KFAC` calls :func:`check` in ``load_state_dict``. A state comes from a file, so it may hold
anything that torch can load.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.budget import Choice
from kfac_bench.core.planning.layer_spec import Factor, LayerSpec
from kfac_bench.core.planning.plan import EIGEN_ADAM, Plan

KINDS = ("eigen", "inverse")
"""Names that a decomposition may have in a saved state."""


def check(
    merged: Mapping[str, Mapping[str, Any]],
    states: Sequence[Mapping[str, Any]],
    layers: Sequence[Layer],
    *,
    has_factors: bool,
) -> int:
    """Return the number of steps of a state.

    Args:
        merged: The layers of all shards.
        states: The shards.
        layers: The layers that take over the state.
        has_factors: Whether the plan has factors.

    Raises:
        ValueError: A layer is missing or unknown, a tensor has another shape or type, or a number
            is not possible.
    """
    counts = {_count("steps", each["steps"]) for each in states}
    if len(counts) > 1:
        raise ValueError(
            f"K-FAC state: shards of different steps ({min(counts)} and {max(counts)}): pass the "
            "shards of one checkpoint"
        )
    (steps,) = counts
    damping = states[0].get("damping", 1.0)
    if not isinstance(damping, int | float) or not 0 < damping < math.inf:
        raise ValueError(f"K-FAC state: the damping is {str(damping)[:50]}, expected more than 0")
    left = states[0].get("left", [])
    if not isinstance(left, list) or not all(isinstance(name, str) for name in left):
        raise ValueError(f"K-FAC state: left is {str(left)[:50]}, expected a list of names")
    unknown = sorted(map(str, (merged.keys() | set(left)) - {layer.name for layer in layers}))
    if unknown:
        raise ValueError(
            f"K-FAC state has layers this model lacks: {unknown[:3]}; "
            "load the state of the same model, with the same frozen layers"
        )
    for layer in layers:
        name = layer.name
        entries = merged.get(name, {})
        for factor in layer.spec.factors:
            entry = entries.get(factor, {})
            _check_factor(layer.spec, factor, entry, is_needed=has_factors and steps > 0)
        if "second_moment" in entries:
            _check_tensor(name, "second_moment", entries["second_moment"], layer.spec.grad_shape)
        if "second_moment_weight" in entries:
            _check_tensor(name, "second_moment_weight", entries["second_moment_weight"], ())
        _check_adam(layer.spec, entries.get("adam"))
    return steps


def without_moments(
    merged: Mapping[str, Mapping[str, Any]], plan: Plan, states: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the layers of a plan with Adam's moments whose moments a state of some steps lacks.

    A layer that has had no gradient has no moments, and no statistics: the weight of A is 0.
    """
    if plan.method != EIGEN_ADAM:
        return []
    left = states[0].get("left", [])
    layers = (placement.layer for placement in plan.placements if placement.layer.name not in left)
    return [
        layer.name
        for layer in layers
        if "adam" not in merged[layer.name] and merged[layer.name][layer.factors[0]]["weight"] > 0
    ]


def choice(states: Sequence[Mapping[str, Any]]) -> Choice | None:
    """Return the choice of a budget that a state has, None if it has none.

    Raises:
        ValueError: It is not one.
    """
    saved = states[0].get("choice")
    if saved is None:
        return None
    names = [field.name for field in fields(Choice)]
    if not isinstance(saved, Mapping) or sorted(saved) != sorted(names):
        raise ValueError(f"K-FAC state: the choice is no dict of {', '.join(names)}")
    for name in names[:-1]:
        if name != "block_size" or saved[name] is not None:
            _count(name, saved[name])
    made = Choice(**saved)
    return made if made.update_freq else None  # NO_CHOICE


def _check_factor(
    spec: LayerSpec, factor: Factor, entry: Mapping[str, Any], *, is_needed: bool
) -> None:
    shape = spec.factor_shape(factor)
    saved = entry.get("factor")
    # A decomposition without its factor is no state of a run, whatever the number of steps.
    if saved is None and (is_needed or entry):
        raise ValueError(
            f"K-FAC state of {spec.name}: expected a {list(shape)} {factor}, found nothing; "
            "pass the state of every rank that saved one, and use the same frozen layers, "
            "the same model, max_dim, block_size and max_overhead"
        )
    if saved is not None:
        _check_tensor(spec.name, factor, saved, shape)
        _check_tensor(spec.name, f"weight of {factor}", entry.get("weight"), ())
    pending = entry.get("pending")
    if pending is not None:
        _check_mapping(spec.name, f"pending {factor}", pending)
        _count(f"the step of the pending {factor} of {spec.name}", pending.get("step"))
    for kind in KINDS:
        what = f"{kind} of {factor}"
        if entry.get(kind) is not None:
            _check_decomposition(spec, factor, what, kind, entry[kind])
        # A pending decomposition without tensors failed.
        if pending is not None and pending.get(kind):
            _check_decomposition(spec, factor, f"pending {what}", kind, pending[kind])


def _check_decomposition(
    spec: LayerSpec, factor: Factor, what: str, kind: str, tensors: Sequence[Any]
) -> None:
    shape = spec.factor_shape(factor)
    has_vectors = kind == "eigen" and not spec.is_diagonal(factor)
    shapes = [shape[:2], shape] if has_vectors else [shape]
    if not isinstance(tensors, list | tuple) or len(tensors) != len(shapes):
        raise ValueError(f"K-FAC state of {spec.name}: {what} is no list of {len(shapes)} tensors")
    for tensor, expected in zip(tensors, shapes, strict=True):
        _check_tensor(spec.name, what, tensor, expected)


def _check_adam(spec: LayerSpec, moments: Mapping[str, Any] | None) -> None:
    if moments is None:
        return
    _check_mapping(spec.name, "adam", moments)
    for key in ("first", "second"):
        _check_tensor(spec.name, f"adam {key}", moments.get(key), spec.grad_shape)
    _check_tensor(spec.name, "adam skipped", moments.get("skipped"), (spec.groups, 1, 1))
    _count(f"the Adam steps of {spec.name}", moments.get("steps"))


def _check_mapping(name: str, what: str, found: Any) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"K-FAC state of {name}: {what} is no dict ({type(found).__name__})")


def _check_tensor(name: str, what: str, found: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(found, Tensor):
        raise ValueError(f"K-FAC state of {name}: {what} is no tensor ({type(found).__name__})")
    if tuple(found.shape) != shape:
        raise ValueError(
            f"K-FAC state of {name}: expected a {list(shape)} {what}, found {list(found.shape)}; "
            "pass the state of every rank that saved one, and use the same model, max_dim, "
            "block_size and max_overhead"
        )
    if not found.is_floating_point():
        raise ValueError(
            f"K-FAC state of {name}: {what} has the type {found.dtype}, expected floating point"
        )


def _count(what: str, value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f"K-FAC state: {what} is {str(value)[:50]}, expected a whole number")
    return value
