"""K-FAC's state as a part of an optimizer's state: by parameter, with the same entries at any time.

``EigenAdam.state_dict()`` contains it. Tools such as torch.distributed.checkpoint load into the
state of a new optimizer, so a state has all entries and their shapes before the first step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from kfac_bench.core import state
from kfac_bench.core.execution.executor import Executor
from kfac_bench.core.planning.plan import Placement

Entries = dict[str, Any]
"""Nested dicts of tensors and whole numbers."""


class Preconditioner(Protocol):
    """The part of a KFAC that this file needs."""

    steps: int
    in_optimizer_state: bool

    @property
    def saved_choice(self) -> dict[str, Any] | None:
        """The choice of ``max_overhead`` as a state contains it; None without this option."""

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Load a state."""


@dataclass(slots=True)
class _Gathered:
    steps: int
    layers: dict[str, Entries]


class OptimizerState:
    """The state of one KFAC, as the state of its weights and biases.

    Args:
        preconditioner: The KFAC; nothing here keeps it alive.
        run: Its executor.
    """

    def __init__(self, preconditioner: Preconditioner, run: Executor) -> None:
        self._kfac, self._run = ref(preconditioner), run
        self._gathered: _Gathered | None = None

    @property
    def steps(self) -> int:
        """The steps of the KFAC."""
        kfac = self._kfac()
        return 0 if kfac is None else kfac.steps

    @property
    def is_included(self) -> bool:
        """True if the optimizer's state contains this state."""
        kfac = self._kfac()
        return kfac is not None and kfac.in_optimizer_state

    def by_parameter(self) -> dict[Tensor, Entries]:
        """Return the state without communication.

        Raises:
            RuntimeError: Other ranks have a part of it.
        """
        layers, kfac = self._layers(), self._kfac()
        about: Entries = {"steps": self.steps}
        if kfac is not None and (choice := kfac.saved_choice) is not None:
            # Only numbers: method eigen_adam has no blocks.
            about["choice"] = {k: v for k, v in choice.items() if k != "block_size"}
        found: dict[Tensor, Entries] = {}
        for name, layer in self._run.layers.items():
            entries = found.setdefault(layer.weight, dict(about))
            # Layers may share a weight: the projections of attention are parts of one.
            entries[str(len(entries) - len(about))] = layers[name]
            if layer.bias is not None:
                found.setdefault(layer.bias, dict(about))
        return found

    def _layers(self) -> dict[str, Entries]:
        if self._gathered is not None and self._gathered.steps == self.steps:
            return self._gathered.layers
        self._gathered = None
        if self.steps and not state.is_whole(self._run):
            raise RuntimeError(
                "EigenAdam.state_dict(): other ranks hold a part of the state. Call "
                "optimizer.consolidate_state_dict() on all ranks first, after each step that is "
                "saved. Or set preconditioner.in_optimizer_state = False, and save "
                "preconditioner.state_dict(shard=True) of each rank"
            )
        return self._packed(shard=False)

    def _packed(self, *, shard: bool) -> dict[str, Entries]:
        now = state.layers_state(self._run, shard=shard) if self.steps else {}
        has_pending, left = self._run.background is not None, self._run.gradients.left
        return {
            name: _pack(empty, now.get(name, {}), has_pending=has_pending)
            | {"left": int(name in left)}
            for name, empty in state.empty_layers(self._run)
        }

    def forget(self) -> None:
        """Free the memory of :meth:`gather`."""
        self._gathered = None

    def gather(self) -> None:
        """Let each rank get the whole state, on its CPU; all ranks of the KFAC call it."""
        if state.is_whole(self._run) or not self.steps:
            return
        mine = self._packed(shard=True)
        layers = {
            placement.layer.name: self._share(placement, mine[placement.layer.name])
            for placement in self._run.plan.placements
        }
        self._gathered = _Gathered(self.steps, layers)

    def _share(self, placement: Placement, mine: Entries) -> Entries:
        """Return the entries of a layer, each from the rank that holds it."""
        world = tuple(range(self._run.collective.world_size))
        device = self._run.layers[placement.layer.name].weight.device
        shared: Entries = {}
        for path, value in _leaves(mine):
            part = path[0] if path[0] in placement.layer.factors else placement.layer.factors[0]
            message = value if isinstance(value, Tensor) else torch.tensor(value, device=device)
            message = message.to(device, copy=True).contiguous()
            name = "/".join(("state", placement.layer.name, *path))
            self._run.collective.broadcast(message, placement.worker(part), world, name).wait()
            entries = shared
            for key in path[:-1]:
                entries = entries.setdefault(key, {})
            is_tensor = isinstance(value, Tensor)
            entries[path[-1]] = message.cpu() if is_tensor else int(message)
        return shared

    def load(self, saved: Mapping[Tensor, Any]) -> None:
        """Load a state by parameter.

        Raises:
            ValueError: The state does not fit. The KFAC has not changed then.
        """
        kfac = self._kfac()
        self._gathered = None
        if kfac is None:
            return
        layers: state.LayersState = {}
        left: list[str] = []
        steps: list[Any] = []
        choice: dict[str, Any] = {}
        seen = dict.fromkeys(saved, 0)
        for name, layer in self._run.layers.items():
            entries = saved.get(layer.weight)
            if not isinstance(entries, Mapping):
                continue
            found = entries.get(str(seen[layer.weight]))
            seen[layer.weight] += 1
            steps.append(entries.get("steps"))
            if isinstance(made := entries.get("choice"), Mapping):
                choice = {"choice": {**made, "block_size": None}}
            if found is not None:
                layers[name] = _unpack(name, found)
                if layers[name].pop("left", False):
                    left.append(name)
        if any(each != steps[0] for each in steps):
            raise ValueError(
                "EigenAdam: the parameters have states of different steps; load one state"
            )
        kfac.load_state_dict(
            {"steps": steps[0] if steps else 0, "layers": layers, "left": left} | choice
        )


