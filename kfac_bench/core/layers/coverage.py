"""The modules that K-FAC covers, each with its :class:`Layer`, and the reasons to skip others."""

import re
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from kfac_bench.core.kfac_options import DEFAULT_SKIP, MAX_DIM
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.layers.convolution import ConvLayer, TransposedConvLayer
from kfac_bench.core.layers.linear import NORMS, Conv1DLayer, EmbeddingLayer, LinearLayer, NormLayer
from kfac_bench.core.layers.sequence import (
    RECURRENT,
    ProjectionLayer,
    RecurrentLayer,
    map_names,
    reason_to_skip_attention,
)
from kfac_bench.core.layers.unrolled import UnrolledForward

LayerTypes = Mapping[type[nn.Module], type[Layer]]

LAYER_TYPES: LayerTypes = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    nn.Conv3d: ConvLayer,
    nn.ConvTranspose1d: TransposedConvLayer,
    nn.ConvTranspose2d: TransposedConvLayer,
    nn.ConvTranspose3d: TransposedConvLayer,
    nn.Embedding: EmbeddingLayer,
    **dict.fromkeys(NORMS, NormLayer),
}
"""The layer class of each type of module. Subclasses are covered like their parent."""

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
"""Words that torch.compile, checkpoint_wrapper and Lightning's Fabric add to names. Names here
leave them out."""


@dataclass(frozen=True, slots=True)
class SkippedModule:
    """A module with own parameters that the preconditioner leaves to the optimizer."""

    name: str
    kind: str
    params: int
    """A tied weight counts only where it occurs first."""
    reason: str


def find_layers(
    model: nn.Module,
    skip: Sequence[str] = DEFAULT_SKIP,
    *,
    layer_types: LayerTypes | None = None,
    max_dim: int = MAX_DIM,
) -> tuple[list[Layer], list[SkippedModule]]:
    """Return the covered layers, and all other modules that own parameters.

    Modules of one kind that share weight and bias are one layer. Other sharing (an embedding and
    the head tied to it) has no Kronecker form, so these modules are left to the optimizer.

    Args:
        model: The model, without wrapper.
        skip: Regular expressions, searched in the name and in the class name of a module.
        layer_types: Further layer classes by type of module.
        max_dim: A factor with more rows is kept as a diagonal.
    """
    types = {**LAYER_TYPES, **(layer_types or {})}
    parts = list(_parts(model, skip, types, max_dim))
    owners: dict[int, list[_Part]] = {}
    # First pass: who owns which parameter. Only then can the second pass see what is shared.
    for part in parts:
        for p in part.parameters.values():
            if p.requires_grad:
                owners.setdefault(id(p), []).append(part)
    layers: list[Layer] = []
    first_of: dict[int, Layer] = {}  # by id of a weight
    skipped: list[SkippedModule] = []
    counted: set[int] = set()
    for part in parts:
        reason = part.reason or _shared_otherwise(part, owners)
        if reason is not None:
            own = [p for p in part.parameters.values() if id(p) not in counted]
            counted.update(map(id, own))
            params = sum(p.numel() for p in own)
            skipped.append(SkippedModule(part.name, type(part.module).__name__, params, reason))
        # Modules with the same weight are one layer; its hooks go on all of them.
        elif (twin := first_of.get(id(part.layers[0].weight))) is not None:
            twin.modules += part.layers[0].modules
        else:
            first_of[id(part.layers[0].weight)] = part.layers[0]
            layers += part.layers
    return layers, skipped


@dataclass(slots=True)
class _Part:
    """A module or a part of one, with its layers, or with the reason why it has none."""

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    layers: list[Layer]
    reason: str | None


def _clean(full_name: str, wrapped: Container[str]) -> str:
    """Return the name of a module without the words that wrappers add."""
    words = full_name.split(".")
    places = (".".join(words[: i + 1]) for i in range(len(words)))
    return ".".join(
        word
        for word, place in zip(words, places, strict=True)
        if word not in WRAPPERS and place not in wrapped
    )


def _parts(
    model: nn.Module, skip: Sequence[str], types: LayerTypes, max_dim: int
) -> Iterator[_Part]:
    inside: set[nn.Module] = set()  # submodules that layers of a parent cover
    wrapped: set[str] = set()  # names of what DistributedDataParallel wraps inside the model
    for full_name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            wrapped.add(f"{full_name}.module".removeprefix("."))
        own = dict(module.named_parameters(recurse=False))
        if module in inside or not own:
            continue
        name = _clean(full_name, wrapped)
        if isinstance(module, RECURRENT) and _type_of(module, types) is None:
            yield from _recurrent_parts(name, module, skip, max_dim)
            continue
        reason = _reason_to_skip(name, module, skip, types)
        if not _is_attention(module, types):
            layers = [] if reason else _make(name, module, types, max_dim)
            # A layer class of the user's own may name another parameter as the weight.
            reason = reason or _unusable(layers[0].weight)
            yield _Part(name, module, own, [] if reason else layers, reason)
            continue
        # The output projection is a Linear module, but attention never calls it.
        inside.add(module.out_proj)
        out_name = f"{name}.out_proj" if name else "out_proj"
        out_reason = reason or _reason_to_skip(out_name, module.out_proj, skip, types)
        made = [] if reason else ProjectionLayer.of(name, module, max_dim)
        reason = reason or _unusable(module.in_proj_weight)
        yield _Part(name, module, own, [] if reason else [*made[:3]], reason)
        out = dict(module.out_proj.named_parameters(recurse=False))
        yield _Part(out_name, module.out_proj, out, [] if out_reason else [*made[3:]], out_reason)


