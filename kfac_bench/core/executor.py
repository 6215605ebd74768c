"""Runs the plan's ops on real tensors: the part of a K-FAC step that is the same every time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_bench.core import linalg, messages
from kfac_bench.core.capture import Collected
from kfac_bench.core.collective import Collective, Work
from kfac_bench.core.factors import Scale
from kfac_bench.core.layers import Layer
from kfac_bench.core.messages import Decompositions, Statistics
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
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What one step asks for: due stages, values of the schedules, what the hooks collected."""

    stages: Sequence[Stage]
    damping: float
    factor_decay: float
    collected: Mapping[str, Collected]
    grads: Mapping[str, Tensor]
    """By layer, [g_dim, a_dim]; a layer that backward did not reach is missing."""


class Executor:
    """Executes the ops of a plan that this rank takes part in; see the contract at ``Plan``.

    Between steps it holds the running ``factors``, their ``weights`` (the sum of the decayed
    weights of the average; 0 before the first statistic), and the ``decompositions`` of the
    layers that this rank is a gradient worker of.
    """

    def __init__(
        self, plan: Plan, collective: Collective, layers: Sequence[Layer], scale: Scale
    ) -> None:
        self.plan, self.collective, self.scale = plan, collective, scale
        self.layers = {layer.name: layer for layer in layers}
        self.factors: dict[tuple[str, Factor], Tensor] = {}
        self.weights: dict[tuple[str, Factor], Tensor] = {}
        self.decompositions: Decompositions = {}
        self.failed_decompositions = 0
        self.stage_s: dict[str, float] = {}
        """Seconds of the last run by kind of op; messages count where they are waited for."""
        self._mine = {s: [op for op in plan.ops(s) if collective.rank in op.ranks] for s in Stage}
        self._fresh: Statistics = {}
        self._preconditioned: dict[str, Tensor] = {}

    def run(self, request: Request) -> dict[str, Tensor]:
        """One step's stages; the preconditioned gradients by layer, each [g_dim, a_dim]."""
        self.stage_s, self._preconditioned = {}, {}
        for stage in request.stages:
            under_way: list[tuple[str, Work, Callable[[], None]]] = []
            for op in self._mine[stage]:
                with self.timed(type(op).__name__):
                    if isinstance(op, Message):
                        under_way.append((type(op).__name__, *self._send(op)))
                    else:
                        self._compute(op, request)
            for kind, work, unpack in under_way:
                with self.timed(kind):
                    work.wait()
                    unpack()
            if stage is Stage.FACTORS:
                with self.timed("ComputeFactor"):
                    self._fold(request.factor_decay)
        return self._preconditioned

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add the host's seconds inside the block to ``stage_s[kind]``."""
        start = time.perf_counter()
        yield
        self.stage_s[kind] = self.stage_s.get(kind, 0.0) + time.perf_counter() - start

    def _compute(self, op: Op, request: Request) -> None:
        match op:
            case ComputeFactor(_, layer, factor):
                self._compute_factor(layer, factor, request.collected.get(layer.name))
            case Decompose(_, layer, factor):
                self._decompose(layer, factor, request.damping)
            case Precondition(_, layer):
                if layer.name in request.grads:
                    grad = request.grads[layer.name]
                    self._preconditioned[layer.name] = self._precondition(
                        layer, grad, request.damping
                    )
            case _:
                raise TypeError(op)

    def _send(self, op: Message) -> tuple[Work, Callable[[], None]]:
        """Start a message; what to do with its bucket when it has arrived.

        The root unpacks what it sent, too: with equal bits in equal memory layouts, all ranks
        compute equal bits from them, and their weights never drift apart.
        """
        device = next(iter(self.layers.values())).weight.device
        bucket = torch.empty(op.numel, device=device)
        match op:
            case ReduceFactors():
                messages.pack_factors(op, self._fresh, bucket)
                work = self.collective.all_reduce(bucket, op.ranks, op.name)
                return work, lambda: messages.unpack_factors(op, bucket, self._fresh)
            case ShareDecompositions(root=root):
                method, target = self.plan.method, self.decompositions
                if root == self.collective.rank:
                    messages.pack_decompositions(op, method, target, bucket)
                work = self.collective.broadcast(bucket, root, op.ranks, op.name)
                return work, lambda: messages.unpack_decompositions(op, method, bucket, target)
            case ShareGradients(root=root):
                if root == self.collective.rank:
                    messages.pack_gradients(op, self._preconditioned, bucket)
                work = self.collective.broadcast(bucket, root, op.ranks, op.name)
                return work, lambda: messages.unpack_gradients(op, bucket, self._preconditioned)
        raise TypeError(op)

    def _compute_factor(self, spec: LayerSpec, factor: Factor, new: Collected | None) -> None:
        """Scale the raw moment; its weight is the samples it stands for, 0 if it is unusable."""
        layer = self.layers[spec.name]
        if new is None:  # not used in this step, on this rank
            zeros = torch.zeros(spec.dim(factor), spec.dim(factor), device=layer.weight.device)
            self._fresh[spec.name, factor] = zeros, zeros.new_zeros(())
            return
        scales = self.scale(new.samples, new.rows / new.samples, layer.is_conv)
        moment = new.a if factor == "A" else new.g
        moment *= scales[FACTORS.index(factor)]
        finite = torch.isfinite(moment.sum())  # an overflow must never enter the average
        moment = torch.where(finite, moment, torch.zeros_like(moment))
        self._fresh[spec.name, factor] = moment, finite * float(new.samples)

    def _fold(self, decay: float) -> None:
        """Debiased running averages: F_k = sum decay^(k-i) f_i / sum decay^(k-i)."""
        for key, (fresh, samples) in self._fresh.items():
            if key not in self.factors:
                self.factors[key] = torch.zeros_like(fresh)
                self.weights[key] = fresh.new_zeros(())
            weight, present = self.weights[key], samples > 0
            weight.copy_(torch.where(present, decay * weight + 1, weight))
            self.factors[key].lerp_(fresh, present / weight.clamp_min(1))
        self._fresh.clear()

    def _decompose(self, spec: LayerSpec, factor: Factor, damping: float) -> None:
        key, eigen = (spec.name, factor), self.plan.method == "eigen"
        matrix = self.factors[key]
        try:
            self.decompositions[key] = (
                linalg.eigendecompose(matrix)
                if eigen
                else (linalg.damped_inverse(matrix, damping),)
            )
        except linalg.DecompositionError as error:
            self.failed_decompositions += 1
            log.warning("%s of %s: %s; the last good one stays", factor, spec.name, error)
            if key not in self.decompositions:
                eye = torch.eye(len(matrix), device=matrix.device)
                self.decompositions[key] = (eye.diagonal().clone(), eye) if eigen else (eye,)

    def _precondition(self, spec: LayerSpec, grad: Tensor, damping: float) -> Tensor:
        a, g = (self.decompositions[spec.name, factor] for factor in FACTORS)
        if self.plan.method == "eigen":
            return linalg.precondition_eigen(grad, (a[0], a[1]), (g[0], g[1]), damping)
        return linalg.precondition_inverse(grad, a[0], g[0])
