"""K-FAC's linear algebra: functions of tensors to tensors, nothing else.

Shapes: a factor is [n, n], symmetric positive semi-definite; a layer's gradient is
[g_dim, a_dim], weight and bias side by side. Equation numbers are those of "Deep Neural Network
Training With Distributed K-FAC" (TPDS 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Eigen = tuple[Tensor, Tensor]
"""Eigenvalues [n], not negative, and eigenvectors [n, n] in columns."""


class DecompositionError(RuntimeError):
    """A factor could not be decomposed, in its own precision or in float64."""


def eigendecompose(factor: Tensor) -> Eigen:
    """Factor = Q diag(v) Q^T; rounding's negative eigenvalues are clamped to 0.

    eigh may raise, or return NaN without raising: both are retried in float64. Raises
    :class:`DecompositionError` if that fails too.
    """
    if torch.isfinite(factor.sum()):
        for dtype in (factor.dtype, torch.float64):
            try:
                values, vectors = torch.linalg.eigh(factor.to(dtype))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                continue
            if torch.isfinite(values.sum() + vectors.sum()):
                values = values.clamp_(min=0.0).to(factor.dtype)
                # eigh returns columns side by side: one layout, so one set of bits, on all ranks
                return values, vectors.to(factor.dtype).contiguous()
    raise DecompositionError(f"eigh of a [{len(factor)}, {len(factor)}] factor failed")


def damped_inverse(factor: Tensor, damping: float) -> Tensor:
    """(factor + damping I)^-1 by Cholesky (eq. 9), [n, n].

    Retried in float64; raises :class:`DecompositionError` if that fails too.
    """
    if torch.isfinite(factor.sum()):
        for dtype in (factor.dtype, torch.float64):
            damped = factor.to(dtype, copy=True)
            damped.diagonal().add_(damping)
            lower, info = torch.linalg.cholesky_ex(damped)
            if info == 0 and (inverse := torch.cholesky_inverse(lower)).isfinite().all():
                return inverse.to(factor.dtype).contiguous()
    raise DecompositionError(f"Cholesky of a [{len(factor)}, {len(factor)}] factor failed")


def precondition_eigen(grad: Tensor, a: Eigen, g: Eigen, damping: float) -> Tensor:
    """(G kron A + damping I)^-1 vec(grad) as [g_dim, a_dim]: rotate, divide, rotate back.

    Eq. 11-13; exact Tikhonov damping of the Kronecker product.
    """
    (values_a, vectors_a), (values_g, vectors_g) = a, g
    rotated = vectors_g.mT @ grad @ vectors_a
    rotated /= torch.outer(values_g, values_a).add_(damping)
    return vectors_g @ rotated @ vectors_a.mT


def precondition_inverse(grad: Tensor, a_inverse: Tensor, g_inverse: Tensor) -> Tensor:
    """(G + damping I)^-1 grad (A + damping I)^-1, eq. 10."""
    return g_inverse @ grad @ a_inverse


def kl_clip_scale(
    preconditioned: Sequence[Tensor], grads: Sequence[Tensor], lrs: Sequence[float], kl_clip: float
) -> Tensor:
    """Nu = min(1, sqrt(kl_clip / sum_i lr_i^2 |<preconditioned_i, grad_i>|)), eq. 16.

    A 0-d tensor on the gradients' device: nothing waits for it.
    """
    products = torch.stack(
        [(p * g).sum().abs() * lr**2 for p, g, lr in zip(preconditioned, grads, lrs, strict=True)]
    )
    return (kl_clip / products.sum()).sqrt().clamp_max(1.0)  # kl_clip / 0 is inf: no clip


def pack_triangle(x: Tensor, out: Tensor) -> None:
    """Symmetric [n, n] into ``out`` [n (n + 1) / 2].

    Rectangular full packed format (Gustavson et al. 2010): the lower triangle of the left half
    and, in the corner it leaves free, that of the right half. Slices only: an index of the
    triangle would weigh twice the matrix it saves.
    """
    n, k = len(x), len(x) // 2
    if n % 2:
        rect = out.view(n, k + 1)
        rect.copy_(x[:, : k + 1]).tril_()
        rect[:k, 1:] += x[k + 1 :, k + 1 :].triu()
    else:
        rect = out.view(n + 1, k)
        rect[0].zero_()
        rect[1:].copy_(x[:, :k]).tril_()
        rect[:k] += x[k:, k:].triu()


def unpack_triangle(packed: Tensor, n: int) -> Tensor:
    """The symmetric [n, n] that :func:`pack_triangle` packed, a fresh tensor."""
    k, odd = n // 2, n % 2
    x = packed.new_empty(n, n)
    rect = packed.view(n, k + 1) if odd else packed.view(n + 1, k)
    left = (rect if odd else rect[1:]).tril()
    m = k + odd  # columns of the left half
    x[:, :m] = left
    x[:m, :m] += left[:m].tril(-1).mT
    x[:m, m:] = left[m:].mT
    if k:
        right = (rect[:k, 1:] if odd else rect[:k]).triu()
        x[m:, m:] = right + right.triu(1).mT
    return x
