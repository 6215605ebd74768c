"""KL-Shampoo and KL-SOAP, after the equations of Lin et al., arXiv 2509.03378.

Both approximate the second moment of the gradient of a weight by a Kronecker product of S_a and S_b
that minimizes a Kullback-Leibler divergence. With the gradient G [m, n], each step does::

    S_a <- (1 - b) S_a + b / n  G   S_b^-1 G^T      b = 1 - beta2
    S_b <- (1 - b) S_b + b / m  G^T S_a^-1 G        (both with the factors of the last step)

With eigenbases Q_a, Q_b and the running first moment M of the gradient, the update is

* KL-Shampoo: ``S_a^-1/2 M S_b^-1/2``,
* KL-SOAP: Adam on the rotated gradient ``Q_a^T G Q_b``, rotated back (the first step is
  KL-Shampoo's).

The eigenvalues that S^-1 and S^-1/2 use are running averages in the present basis, as in the paper.
The basis is decomposed exactly at the first step. Every ``precondition_freq`` steps it takes one QR
step.

What the paper leaves open, or what differs from it:

* S_a and S_b start at the root mean square of the first gradient, times the identity: the best
  multiple of the identity in the same divergence. So the size of the loss does not matter, as with
  Adam, and the first step is an ordinary step.
* Both moments have Adam's bias correction. The factors have a correction, too: the weight of step
  t's gradient is max(b, 1 / (t + 1)), so the start counts as one gradient among t + 1 until 1 / b
  steps are done. ``correct_bias=False`` always uses b, as the paper does. Then the start has the
  weight beta2^t, and directions with small gradients are slow for the first 1 / b steps.
* Weights of more than two dimensions are flattened to [out, in * k * k].
* Vectors are updated by Adam with the same settings.
* A side larger than ``max_dim`` keeps the standard basis and a diagonal factor.
* Eigenvalues below ``floor`` times their mean count as that, so that directions without gradients
  do not blow up the other factor.
* The state and the updates of weights in half precision are float32: torch decomposes no matrices
  in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.contest.kl_factor import KLFactor
from kfac_bench.config.groups import ParameterGroup
from kfac_bench.config.options import RESULT, option
from kfac_bench.optimizers.first_order_options import MomentsConfig

if TYPE_CHECKING:
    from torch import nn

State = dict[str, Any]
"""The state of one parameter."""


class KLOptimizer(Optimizer):
    """The common part of KL-Shampoo and KL-SOAP: factors, bases, momentum, decay and vectors."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.003,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        precondition_freq: int = 10,
        max_dim: int = 10000,
        floor: float = 1e-6,
        exact: bool = False,
        correct_bias: bool = True,
    ) -> None:
        """Take the parameters and the settings; each setting may differ between groups.

        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            betas: Decay of the first moment; decay of the factors and of second moments.
            eps: Added to the denominator.
            weight_decay: Decoupled weight decay, times the learning rate.
            nesterov: Whether the update uses ``beta1 M + (1 - beta1) G`` instead of the first
                moment M.
            precondition_freq: Steps between updates of the eigenbases.
            max_dim: The largest side of a weight that gets an eigenbasis.
            floor: Smallest eigenvalue of a factor that counts, as a share of their mean.
            exact: Whether bases come from an eigendecomposition each time, not from a QR step.
            correct_bias: Whether the factors soon forget their start.
        """
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "precondition_freq": precondition_freq,
            "max_dim": max_dim,
            "floor": floor,
            "exact": exact,
            "correct_bias": correct_bias,
        }
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Raises:
            ValueError: A gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None and p.numel()]
            if any(p.grad.is_sparse or p.is_complex() for p in trained):
                raise ValueError(
                    f"{type(self).__name__} cannot update weights with sparse or complex "
                    "gradients. Use dense real weights."
                )
            self._step_vectors(group, [p for p in trained if p.ndim < 2])
            for p in trained:
                if p.ndim >= 2:
                    self._step_matrix(group, p)
        return loss

    def _step_vectors(self, group: dict[str, Any], vectors: list[Tensor]) -> None:
        """Update biases and other vectors by Adam."""
        for p in vectors:
            state, gradient = self.state[p], _gradient(p)
            if not state:
                zeros = torch.zeros_like(gradient)
                state.update(step=0, momentum=zeros, square=zeros.clone())
            state["step"] += 1
            moment = _first_moment(group, state, gradient)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(_adam(group, state, gradient, moment), alpha=group["lr"])

    def _step_matrix(self, group: dict[str, Any], p: Tensor) -> None:
        """Update a weight of two or more dimensions."""
        gradient = _gradient(p).reshape(len(p), -1)
        state = self.state[p]
        left, right = _factors(group, state, gradient)
        state["step"] += 1
        scale = gradient.square().mean().sqrt()
        left.fill(scale)
        right.fill(scale)
        rotated = _rotate(gradient, left.basis, right.basis)
        _update_factors(group, state["step"], left, right, rotated)
        if state["step"] == 1 or state["step"] % group["precondition_freq"] == 0:
            exact = group["exact"] or state["step"] == 1
            rotated = _refresh(state, left, right, rotated, exact=exact)
        moment = _first_moment(group, state, rotated)
        update = self._direction(group, state, (left, right), rotated, moment)
        back = [None if f.basis is None else f.basis.mT for f in (left, right)]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(_rotate(update, *back).view_as(p), alpha=group["lr"])

    def load_state_dict(self, state_dict: State) -> None:
        """Take over a state; its tensors stay in their own precision."""
        super().load_state_dict(state_dict)
        # torch has rounded the tensors to the precision of the weights.
        saved = (i for group in state_dict["param_groups"] for i in group["params"])
        params = (p for group in self.param_groups for p in group["params"])
        for i, p in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][name] = value.to(p.device, copy=True)

    def _direction(
        self,
        group: dict[str, Any],
        state: State,
        factors: tuple[KLFactor, KLFactor],
        rotated: Tensor,
        moment: Tensor,
    ) -> Tensor:
        """Return the update [m, n] in the eigenbases, before the learning rate.

        Args:
            group: The settings.
            state: The state of the weight.
            factors: S_a and S_b.
            rotated: The gradient in the eigenbases [m, n].
            moment: The first moment in the eigenbases [m, n], with its bias corrected.
        """
        raise NotImplementedError


