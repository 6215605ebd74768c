"""Runs the plan's ops on real tensors: the part of a K-FAC step that is the same every time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kfac_bench.core import linalg
from kfac_bench.core.capture import Collected
from kfac_bench.core.collective import Collective, Work
from kfac_bench.core.factors import Scale
from kfac_bench.core.layers import Layer
from kfac_bench.core.plan import (
    FACTORS,
    ComputeFactor,
    Decompose,
    Factor,
    LayerSpec,
    Message,
    Op,
    Plan,
    Precondition,
    ReduceFactors,
    ShareDecompositions,
    ShareGradients,
    Stage,
    decomposition_numel,
    packed_numel,
)

log = logging.getLogger(__name__)

Decomposition = tuple[Tensor, ...]
"""Eigenvalues and eigenvectors, or the damped inverse alone."""


@dataclass
class LayerState:
    """What a rank holds of one layer between steps."""

    factors: dict[Factor, Tensor] = field(default_factory=dict)
    weights: dict[Factor, Tensor] = field(default_factory=dict)
    """Per factor the sum of the decayed weights of its average: 0 before the first statistic."""
    decompositions: dict[Factor, Decomposition] = field(default_factory=dict)


@dataclass
class Request:
    """What one step asks of the executor: values of the schedules at this step."""

    stages: Sequence[Stage]
    damping: float
    factor_decay: float
    collected: Mapping[str, Collected]
    grads: Mapping[str, Tensor]


class Executor:
    """Executes the ops of a plan that this rank takes part in; see the contract at ``Plan``."""

    def __init__(
        self, plan: Plan, collective: Collective, layers: Sequence[Layer], scale: Scale
    ) -> None:
        self.plan, self.collective, self.scale = plan, collective, scale
        self.layers = {layer.name: layer for layer in layers}
        self.states = {layer.name: LayerState() for layer in layers}
        self.failed_decompositions = 0
        self.stage_s: dict[str, float] = {}
        """Seconds of the last run by kind of op; messages count where they are waited for."""
        self._mine = {s: [op for op in plan.ops(s) if collective.rank in op.ranks] for s in Stage}
        self._fresh: dict[tuple[str, Factor], tuple[Tensor, Tensor]] = {}
        self._arrived: list[tuple[str, Work, Callable[[], None]]] = []
        self._preconditioned: dict[str, Tensor] = {}

    def run(self, request: Request) -> dict[str, Tensor]:
        """One step's stages; the preconditioned gradients by layer, each [g_dim, a_dim]."""
        self.stage_s = {}
        self._preconditioned = {}
        for stage in request.stages:
            for op in self._mine[stage]:
                with self._timed(type(op).__name__):
                    self._start(op, request)
            for kind, work, unpack in self._arrived:
                with self._timed(kind):
                    work.wait()
                    unpack()
            self._arrived.clear()
            if stage is Stage.FACTORS:
                with self._timed("ComputeFactor"):
                    self._fold(request.factor_decay)
        return self._preconditioned

    def _timed(self, kind: str) -> _Timer:
        return _Timer(self.stage_s, kind)

    def _start(self, op: Op, request: Request) -> None:
        match op:
            case ComputeFactor(_, layer, factor):
                self._compute_factor(layer, factor, request.collected.get(layer.name))
            case Decompose(_, layer, factor):
                self._decompose(layer, factor, request.damping)
            case Precondition(_, layer):
                self._precondition(layer, request)
            case Message():
                buffer, unpack = self._pack(op)
                if isinstance(op, ReduceFactors):
                    work = self.collective.all_reduce(buffer, op.ranks, op.name)
                else:
                    assert isinstance(op, ShareDecompositions | ShareGradients)
                    work = self.collective.broadcast(buffer, op.root, op.ranks, op.name)
                self._arrived.append((type(op).__name__, work, unpack))

    # Stage FACTORS

    def _compute_factor(self, spec: LayerSpec, factor: Factor, new: Collected | None) -> None:
        """The fresh statistic and its weight: the samples it stands for, 0 if it is unusable."""
        weight_of = self.layers[spec.name].weight
        if new is None:  # not used in this step, on this rank
            zeros = torch.zeros(spec.dim(factor), spec.dim(factor), device=weight_of.device)
            self._fresh[spec.name, factor] = zeros, zeros.new_zeros(())
            return
        scales = self.scale(new.samples, new.rows / new.samples, self.layers[spec.name].is_conv)
        moment = new.a if factor == "A" else new.g
        moment *= scales[FACTORS.index(factor)]
        finite = torch.isfinite(moment.sum())  # an overflow must never enter the average
        moment = torch.where(finite, moment, torch.zeros_like(moment))
        self._fresh[spec.name, factor] = moment, finite * float(new.samples)

    def _fold(self, decay: float) -> None:
        """Debiased running averages: F_k = sum decay^(k-i) f_i / sum decay^(k-i)."""
        for (name, factor), (fresh, samples) in self._fresh.items():
            state = self.states[name]
            old = state.factors.get(factor)
            if old is None:
                old = state.factors[factor] = torch.zeros_like(fresh)
                state.weights[factor] = fresh.new_zeros(())
            present = (samples > 0).to(fresh.dtype)
            weight = state.weights[factor]
            weight.copy_(torch.where(samples > 0, decay * weight + 1, weight))
            old.lerp_(fresh, present / weight.clamp_min(1e-30))
        self._fresh.clear()

    # Stages DECOMPOSE and PRECONDITION

    def _decompose(self, spec: LayerSpec, factor: Factor, damping: float) -> None:
        state = self.states[spec.name]
        try:
            if self.plan.method == "eigen":
                new: Decomposition = linalg.eigendecompose(state.factors[factor])
            else:
                new = (linalg.damped_inverse(state.factors[factor], damping),)
        except linalg.DecompositionError as error:
            self.failed_decompositions += 1
            log.warning("%s of %s: %s; the last good one stays", factor, spec.name, error)
            if factor in state.decompositions:
                return
            new = self._identity(spec.dim(factor), state.factors[factor])
        state.decompositions[factor] = new

    def _identity(self, n: int, like: Tensor) -> Decomposition:
        eye = torch.eye(n, device=like.device, dtype=like.dtype)
        return (like.new_ones(n), eye) if self.plan.method == "eigen" else (eye,)

    def _precondition(self, spec: LayerSpec, request: Request) -> None:
        grad = request.grads.get(spec.name)
        if grad is None:
            return
        a, g = (self.states[spec.name].decompositions[f] for f in FACTORS)
        if self.plan.method == "eigen":
            result = linalg.precondition_eigen(grad, (a[0], a[1]), (g[0], g[1]), request.damping)
        else:
            result = linalg.precondition_inverse(grad, a[0], g[0])
        self._preconditioned[spec.name] = result

    # Messages: a bucket is one flat tensor, its members side by side

    def _pack(self, op: Message) -> tuple[Tensor, Callable[[], None]]:
        """The buffer to send (filled on ranks that have something to say), and how to unpack."""
        like = next(iter(self.layers.values())).weight
        buffer = torch.empty(op.numel, device=like.device, dtype=torch.float32)
        is_root = getattr(op, "root", None) == self.collective.rank
        match op:
            case ReduceFactors():
                self._pack_factors(op, buffer)
                return buffer, lambda: self._unpack_factors(op, buffer)
            case ShareDecompositions():
                if is_root:
                    self._pack_decompositions(op, buffer)
                    return buffer, lambda: None
                return buffer, lambda: self._unpack_decompositions(op, buffer)
            case ShareGradients():
                if is_root:
                    self._pack_gradients(op, buffer)
                    return buffer, lambda: None
                return buffer, lambda: self._unpack_gradients(op, buffer)
        raise TypeError(op)

    def _pack_factors(self, op: ReduceFactors, buffer: Tensor) -> None:
        at = 0
        for spec, factor in op.members:
            fresh, samples = self._fresh[spec.name, factor]
            n = packed_numel(spec.dim(factor))
            linalg.pack_triangle(fresh, buffer[at : at + n])
            buffer[at : at + n] *= samples
            buffer[at + n] = samples
            at += n + 1

    def _unpack_factors(self, op: ReduceFactors, buffer: Tensor) -> None:
        at = 0
        for spec, factor in op.members:
            n = packed_numel(spec.dim(factor))
            samples = buffer[at + n]
            buffer[at : at + n] /= samples.clamp_min(1e-30)
            fresh = linalg.unpack_triangle(buffer[at : at + n], spec.dim(factor))
            self._fresh[spec.name, factor] = fresh, samples
            at += n + 1

    def _pack_decompositions(self, op: ShareDecompositions, buffer: Tensor) -> None:
        at = 0
        for spec, factor in op.members:
            d = self.states[spec.name].decompositions[factor]
            numel = decomposition_numel(spec.dim(factor), self.plan.method)
            target = buffer[at : at + numel]
            if self.plan.method == "eigen":
                torch.cat([d[0], d[1].flatten()], out=target)
            else:
                linalg.pack_triangle(d[0], target)
            at += numel

    def _unpack_decompositions(self, op: ShareDecompositions, buffer: Tensor) -> None:
        at = 0
        for spec, factor in op.members:
            n = spec.dim(factor)
            numel = decomposition_numel(n, self.plan.method)
            part = buffer[at : at + numel]
            self.states[spec.name].decompositions[factor] = (
                (part[:n].clone(), part[n:].view(n, n).clone())
                if self.plan.method == "eigen"
                else (linalg.unpack_triangle(part, n),)
            )
            at += numel

    def _pack_gradients(self, op: ShareGradients, buffer: Tensor) -> None:
        at = 0
        for spec in op.members:
            grad = self._preconditioned.get(spec.name)
            part = buffer[at : at + spec.g_dim * spec.a_dim].view(spec.g_dim, spec.a_dim)
            part.zero_() if grad is None else part.copy_(grad)
            at += part.numel()

    def _unpack_gradients(self, op: ShareGradients, buffer: Tensor) -> None:
        at = 0
        for spec in op.members:
            part = buffer[at : at + spec.g_dim * spec.a_dim]
            self._preconditioned[spec.name] = part.view(spec.g_dim, spec.a_dim)
            at += part.numel()


class _Timer:
    """Adds the seconds inside ``with`` to ``into[kind]``."""

    def __init__(self, into: dict[str, float], kind: str) -> None:
        self.into, self.kind = into, kind

    def __enter__(self) -> None:
        self.since = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        elapsed = time.perf_counter() - self.since
        self.into[self.kind] = self.into.get(self.kind, 0.0) + elapsed