def _recurrent_parts(
    name: str, module: nn.Module, skip: Sequence[str], max_dim: int
) -> Iterator[_Part]:
    """Yield the weight matrices of a recurrent module, each with its bias."""
    reason = _skip_pattern(name, module, skip)
    if reason is not None:
        yield _Part(name, module, dict(module.named_parameters(recurse=False)), [], reason)
        return
    unrolled = UnrolledForward()
    for map_name in map_names(module):
        own_name = f"{name}.{map_name}" if name else map_name
        own = {n: getattr(module, n, None) for n in (f"weight_{map_name}", f"bias_{map_name}")}
        parameters = {n: p for n, p in own.items() if isinstance(p, nn.Parameter)}
        reason = _skip_pattern(own_name, module, skip) or _unusable(own[f"weight_{map_name}"])
        layers: list[Layer] = []
        if reason is None:
            layers.append(RecurrentLayer(own_name, module, map_name, unrolled, max_dim))
        yield _Part(own_name, module, parameters, layers, reason)


def _shared_otherwise(part: _Part, owners: Mapping[int, Sequence[_Part]]) -> str | None:
    """Return a reason if another module shares a parameter without being the same map."""
    for name, p in part.parameters.items():
        for other in owners.get(id(p), ()):
            if other is not part and not _are_twins(part, other):
                return f"{name} tied to {other.name}"
    return None


def _are_twins(part: _Part, other: _Part) -> bool:
    if not len(part.layers) == len(other.layers) == 1:
        return False
    return part.layers[0].is_same_map(other.layers[0])


def _make(name: str, module: nn.Module, types: LayerTypes, max_dim: int) -> list[Layer]:
    layer_type = _type_of(module, types)
    assert layer_type is not None
    return [layer_type(name, module, max_dim)]


def _type_of(module: nn.Module, types: LayerTypes) -> type[Layer] | None:
    for parent in type(module).__mro__:
        if parent in types:
            return types[parent]
        if is_conv1d_of_transformers(parent):
            return Conv1DLayer
    return None


def _is_attention(module: nn.Module, types: LayerTypes) -> bool:
    """Check whether it is an attention module without a layer class of the user's own."""
    return isinstance(module, nn.MultiheadAttention) and _type_of(module, types) is None


def is_conv1d_of_transformers(kind: type) -> bool:
    """Return whether a class is Conv1D of transformers; a model of it has imported the package."""
    module = sys.modules.get("transformers.pytorch_utils")
    return module is not None and kind is module.Conv1D


def _reason_to_skip(
    name: str, module: nn.Module, skip: Sequence[str], types: LayerTypes
) -> str | None:
    if (reason := _skip_pattern(name, module, skip)) is not None:
        return reason
    if _is_attention(module, types):
        return reason_to_skip_attention(module)
    layer_type = _type_of(module, types)
    if layer_type is None:
        return f"no layer class for {type(module).__name__} (add one with layer_types)"
    reason = layer_type.reason_to_skip(module)
    # A class of the user's own may name another parameter as the weight; its layer is checked.
    is_ours = layer_type in LAYER_TYPES.values()
    return reason or (_unusable(module.weight) if is_ours and hasattr(module, "weight") else None)


def _skip_pattern(name: str, module: nn.Module, skip: Sequence[str]) -> str | None:
    for pattern in skip:
        if re.search(pattern, name) or re.search(pattern, type(module).__name__):
            return f"skip pattern {pattern!r}"
    return None


def _unusable(weight: object) -> str | None:
    """Return why a layer with this weight cannot be covered, or None if it can."""
    if not isinstance(weight, nn.Parameter):
        return "weight is not a parameter but computed (a parametrization)"
    if weight.is_complex():
        return "complex weight"
    if not weight.numel():
        return "weight has no elements"
    return None if weight.requires_grad else "weight is frozen"


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers, so that names of modules are clean.

    Wrappers are DistributedDataParallel (also Apex's), DataParallel, DeepSpeed's engine,
    torch.compile and Lightning's Fabric.
    """
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        if isinstance(model, parallel) or _is_foreign_wrapper(model):
            model = model.get_submodule("module")
            continue
        inner = model._modules.get("_orig_mod") or model._modules.get("_forward_module")
        if inner is None:
            return model
        model = inner


def _is_foreign_wrapper(model: nn.Module) -> bool:
    """Check the package by name, so that Apex and DeepSpeed need not be imported."""
    package = type(model).__module__.partition(".")[0]
    return package in ("apex", "deepspeed") and isinstance(
        getattr(model, "module", None), nn.Module
    )
