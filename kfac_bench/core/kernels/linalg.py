"""The linear algebra of K-FAC, as functions from tensors to tensors.

A factor is [groups, n, n], symmetric and positive semi-definite, or [groups, n] if it is diagonal.
The gradient of a layer is [groups, g_dim, a_dim], with weight and bias side by side. Equation
numbers are those of "Deep Neural Network Training With Distributed K-FAC" (TPDS 2022).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class DecompositionError(RuntimeError):
    """A factor could be decomposed neither in its own precision nor in float64."""


def eigendecompose(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return v [..., n] and Q [..., n, n] with factor = Q diag(v) Q^T.

    Rounding can make eigenvalues negative; they become 0. eigh may raise an error, or return NaN
    without an error. Both cases are tried again in float64.

    Raises:
        DecompositionError: float64 failed too.
    """
    if torch.isfinite(factor.sum()):
        # float64 is slow, and rarely needed: only after a failure.
        for dtype in (factor.dtype, torch.float64):
            try:
                values, vectors = torch.linalg.eigh(factor.to(dtype))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                continue
            if torch.isfinite(values.sum() + vectors.sum()):
                values = values.clamp_(min=0.0).to(factor.dtype)
                # eigh returns columns side by side: one layout, so one set of bits, on all ranks
                return values, vectors.to(factor.dtype).contiguous()
    raise DecompositionError(f"eigh of a {list(factor.shape)} factor failed")


def damped_inverse(factor: Tensor, damping: float | Tensor) -> Tensor:
    """Return (factor + damping I)^-1 of a factor [..., n, n], by Cholesky (eq. 9).

    ``damping`` is a number or a tensor [...]. A failure is tried again in float64.

    Raises:
        DecompositionError: float64 failed too.
    """
    if isinstance(damping, Tensor) and damping.ndim:
        damping = damping.unsqueeze(-1)
    if torch.isfinite(factor.sum()):
        for dtype in (factor.dtype, torch.float64):
            damped = factor.to(dtype, copy=True)
            damped.diagonal(dim1=-2, dim2=-1).add_(damping)
            lower, info = torch.linalg.cholesky_ex(damped)
            if not info.any() and (inverse := torch.cholesky_inverse(lower)).isfinite().all():
                return inverse.to(factor.dtype).contiguous()
    raise DecompositionError(f"Cholesky of a {list(factor.shape)} factor failed")


def split_damping(mean_a: Tensor, mean_g: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """Split the damping: A gets pi sqrt(damping), G gets sqrt(damping) / pi.

    pi^2 = mean_a / mean_g, where the means are mean eigenvalues: the trace of a factor divided by
    its size. This is the "factored Tikhonov" damping of Martens & Grosse 2015 (section 6.3). If a
    trace is 0, pi is 1.
    """
    # Roots first: mean_a / mean_g may overflow float32.
    pi = mean_a.sqrt() / mean_g.sqrt()
    pi = torch.where((mean_a > 0) & (mean_g > 0), pi, torch.ones_like(pi))
    root = damping**0.5
    return pi * root, root / pi


def damped_eigenvalues(
    a: Tensor, g: Tensor, damping: float | Tensor, *, factored: bool = False
) -> Tensor:
    """Return the eigenvalues of the damped G kron A, [..., g_dim, a_dim].

    They are v_g v_a + damping (eq. 12), or with ``factored`` (v_g + dg) (v_a + da), where da and dg
    come from :func:`split_damping`. ``a`` is [..., a_dim] and ``g`` is [..., g_dim].
    """
    if factored:
        da, dg = split_damping(a.mean(-1), g.mean(-1), damping)
        a, g, damping = a + da.unsqueeze(-1), g + dg.unsqueeze(-1), 0.0
    return (g.unsqueeze(-1) * a.unsqueeze(-2)).add_(damping)


def rotate(x: Tensor, a: Tensor | None, g: Tensor | None) -> Tensor:
    """Return g^T x a of x [..., g_dim, a_dim]. None stands for the identity."""
    if g is not None:
        x = g.mT @ x
    return x if a is None else x @ a


def precondition_eigen(
    grad: Tensor, a: Tensor | None, g: Tensor | None, eigenvalues: Tensor
) -> Tensor:
    """Rotate ``grad`` [..., g_dim, a_dim] into the eigenbasis, divide, rotate back (eq. 11-13).

    ``a`` and ``g`` are eigenvectors, None for a diagonal factor. ``eigenvalues`` are damped.
    """
    rotated = rotate(grad, a, g)
    # Not in place: without eigenvectors, ``rotated`` is still the gradient of the caller.
    scaled = rotated / eigenvalues
    return rotate(scaled, None if a is None else a.mT, None if g is None else g.mT)


def precondition_inverse(grad: Tensor, a_inverse: Tensor, g_inverse: Tensor) -> Tensor:
    """Return (G + damping I)^-1 grad (A + damping I)^-1, eq. 10; a diagonal inverse is [..., n]."""
    dense_a, dense_g = a_inverse.ndim == grad.ndim, g_inverse.ndim == grad.ndim
    out = g_inverse @ grad if dense_g else grad * g_inverse.unsqueeze(-1)
    return out @ a_inverse if dense_a else out * a_inverse.unsqueeze(-2)


def kl_clip_sum(dots: Iterable[Tensor], lrs: Sequence[float]) -> Tensor:
    """Return the sum over layers of lr^2 |<preconditioned gradient, gradient>| (eq. 16).

    The result is a 0-d tensor on the device, so that nothing waits for it. ``dots`` are the
    products of the layers, ``lrs`` their learning rates.
    """
    return torch.stack([dot.abs() * lr**2 for dot, lr in zip(dots, lrs, strict=True)]).sum()


def kl_clip_scale(change: Tensor, kl_clip: float) -> Tensor:
    """Return nu = min(1, sqrt(kl_clip / change)) (eq. 16), with the sum of all layers."""
    # Without a change the quotient is inf, and nu is 1: no clip.
    return (kl_clip / change).sqrt().clamp_max(1.0)


def pack_triangle(x: Tensor, out: Tensor) -> None:
    """Write the triangles of symmetric ``x`` [b, n, n] into ``out`` [b n (n + 1) / 2].

    The format is rectangular full packed (Gustavson et al. 2010). It holds the lower triangle of
    the left half and, in the corner that stays free, the lower triangle of the right half. It needs
    only slices. An index tensor of the triangle would need twice the memory of the matrix.
    """
    b, n = x.shape[:2]
    k = n // 2
    if n % 2:
        rect = out.view(b, n, k + 1)
        rect.copy_(x[..., : k + 1]).tril_()
        rect[:, :k, 1:] += x[:, k + 1 :, k + 1 :].triu()
    else:
        rect = out.view(b, n + 1, k)
        rect[:, 0].zero_()
        rect[:, 1:].copy_(x[..., :k]).tril_()
        rect[:, :k] += x[:, k:, k:].triu()


def unpack_triangle(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the symmetric [b, n, n] that :func:`pack_triangle` packed, as a new tensor."""
    b, n, _ = shape
    k, odd = n // 2, n % 2
    x = packed.new_empty(shape)
    rect = packed.view(b, n, k + 1) if odd else packed.view(b, n + 1, k)
    left = (rect if odd else rect[:, 1:]).tril()
    m = k + odd  # columns of the left half
    x[..., :m] = left
    x[:, :m, :m] += left[:, :m].tril(-1).mT
    x[:, :m, m:] = left[:, m:].mT
    if k:
        right = (rect[:, :k, 1:] if odd else rect[:, :k]).triu()
        x[:, m:, m:] = right + right.triu(1).mT
    return x