class KLShampoo(KLOptimizer):
    """KL-Shampoo: the first moment times the inverse square root of both factors."""

    def _direction(
        self,
        group: dict[str, Any],
        state: State,
        factors: tuple[KLFactor, KLFactor],
        rotated: Tensor,
        moment: Tensor,
    ) -> Tensor:
        return _whiten(group, factors, moment)


class KLSOAP(KLOptimizer):
    """KL-SOAP: Adam in the eigenbases of KL-Shampoo's factors."""

    def _direction(
        self,
        group: dict[str, Any],
        state: State,
        factors: tuple[KLFactor, KLFactor],
        rotated: Tensor,
        moment: Tensor,
    ) -> Tensor:
        if "square" not in state:
            state["square"] = torch.zeros_like(rotated)
        update = _adam(group, state, rotated, moment)
        # The first gradient is diagonal in its own eigenbases. Adam would bring the rounding errors
        # beside the diagonal to the size of the diagonal.
        return _whiten(group, factors, moment) if state["step"] == 1 else update


def _gradient(p: Tensor) -> Tensor:
    """Return the gradient of a parameter in at least float32."""
    assert p.grad is not None
    return p.grad.to(torch.promote_types(p.grad.dtype, torch.float32))


def _factors(group: dict[str, Any], state: State, gradient: Tensor) -> tuple[KLFactor, KLFactor]:
    """Return S_a and S_b, whose tensors are in the state."""
    sides = ("left", "right")
    if not state:
        state.update(step=0, momentum=torch.zeros_like(gradient))
        for side, size in zip(sides, gradient.shape, strict=True):
            factor = KLFactor.start(size, gradient, group["max_dim"])
            state[f"{side}_factor"] = factor.matrix
            if factor.basis is not None:
                state[f"{side}_basis"] = factor.basis
    left, right = (KLFactor(state[f"{s}_factor"], state.get(f"{s}_basis")) for s in sides)
    return left, right


