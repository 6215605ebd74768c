"""Adam in the eigenbasis of a layer: its options, its moments, and the direction of an update.

``method="eigen_adam"`` of KFAC uses it in place of a division by damped eigenvalues. The gradient
workers of a layer keep its moments. docs/how-to/eigen_adam.md explains the rule,
docs/lab/parts_of_eigen_adam.md compares it with the literature.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kfac_bench.core.kernels import linalg
from kfac_bench.core.kfac_options import EigenAdamOptions

BFLOAT16_ROWS = 128
"""Rows of the smaller side from which bfloat16 saves time: on a CPU with AVX-512 BF16, its products
are 2 times as fast as those in float32 with 128 rows, and 4 times with 256 rows or more."""

FLOOR = 3000
"""Entries of a gradient below ``FLOOR`` roundings of their root mean square count less and less.
Rounding alone leaves about 10 roundings where a gradient is zero."""

LIFT = 0.02
"""Mean amount that :func:`separated` adds to eigenvalues, as a share of their mean."""

GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class AdamOptions:
    """The options of a parameter group, which schedules change."""

    lr: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True, slots=True)
class AdamRule:
    """The settings of :class:`.EigenAdam`, and the precision that suits the device."""

    betas: tuple[float, float]
    eps: float
    options: EigenAdamOptions
    has_bfloat16: bool = False
    """True if large float32 updates are orthogonalized and rotated back in bfloat16."""

    def dtype_of_orthogonalized(self, rows: int) -> torch.dtype:
        """Return the dtype in which a float32 update is orthogonalized; ``rows`` are the fewer."""
        is_large = self.has_bfloat16 and rows >= BFLOAT16_ROWS
        return torch.bfloat16 if is_large else torch.float32

    def limit(self, lr: float, fan_in: int) -> float | None:
        """Return the largest root mean square of a direction; None: there is no limit."""
        clip = self.options["update_clip"]
        if clip is None or lr == 0:
            return None
        return clip / (abs(lr) * math.sqrt(fan_in))


@dataclass(slots=True)
class AdamMoments:
    """Adam's moments of layers of one shape, in their eigenbases: [layers * groups, g_dim, a_dim].

    Attributes:
        first: Running mean of the rotated gradients, not debiased.
        second: Running mean of their squares, not debiased.
        skipped: How many of ``steps`` gradients were not finite, [layers * groups, 1, 1].
        steps: Number of gradients, with those that were skipped.
    """

    first: Tensor
    second: Tensor
    skipped: Tensor
    steps: int = 0

    @classmethod
    def start(cls, grad: Tensor) -> Self:
        """Return the moments before the first gradient."""
        return cls(
            torch.zeros_like(grad), torch.zeros_like(grad), torch.zeros_like(grad[:, :1, :1])
        )

    def take_up(self, rotated: Tensor, rule: AdamRule) -> None:
        """Update the moments with gradients in the eigenbasis; the caller counts the step."""
        beta1, beta2 = rule.betas
        self.first.lerp_(rotated, 1 - beta1)
        self.second.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)

    def take_up_finite(self, rotated: Tensor, rule: AdamRule) -> None:
        """Update the moments of layers whose gradients are finite, and count the others as skipped.

        A GradScaler skips the update if a gradient overflowed, but nobody knows that on the host
        yet.
        """
        is_finite = rotated.sum((-2, -1), keepdim=True).isfinite()
        before = self.first.clone(), self.second.clone()
        self.take_up(rotated, rule)
        for moment, old in zip((self.first, self.second), before, strict=True):
            moment.copy_(torch.where(is_finite, moment, old))
        self.skipped.add_(is_finite.logical_not())

    def change_basis(self, old: Tensor, new: Tensor, *, is_a: bool) -> None:
        """Express both moments in a new basis of A or of G, in place.

        The first moment M becomes M C, with the change of basis C = old^T new (for G: C^T M). The
        second moment V becomes V (C * C), with elementwise squares: exactly so if the entries of
        the gradient are uncorrelated in the old basis. SOAP keeps V as it is (Vyas et al. 2024).

        Args:
            old: The eigenvectors so far, [groups, n, n].
            new: The eigenvectors from now on.
            is_a: Whether these are the eigenvectors of A; otherwise of G.
        """
        change = old.mT @ new
        self.first.copy_(self.first @ change if is_a else change.mT @ self.first)
        self.second.copy_(linalg.change_basis_of_squares(self.second, change, is_a=is_a))


def separated(factor: Tensor) -> Tensor:
    """Return a factor [..., n, n] whose eigenvectors do not depend on rounding errors.

    Of eigenvalues that are equal, or far below the largest one, rounding errors choose the
    eigenvectors. So different numbers are added to the diagonal: 0.5 to 1.5 times ``LIFT`` times
    its mean, which is the mean eigenvalue. Larger numbers would change the eigenvectors that count:
    with 0.03 of the largest element, the autoencoder of digits needs 1.1x more steps.
    """
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    index = torch.arange(factor.shape[-1], device=factor.device, dtype=factor.dtype)
    # Multiples of the golden ratio modulo 1 are spread evenly, and neighbours are far apart.
    numbers = (index * GOLDEN).remainder_(1.0).add_(0.5)
    lifted = factor.clone()
    lifted.diagonal(dim1=-2, dim2=-1).add_(LIFT * diagonal.mean(-1, keepdim=True) * numbers)
    return lifted


def direction(
    grad: Tensor,
    a: Tensor | None,
    g: Tensor | None,
    moments: AdamMoments,
    rule: AdamRule,
    *,
    is_orthogonalized: bool,
    limit: float | None = None,
    is_scaled: bool = False,
) -> Tensor:
    """Return the direction that the learning rate multiplies, [layers * groups, g_dim, a_dim].

    The tensors of ``moments`` take up the gradients; the caller counts the step.

    R = G^T grad A is the gradient in the eigenbasis. With Nesterov's momentum, only the old part of
    the first moment is debiased; then D = U / (S + f^2 / S) with S = sqrt(V) + eps, and the result
    is ``scale`` times G D A^T. f is ``FLOOR`` roundings of the root mean square of all S of the
    layer: without it, Adam would divide rounding errors by rounding errors where the gradient is
    zero. If ``is_orthogonalized``, the singular values of D are moved towards 1 instead, and D
    is multiplied by ``orthogonal_scale * sqrt(max(g_dim, a_dim))``. Update clipping then shrinks
    results whose root mean square is above ``limit``.

    Args:
        grad: The gradients.
        a: Eigenvectors of A, [layers * groups, a_dim, a_dim]. None is the identity.
        g: Eigenvectors of G, [layers * groups, g_dim, g_dim]. None is the identity.
        moments: Those of these layers.
        rule: The options.
        is_orthogonalized: Whether these layers are hidden ones.
        limit: See :meth:`AdamRule.limit`.
        is_scaled: Whether there is a loss scale, so that gradients may have overflowed.
    """
    beta1, beta2 = rule.betas
    rotated = linalg.rotate(grad, a, g)
    first, second = moments.first, moments.second
    step: int | Tensor = moments.steps + 1
    if is_scaled:
        moments.take_up_finite(rotated, rule)
        step = step - moments.skipped
    else:
        moments.take_up(rotated, rule)
    # Debiasing the new gradient as well would double the first steps.
    old_part = beta1 / (1 - beta1**step)
    debias = (1 - beta2**step) ** -0.5
    update = (first * old_part).add_(rotated, alpha=1 - beta1)
    root = second.sqrt().mul_(debias).add_(rule.eps)
    square = (FLOOR * torch.finfo(root.dtype).eps * debias) ** 2
    update.div_(root.add_(second.mean((-2, -1), keepdim=True).mul_(square) / root))
    back_a, back_g = None if a is None else a.mT, None if g is None else g.mT
    if is_orthogonalized:
        update = orthogonalize_and_rotate(update, back_a, back_g, rule)
    else:
        update = linalg.rotate(update.mul_(rule.options["scale"]), back_a, back_g)
    return update if limit is None else linalg.clip_root_mean_square(update, limit)


def orthogonalize_and_rotate(
    update: Tensor, a: Tensor | None, g: Tensor | None, rule: AdamRule
) -> Tensor:
    """Return g^T X a; X is ``update`` with its singular values moved towards 1, and scaled."""
    steps = rule.options["orthogonal_steps"]
    scale = rule.options["orthogonal_scale"] * max(update.shape[-2:]) ** 0.5
    dtype = rule.dtype_of_orthogonalized(min(update.shape[-2:]))
    if update.dtype == torch.float32 and dtype == torch.bfloat16:
        # The singular values of X are about equal, so rounding changes no direction by much. Not so
        # the gradient: in some directions it is far smaller than in others, so float32 rotates it.
        x = linalg.orthogonalize(update, steps, torch.bfloat16)
        a, g = (None if basis is None else basis.bfloat16() for basis in (a, g))
        return linalg.rotate(x, a, g).to(update.dtype).mul_(scale)
    # P acts on the smaller side, so it joins the rotation of that side.
    if update.shape[-2] <= update.shape[-1]:
        p = linalg.orthogonalizer(torch.bmm(update, update.mT), steps).mul_(scale)
        return linalg.rotate(update, a, p if g is None else torch.bmm(p.mT, g))
    p = linalg.orthogonalizer(torch.bmm(update.mT, update), steps).mul_(scale)
    return linalg.rotate(update, p if a is None else torch.bmm(p, a), g)