def _leaves(entries: Entries, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in entries.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _pack(empty: Entries, now: Mapping[str, Any], *, has_pending: bool) -> Entries:
    """Return the entries of a layer: what is there now, and zeros for what is not."""
    packed: Entries = {}
    for key, zeros in empty.items():
        entry = now.get(key, {})
        if key == "adam":
            packed[key] = {**zeros, **entry}
            continue
        tensors = zeros["eigen"]
        packed[key] = {k: entry.get(k, zeros[k]) for k in ("factor", "weight")}
        packed[key]["eigen"] = _numbered(entry.get("eigen", tensors))
        packed[key] |= {"exists": int("factor" in entry), "is_decomposed": int("eigen" in entry)}
        if has_pending:
            pending = entry.get("pending", {"step": 0, "eigen": []})
            packed[key]["pending"] = {
                "step": pending["step"],
                "eigen": _numbered(pending["eigen"] or [torch.zeros_like(x) for x in tensors]),
                "is_decomposed": int(bool(pending["eigen"])),
            }
    return packed


def _numbered(tensors: list[Tensor]) -> Entries:
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def _unpack(name: str, packed: Any) -> dict[str, Any]:
    """Return the entries of a layer as :mod:`.state` has them, without those that are not there."""
    entries: dict[str, Any] = {}
    try:
        for key, entry in packed.items():
            if key == "adam":
                entries |= {key: dict(entry)} if entry["steps"] else {}
                continue
            if key == "left":  # states of older versions lack it
                entries[key] = bool(entry)
                continue
            made = {"factor": entry["factor"], "weight": entry["weight"]}
            if entry["is_decomposed"]:
                made["eigen"] = [*entry["eigen"].values()]
            if (pending := entry.get("pending", {"step": 0}))["step"]:
                tensors = [*pending["eigen"].values()] if pending["is_decomposed"] else []
                made["pending"] = {"step": pending["step"], "eigen": tensors}
            if entry["exists"]:
                entries[key] = made
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"EigenAdam: the state of the weight of {name} has an unknown form; load what "
            "state_dict() of an EigenAdam returned"
        ) from None
    return entries