def _rotate(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Return left^T x right [m, n]; None is the identity."""
    if left is not None:
        x = left.mT @ x
    return x if right is None else x @ right


def _update_factors(
    group: dict[str, Any], step: int, left: KLFactor, right: KLFactor, rotated: Tensor
) -> None:
    """Update S_a and S_b from the rotated gradient, both with the other's last value."""
    decay = group["betas"][1]
    if group["correct_bias"]:
        decay = min(decay, step / (step + 1))
    left_root, right_root = (f.eigenvalues(group["floor"]).rsqrt() for f in (left, right))
    left.update(rotated * right_root, decay)
    right.update(rotated.mT * left_root, decay)


def _refresh(
    state: State, left: KLFactor, right: KLFactor, rotated: Tensor, *, exact: bool
) -> Tensor:
    """Move both factors, the momentum and the rotated gradient to new eigenbases.

    KL-SOAP's second moments keep their values, in the new order of the eigenvectors, as in SOAP.
    """
    turns: list[Tensor | None] = [None, None]
    for side, factor in enumerate((left, right)):
        moved = factor.refresh(exact=exact)
        if moved is not None:
            turns[side], order = moved
            if "square" in state:
                state["square"] = state["square"].index_select(side, order)
    state["momentum"] = _rotate(state["momentum"], *turns)
    return _rotate(rotated, *turns)


def _whiten(group: dict[str, Any], factors: tuple[KLFactor, KLFactor], moment: Tensor) -> Tensor:
    """Return S_a^-1/2 M S_b^-1/2 [m, n] in the eigenbases."""
    left, right = (f.eigenvalues(group["floor"]).sqrt() for f in factors)
    update: Tensor = moment / (torch.outer(left, right) + group["eps"])
    return update


def _first_moment(group: dict[str, Any], state: State, gradient: Tensor) -> Tensor:
    """Update the first moment; return it with its bias corrected, or Nesterov's mixture."""
    beta = group["betas"][0]
    moment: Tensor = state["momentum"].lerp_(gradient, 1 - beta) / (1 - beta ** state["step"])
    return moment.lerp(gradient, 1 - beta) if group["nesterov"] else moment


def _adam(group: dict[str, Any], state: State, gradient: Tensor, moment: Tensor) -> Tensor:
    """Return Adam's update and update the second moment."""
    beta = group["betas"][1]
    square: Tensor = state["square"].mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
    root = square.sqrt().div_(math.sqrt(1 - beta ** state["step"]))
    return moment / root.add_(group["eps"])


@dataclass
class KLShampooConfig(MomentsConfig):
    """KL-Shampoo; vectors are updated by Adam, convolutions as matrices [out, in * k * k].

    ``beta2`` is the decay of the factors, and of Adam's second moments. ``eps`` is added to the
    roots of the factors' eigenvalues.
    """

    is_elementwise: ClassVar[bool] = False
    fits_dtensors: ClassVar[bool] = False

    nesterov: bool = option(
        False, "mix the gradient into the first moment, as Nesterov's momentum does", RESULT
    )
    precondition_freq: int = option(10, "steps between QR steps of eigenbases", RESULT, at_least=1)
    max_dim: int = option(
        10000, "largest side of a weight that gets an eigenbasis", RESULT, at_least=1
    )

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        """Return the optimizer; see :class:`kfac_bench.config.groups.OptimizerConfig`."""
        return KLShampoo(groups, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the settings that KL-Shampoo and KL-SOAP share."""
        return {
            **super().settings(),
            "nesterov": self.nesterov,
            "precondition_freq": self.precondition_freq,
            "max_dim": self.max_dim,
        }


@dataclass
class KLSOAPConfig(KLShampooConfig):
    """KL-SOAP; vectors are updated by Adam, convolutions as matrices [out, in * k * k].

    ``beta2`` is the decay of the factors and of the second moments. ``eps`` is added to the root of
    the second moments.
    """

    def build(self, groups: list[ParameterGroup], model: nn.Module) -> Optimizer:
        """Return the optimizer; see :class:`kfac_bench.config.groups.OptimizerConfig`."""
        return KLSOAP(groups, **self.settings())
