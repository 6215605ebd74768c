"""Runs the plan's ops on real tensors: the part of a K-FAC step that is the same every time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_bench.core import linalg, messages
from kfac_bench.core.capture import Collected
from kfac_bench.core.collective import Collective, Work
from kfac_bench.core.factors import Scale
from kfac_bench.core.layer import Layer
from kfac_bench.core.messages import Decomposition, Decompositions, SecondMoments, Statistics
from kfac_bench.core.plan import (
    FACTORS,
    ComputeFactor,
    ComputeSecondMoment,
    Decompose,
    Factor,
    LayerSpec,
    Message,
    Op,
    Plan,
    Precondition,
    ReduceFactors,
    ReduceScales,
    ReduceSecondMoments,
    ShareDecompositions,
    ShareGradients,
)
from kfac_bench.core.planner import has_second_moment

log = logging.getLogger(__name__)

Stored = tuple[Tensor, ...]
"""A matrix; in half precision divided by its size [groups], which follows it."""


@dataclass(frozen=True)
class Request:
    """What one step asks for: due ops, values of the schedules, what the hooks collected."""

    stages: Sequence[Sequence[Op]]
    """Factors, slices of the decompositions, preconditioning: those that are due, in order."""
    damping: float
    factor_decay: float
    collected: Mapping[str, Collected]
    grads: Mapping[str, Tensor]
    """By layer, [groups, g_dim, a_dim]; a layer that backward did not reach is missing."""
    loss_scale: float | Tensor | None = 1.0
    """What multiplied the loss before backward; None: g is that of a sum over samples."""


class Executor:
    """Executes the ops of a plan that this rank takes part in; see the contract at ``Plan``.

    Between steps it holds the running ``factors``, their ``weights`` (the sum of the decayed
    weights of the average; 0 before the first statistic), and the ``decompositions`` of the
    layers that this rank is a gradient worker of; with EKFAC also the running ``second_moments``.
    """

    def __init__(
        self,
        plan: Plan,
        collective: Collective,
        layers: Sequence[Layer],
        scale: Scale,
        *,
        factored_damping: bool = False,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.plan, self.collective, self.scale = plan, collective, scale
        self.half = state_dtype if state_dtype.itemsize < 4 else None
        self.factored_damping = factored_damping
        self.layers = {layer.name: layer for layer in layers}
        self.factors: dict[tuple[str, Factor], Stored] = {}
        self.weights: dict[tuple[str, Factor], Tensor] = {}
        self.second_moments: dict[str, Tensor] = {}
        self.decompositions: Decompositions = {}
        self.failed_decompositions = 0
        self.stage_s: dict[str, float] = {}
        """Seconds of the last run by kind of op; messages count where they are waited for."""
        self._stacks: dict[tuple[str, ...], tuple[Decomposition, Decomposition]] = {}
        """By layers: the decompositions of a batch that is preconditioned together."""
        self.dropped: Tensor | None = None
        """Statistics left out because they were not finite; a 0-d tensor on the device."""
        self._fresh: Statistics = {}
        self._fresh_second: SecondMoments = {}
        self._preconditioned: dict[str, Tensor] = {}

    def run(self, request: Request) -> dict[str, Tensor]:
        """One step's stages; the preconditioned gradients by layer, [groups, g_dim, a_dim]."""
        self.stage_s, self._preconditioned = {}, {}
        for ops in request.stages:
            under_way: list[tuple[str, Work, Callable[[], None]]] = []
            for op in ops:
                if self.collective.rank not in op.ranks:
                    continue
                with self.timed(type(op).__name__):
                    if isinstance(op, ReduceScales):
                        work, unpack = self._send(op)
                        work.wait()
                        unpack()
                    elif isinstance(op, Message):
                        under_way.append((type(op).__name__, *self._send(op)))
                    else:
                        self._compute(op, request)
            for kind, work, unpack in under_way:
                with self.timed(kind):
                    work.wait()
                    unpack()
            if self._fresh:
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
                self._compute_factor(layer, factor, request)
            case ComputeSecondMoment(_, layer):
                self._compute_second_moment(layer, request)
            case Decompose(_, members):
                self._decompose(members, request.damping)
            case Precondition(_, layers):
                self._precondition([s for s in layers if s.name in request.grads], request)
            case _:
                raise TypeError(op)

    def _send(self, op: Message) -> tuple[Work, Callable[[], None]]:
        """Start a message; what to do with its bucket when it has arrived.

        The root unpacks what it sent, too: with equal bits in equal memory layouts, all ranks
        compute equal bits from them, and their weights never drift apart.
        """
        device = next(iter(self.layers.values())).weight.device
        dtype = self.half if op.itemsize < 4 else torch.float32
        bucket, method = torch.empty(op.numel, device=device, dtype=dtype), self.plan.method
        match op:
            case ReduceScales():
                messages.pack_scales(op, self._fresh, bucket)
                work = self.collective.all_reduce(bucket, op.ranks, op.name)
                return work, lambda: messages.unpack_scales(op, bucket, self._fresh)
            case ReduceFactors():
                messages.pack_factors(op, self._fresh, bucket)
                work = self.collective.all_reduce(bucket, op.ranks, op.name)
                return work, lambda: messages.unpack_factors(op, bucket, self._fresh)
            case ReduceSecondMoments():
                messages.pack_second_moments(op, self._fresh_second, bucket)
                work = self.collective.all_reduce(bucket, op.ranks, op.name)
                return work, lambda: messages.unpack_second_moments(op, bucket, self._fresh_second)
            case ShareDecompositions(root=root):
                if root == self.collective.rank:
                    messages.pack_decompositions(op, method, self.decompositions, bucket)
                work = self.collective.broadcast(bucket, root, op.ranks, op.name)
                return work, lambda: self._receive(
                    dict(messages.unpack_decompositions(op, method, bucket))
                )
            case ShareGradients(root=root):
                if root == self.collective.rank:
                    messages.pack_gradients(op, self._preconditioned, bucket)
                work = self.collective.broadcast(bucket, root, op.ranks, op.name)
                return work, lambda: messages.unpack_gradients(op, bucket, self._preconditioned)
        raise TypeError(op)

    def _compute_factor(self, spec: LayerSpec, factor: Factor, request: Request) -> None:
        """Scale the raw moment; its weight is the samples it stands for, 0 if it is unusable."""
        layer, new = self.layers[spec.name], request.collected.get(spec.name)
        if new is None:  # not used in this step, on this rank
            zeros = _zeros(spec.factor_shape(factor), layer.weight)
            self._fresh[spec.name, factor] = zeros, zeros.new_zeros(())
            return
        moment = new.a if factor == "A" else new.g
        moment *= self.scale(new.samples, new.rows / new.samples, layer.is_conv)[
            FACTORS.index(factor)
        ]
        if factor == "G":
            moment *= _square_of_inverse(request.loss_scale, new.samples)
        self._fresh[spec.name, factor] = self._only_finite(moment, new.samples)

    def _compute_second_moment(self, spec: LayerSpec, request: Request) -> None:
        """Scaled to be the product of A's and G's eigenvalues if a and g are independent."""
        layer, new = self.layers[spec.name], request.collected.get(spec.name)
        if new is None or new.second_moment is None:
            zeros = _zeros(spec.grad_shape, layer.weight)
            self._fresh_second[spec.name] = zeros, zeros.new_zeros(())
            return
        scale_a, scale_g = self.scale(new.samples, new.rows / new.samples, layer.is_conv)
        moment = new.second_moment * (scale_a * scale_g * new.rows)
        moment *= _square_of_inverse(request.loss_scale, new.samples)
        self._fresh_second[spec.name] = self._only_finite(moment, new.samples)

    def _only_finite(self, moment: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """The statistic and its weight; what is not finite must never enter an average."""
        finite = torch.isfinite(moment.sum())
        self.dropped = ~finite + (0 if self.dropped is None else self.dropped)
        return torch.where(finite, moment, torch.zeros_like(moment)), finite * float(samples)

    def _fold(self, decay: float) -> None:
        """Debiased running averages: F_k = sum decay^(k-i) f_i / sum decay^(k-i).

        Before the first statistic a factor is the identity. Second moments start anew with each
        eigenbasis, from the eigenvalues, which count as one statistic.
        """
        for key, (fresh, samples) in self._fresh.items():
            diagonal = self._spec(key[0]).diagonal(key[1])
            if key not in self.factors:
                self.keep_factor(key, _identity_like(fresh, diagonal))
                self.weights[key] = fresh.new_zeros(())
            weight, present = self.weights[key], samples > 0
            weight.copy_(torch.where(present, decay * weight + 1, weight))
            self.keep_factor(key, self.factor(key).lerp_(fresh, present / weight.clamp_min(1)))
        for name, (fresh, samples) in self._fresh_second.items():
            if name in self.second_moments:
                self.second_moments[name].lerp_(fresh, (samples > 0) * (1 - decay))
        self._fresh.clear()
        self._fresh_second.clear()

    def factor(self, key: tuple[str, Factor]) -> Tensor:
        """A running factor, at least fp32; the stored one itself if it is that."""
        return _dense(self.factors[key])

    def keep_factor(self, key: tuple[str, Factor], factor: Tensor) -> None:
        """Store a running factor."""
        self.factors[key] = self._stored(factor)

    def decomposition(self, key: tuple[str, Factor]) -> list[Tensor]:
        """A decomposition at least fp32: values and vectors, or the inverse, or a diagonal."""
        parts = self.decompositions[key]
        if self.half is None or len(parts) == 1:
            return list(parts)
        if self.plan.method == "inverse":
            return [_dense(parts)]
        return [parts[0], parts[1].float()]

    def keep_decomposition(self, key: tuple[str, Factor], parts: Sequence[Tensor]) -> None:
        """Store a decomposition: matrices in half precision, if that is asked for."""
        if self.half is None or parts[-1].ndim < 3:
            self.decompositions[key] = tuple(parts)
        elif self.plan.method == "inverse":
            self.decompositions[key] = self._stored(parts[0])
        else:
            self.decompositions[key] = parts[0], parts[1].to(self.half)

    def _stored(self, matrix: Tensor) -> Stored:
        """In half precision divided by its largest element: factors are tiny, inverses huge."""
        if self.half is None or matrix.ndim < 3:
            return (matrix,)
        size = matrix.abs().amax((-2, -1)).clamp_min(torch.finfo(matrix.dtype).tiny)
        return (matrix / size[:, None, None]).to(self.half), size

    def _spec(self, name: str) -> LayerSpec:
        return self.layers[name].spec

    def _decompose(self, members: Sequence[tuple[LayerSpec, Factor]], damping: float) -> None:
        keys = [(spec.name, factor) for spec, factor in members]
        if all(spec.diagonal(factor) for spec, factor in members):
            self._keep({key: self._decompose_diagonal(key, damping) for key in keys})
            return
        matrices = [self.factor(key) for key in keys]
        try:
            stack = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
            dampings = torch.cat(
                [
                    self._damping(k, damping).expand(len(m))
                    for k, m in zip(keys, matrices, strict=True)
                ]
            )
            done = self._decompose_dense(stack, dampings)
        except linalg.DecompositionError as error:
            if len(members) > 1:  # one bad matrix fails its whole batch: one by one
                for member in members:
                    self._decompose([member], damping)
                return
            self.failed_decompositions += 1
            log.warning("%s of %s: %s; the last good one stays", *reversed(keys[0]), error)
            if keys[0] in self.decompositions:
                return
            eye = _identity_like(matrices[0], diagonal=False)
            done = (eye,) if self.plan.method == "inverse" else (torch.ones_like(eye[..., 0]), eye)
        sizes = [len(m) for m in matrices]
        parts = zip(*(torch.split(x, sizes) for x in done), strict=True)
        self._keep(dict(zip(keys, parts, strict=True)))

    def _decompose_dense(self, stack: Tensor, damping: Tensor) -> Decomposition:
        if self.plan.method == "inverse":
            return (linalg.damped_inverse(stack, damping),)
        return linalg.eigendecompose(stack)

    def _decompose_diagonal(self, key: tuple[str, Factor], damping: float) -> Decomposition:
        diagonal = self.factor(key)
        if self.plan.method == "inverse":
            return (1 / (diagonal + self._damping(key, damping).unsqueeze(-1)),)
        return (diagonal.clone(),)

    def _damping(self, key: tuple[str, Factor], damping: float) -> Tensor:
        """What the inverse method adds to a factor, [groups] or []."""
        name, factor = key
        if not self.factored_damping:
            return self.weights[key].new_full((), damping)
        means = [self._mean_eigenvalue((name, f)) for f in FACTORS]
        return linalg.split_damping(means[0], means[1], damping)[FACTORS.index(factor)]

    def _mean_eigenvalue(self, key: tuple[str, Factor]) -> Tensor:
        matrix = self.factor(key)
        if self._spec(key[0]).diagonal(key[1]):
            return matrix.mean(-1)
        return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)

    def _keep(self, decompositions: Mapping[tuple[str, Factor], Decomposition]) -> None:
        """Store new decompositions; second moments in the old eigenbasis are of no use now."""
        for key, parts in decompositions.items():
            self.keep_decomposition(key, parts)
        self._drop_what_followed(name for name, _ in decompositions)

    def _receive(self, decompositions: Mapping[tuple[str, Factor], Decomposition]) -> None:
        """What was sent is in the precision it is stored in."""
        self.decompositions.update(decompositions)
        self._drop_what_followed(name for name, _ in decompositions)

    def _drop_what_followed(self, names: Iterable[str]) -> None:
        for name in names:
            self.second_moments.pop(name, None)
            for batch in [batch for batch in self._stacks if name in batch]:
                del self._stacks[batch]
        if self.plan.method == "ekfac":
            self.start_missing_second_moments()

    def start_missing_second_moments(self) -> None:
        """Where there is an eigenbasis: from its eigenvalues."""
        for name, layer in self.layers.items():
            a, g = (self.decompositions.get((name, f)) for f in FACTORS)
            if a is None or g is None or not has_second_moment(layer.spec, self.plan.method):
                continue
            if name not in self.second_moments:
                self.second_moments[name] = linalg.damped_eigenvalues(a[0], g[0], 0.0)

    def clear(self) -> None:
        """Forget everything, before a state is loaded."""
        for held in (
            self.factors,
            self.weights,
            self.second_moments,
            self.decompositions,
            self._stacks,
        ):
            held.clear()

    def eigenbasis(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Eigenvectors of A and G of a layer whose second moments are wanted."""
        if name not in self.second_moments:
            return None
        return self.decomposition((name, "A"))[1], self.decomposition((name, "G"))[1]

    def _precondition(self, specs: Sequence[LayerSpec], request: Request) -> None:
        if not specs:
            return
        grads = [request.grads[spec.name] for spec in specs]
        done = self._precondition_stack(specs, _stack(grads), request.damping)
        for spec, grad in zip(
            specs, torch.split(done, [spec.groups for spec in specs]), strict=True
        ):
            self._preconditioned[spec.name] = grad

    def _precondition_stack(
        self, specs: Sequence[LayerSpec], grad: Tensor, damping: float
    ) -> Tensor:
        """Gradients of layers of one shape, [layers groups, g_dim, a_dim]."""
        a, g = self._stack_decompositions(specs)
        if self.plan.method == "inverse":
            return linalg.precondition_inverse(grad, _dense(a), _dense(g))
        qa, qg = (d[1].to(d[0].dtype) if len(d) == 2 else None for d in (a, g))
        if specs[0].name in self.second_moments:
            values = _stack([self.second_moments[s.name] for s in specs]) + damping
        else:
            values = linalg.damped_eigenvalues(a[0], g[0], damping, factored=self.factored_damping)
        return linalg.precondition_eigen(grad, qa, qg, values)

    def _stack_decompositions(
        self, specs: Sequence[LayerSpec]
    ) -> tuple[Decomposition, Decomposition]:
        """Of A and of G; kept as one tensor each, of which the single ones are views."""
        names = tuple(spec.name for spec in specs)
        if len(names) == 1:
            return self.decompositions[names[0], "A"], self.decompositions[names[0], "G"]
        if names not in self._stacks:
            self._stacks[names] = self._stack_anew(specs)
        return self._stacks[names]

    def _stack_anew(self, specs: Sequence[LayerSpec]) -> tuple[Decomposition, Decomposition]:
        made = []
        for f in FACTORS:
            each = [self.decompositions[s.name, f] for s in specs]
            stacked = tuple(torch.cat(parts) for parts in zip(*each, strict=True))
            views = zip(*(torch.split(x, [s.groups for s in specs]) for x in stacked), strict=True)
            self.decompositions.update({(s.name, f): v for s, v in zip(specs, views, strict=True)})
            made.append(stacked)
        return made[0], made[1]


def _dense(stored: Stored) -> Tensor:
    if len(stored) == 1:
        return stored[0]
    return stored[0].to(stored[1].dtype) * stored[1][:, None, None]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _square_of_inverse(loss_scale: float | Tensor | None, samples: int) -> float | Tensor:
    scale = samples if loss_scale is None else loss_scale
    return 1 / (scale * scale)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Of a statistic's dtype: at least float32."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


def _identity_like(factor: Tensor, diagonal: bool) -> Tensor:
    if diagonal:
        return torch.ones_like(factor)
    return torch.diag_embed(torch.ones_like(factor[..., 0])).contiguous()
