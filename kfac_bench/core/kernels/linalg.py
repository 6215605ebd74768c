"""The linear algebra of K-FAC, as functions from tensors to tensors.

A factor is [groups, n, n], symmetric and positive semi-definite, or [groups, n] if it is diagonal.
The gradient of a layer is [groups, g_dim, a_dim], with weight and bias side by side. Equation
numbers are those of "Deep Neural Network Training With Distributed K-FAC" (TPDS 2022).
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_bench.core.kernels.gram import Blocks, left_times, times, transposed

SHIFT = 1e-6
"""Part of the mean eigenvalue that a second try of eigh adds to the diagonal."""


ONE_BY_ONE = 1024
"""Rows from which a GPU inverts the matrices of a batch one by one: together, three matrices of
4608 rows took twice as long on an H100."""


class DecompositionError(RuntimeError):
    """A factor could be decomposed neither in its own precision nor in float64."""


def eigendecompose(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return v [..., n] and Q [..., n, n] with factor = Q diag(v) Q^T.

    Rounding can make eigenvalues negative; they become 0. Rows of zeros are left out, because eigh
    often fails on them and the work grows with n^3. Each of them has eigenvalue 0 and a unit vector
    as eigenvector. Dead units make rows of zeros, and so do kernel offsets that meet only padding.

    Raises:
        DecompositionError: eigh failed in every way that :func:`_eigh` tries.
    """
    is_nonzero = _nonzero_rows(factor, "eigh")
    if is_nonzero.all():
        return _eigh(factor)
    if factor.ndim > 2:  # the matrices of a batch may have different rows of zeros
        each = [eigendecompose(matrix) for matrix in factor]
        return torch.stack([v for v, _ in each]), torch.stack([q for _, q in each])
    rows, zeros = is_nonzero.nonzero().squeeze(-1), (~is_nonzero).nonzero().squeeze(-1)
    # Eigenvalues ascend, so those of the zero rows come first.
    values, vectors = factor.new_zeros(len(factor)), torch.zeros_like(factor)
    first = len(zeros)
    vectors[zeros, torch.arange(first, device=factor.device)] = 1.0
    values[first:], vectors[rows, first:] = _eigh(factor[rows][:, rows])
    return values, vectors


def _nonzero_rows(factor: Tensor, algorithm: str) -> Tensor:
    """Return a mask of the rows of a factor that have an element other than 0, [..., n].

    Raises:
        DecompositionError: An element is not finite.
    """
    if not torch.isfinite(factor.sum()):
        raise DecompositionError(f"{algorithm} of a {list(factor.shape)} factor that is not finite")
    return factor.any(-1)


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`eigendecompose` for a factor without rows of zeros.

    eigh may raise an error, or return NaN without an error. A shift of the eigenvalues, which is
    subtracted afterwards, helps in both cases: its error is of the size of float32's rounding.
    Without success the same is tried in float64.
    """
    mean = factor.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    for dtype, part in itertools.product(_precisions(factor), (0.0, SHIFT)):
        shift = part * mean
        try:
            matrix = _add_diagonal(factor, shift, dtype) if part else factor.to(dtype)
            values, vectors = torch.linalg.eigh(matrix)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if torch.isfinite(values.sum() + vectors.sum()):
            values = (values - shift).clamp_(min=0.0).to(factor.dtype)
            # eigh returns columns side by side: one layout, so one set of bits, on all ranks
            return values, vectors.to(factor.dtype).contiguous()
    raise DecompositionError(f"eigh of a {list(factor.shape)} factor failed")


def damped_inverse(factor: Tensor, damping: float | Tensor) -> Tensor:
    """Return (factor + damping I)^-1 of a factor [..., n, n], by Cholesky (eq. 9).

    ``damping`` is a number or a tensor [...]. Rows of zeros are left out; the inverse has
    1 / damping on their diagonal.

    Raises:
        DecompositionError: Cholesky failed in the precision of the factor and in float64.
    """
    is_nonzero = _nonzero_rows(factor, "Cholesky")
    dampings = torch.as_tensor(damping, dtype=factor.dtype, device=factor.device)
    dampings = dampings.expand(factor.shape[:-2])
    is_batch = factor.ndim > 2
    is_slow = is_batch and factor.is_cuda and factor.shape[-1] >= ONE_BY_ONE and len(factor) > 1
    if not is_slow and is_nonzero.all():
        return _cholesky_inverse(factor, dampings)
    if is_batch:
        return torch.stack(list(map(damped_inverse, factor, dampings)))
    rows = is_nonzero.nonzero().squeeze(-1)
    inverse = torch.diag_embed((1 / dampings).expand(len(factor)))
    inverse[rows.unsqueeze(-1), rows] = _cholesky_inverse(factor[rows][:, rows], dampings)
    return inverse


def _cholesky_inverse(factor: Tensor, damping: Tensor) -> Tensor:
    """Return (factor + damping I)^-1; a failure is tried again in float64."""
    for dtype in _precisions(factor):
        damped = _add_diagonal(factor, damping.unsqueeze(-1), dtype)
        lower, info = torch.linalg.cholesky_ex(damped)
        if info.any():
            continue
        # What float64 can hold may be infinite in float32.
        inverse = torch.cholesky_inverse(lower).to(factor.dtype)
        if inverse.isfinite().all():
            return inverse.contiguous()
    raise DecompositionError(f"Cholesky of a {list(factor.shape)} factor failed")


def _precisions(factor: Tensor) -> list[torch.dtype]:
    """Return the dtypes to compute in: float64 is slow, and only for what failed before."""
    return list(dict.fromkeys((factor.dtype, torch.float64)))


def _add_diagonal(factor: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a factor [..., n, n] with ``values`` [..., 1] added to the diagonal."""
    out = factor.to(dtype, copy=True)
    out.diagonal(dim1=-2, dim2=-1).add_(values)
    return out


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
    a: Tensor, g: Tensor, damping: float | Tensor | None, *, factored: bool = False
) -> Tensor:
    """Return the eigenvalues of the damped G kron A, [..., g_dim, a_dim].

    They are v_g v_a + damping (eq. 12), or with ``factored`` (v_g + dg) (v_a + da), where da and dg
    come from :func:`split_damping`. ``a`` is [..., a_dim] and ``g`` is [..., g_dim]. None is the
    :func:`relative_damping` of the mean eigenvalue of G kron A.
    """
    if damping is None:
        damping = relative_damping(a.mean(-1) * g.mean(-1))
    if factored:
        da, dg = split_damping(a.mean(-1), g.mean(-1), damping)
        a, g, damping = a + da.unsqueeze(-1), g + dg.unsqueeze(-1), 0.0
    elif isinstance(damping, Tensor):
        damping = damping[..., None, None]
    return (g.unsqueeze(-1) * a.unsqueeze(-2)).add_(damping)


def damped_second_moments(moments: Tensor, damping: float | None) -> Tensor:
    """Return second moments [..., g_dim, a_dim] plus the damping; None: their mean."""
    if damping is None:
        return moments + relative_damping(moments.mean((-2, -1)))[..., None, None]
    return moments + damping


def change_basis_of_squares(moments: Tensor, change: Tensor, *, is_a: bool) -> Tensor:
    """Return second moments [..., g, a] of a gradient's entries in a new basis of A, or of G.

    The result is exact if the entries are uncorrelated in the old basis. The change of basis is
    old^T new, with eigenvectors in columns.
    """
    squares = change.square()
    return moments @ squares if is_a else squares.mT @ moments


def relative_damping(mean_eigenvalue: Tensor) -> Tensor:
    """Return the mean eigenvalue itself, or 1 where it is 0: a damping of a layer's own scale."""
    ones = torch.ones_like(mean_eigenvalue)
    return torch.where(mean_eigenvalue > 0, mean_eigenvalue, ones)


def largest_eigenvalue(matrix: Tensor, rounds: int = 8) -> Tensor:
    """Estimate the largest eigenvalue [...] of symmetric matrices [..., n, n], from below.

    This is the power method. The matrices are positive semi-definite. Of a diagonal [groups, n] use
    ``amax``.
    """
    # The column of the largest diagonal element: unlike other vectors, it cannot be orthogonal to
    # all eigenvectors of large eigenvalues.
    index = matrix.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    vector = matrix.take_along_dim(index, -1)
    for _ in range(rounds):
        vector = matrix @ torch.nn.functional.normalize(vector, dim=-2)
    norm: Tensor = torch.linalg.vector_norm(vector, dim=(-2, -1))
    return norm


def rotate(x: Tensor, a: Tensor | Blocks | None, g: Tensor | Blocks | None) -> Tensor:
    """Return g^T x a of x [batch, g_dim, a_dim]. None stands for the identity."""
    # Not ``@``: bmm has less overhead, which counts in small layers.
    if isinstance(g, Tensor):
        x = torch.bmm(g.mT, x)
    elif g is not None:
        x = left_times(transposed(g), x)
    if isinstance(a, Tensor):
        return torch.bmm(x, a)
    return x if a is None else times(x, a)


def orthogonal_iteration(factor: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return v [..., n] and Q [..., n, n]: one QR step towards the eigenvectors of a factor.

    Q R = factor basis P, where P puts the columns with the largest basis^T factor basis first. From
    the eigenvectors of an older, similar factor, one step (of simultaneous iteration) is nearly as
    good as eigh and takes less time, because it is mostly a product. Without P, a singular factor
    would lose its basis: QR would start with a column of rounding errors. Q is orthogonal to
    rounding. v are the absolute values on the diagonal of R; they estimate the eigenvalues. Column
    i of Q belongs to column i of ``basis``, so neither v nor Q is in order.

    Args:
        factor: [..., n, n].
        basis: The eigenvectors so far, in columns, [..., n, n].

    Raises:
        DecompositionError: An element is not finite.
    """
    product = factor @ basis
    order = (basis * product).sum(-2).argsort(-1, descending=True)
    columns = order.unsqueeze(-2).expand_as(product)
    q, r = torch.linalg.qr(product.gather(-1, columns))
    if not torch.isfinite(r.sum()):
        raise DecompositionError(f"QR of a {list(factor.shape)} factor that is not finite")
    values = r.diagonal(dim1=-2, dim2=-1).abs()
    # Back to the order of ``basis``, in which Adam's second moments are kept.
    return (
        torch.empty_like(values).scatter_(-1, order, values),
        torch.empty_like(product).scatter_(-1, columns, q),
    )


QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's Newton-Schulz polynomial (Jordan et al. 2024)."""


def orthogonalizer(gram: Tensor, steps: int) -> Tensor:
    """Return P [batch, s, s]: P x is x with its singular values moved towards 1.

    A Newton-Schulz step replaces X by p(X X^T) X with p(G) = a I + b G + c G^2, from X = x / ||x||,
    and with the coefficients of Muon (Jordan et al. 2024). All these polynomials are of one matrix,
    so P is found from x x^T alone, in matrices of the smaller side of x. After five steps, singular
    values of P x that are not tiny lie between about 0.7 and 1.2.

    Args:
        gram: x x^T, [batch, s, s]. For x of zeros, P x is zero.
        steps: Newton-Schulz steps, at least 1.
    """
    a, b, c = QUINTIC
    square = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] + torch.finfo(gram.dtype).tiny
    gram, product = gram / square, None
    for step in range(steps):
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        product = p if product is None else torch.bmm(p, product)
        if step < steps - 1:
            gram = torch.bmm(torch.bmm(p, gram), p)
    assert product is not None
    return product * square.rsqrt()


def orthogonalize(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return :func:`orthogonalizer` times x [batch, m, n], computed in ``dtype``.

    It applies the polynomials to X itself, as Muon does: the polynomials of x x^T would lose more
    digits in bfloat16. There the result has a relative error of about 1 %.
    """
    a, b, c = QUINTIC
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    is_tall = x.shape[-2] > x.shape[-1]
    x = (x / (norm + torch.finfo(x.dtype).tiny)).to(dtype)
    x = x.mT if is_tall else x
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether the device has instructions for matrix products in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without these instructions, a product in bfloat16 is several times slower than in float32.
    return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())


def clip_root_mean_square(x: Tensor, limit: float) -> Tensor:
    """Shrink matrices x [batch, g_dim, a_dim] to a root mean square of at most ``limit``, in place.

    This is the update clipping of Adafactor (Shazeer & Stern 2018), for each matrix.
    """
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    # A matrix of zeros stays as it is: the quotient is infinite.
    return x.mul_((limit * (x.shape[-2] * x.shape[-1]) ** 0.5 / norm).clamp_max_(1.0))


def precondition_eigen(
    grad: Tensor, a: Tensor | Blocks | None, g: Tensor | Blocks | None, eigenvalues: Tensor
) -> Tensor:
    """Rotate ``grad`` [..., g_dim, a_dim] into the eigenbasis, divide, rotate back (eq. 11-13).

    ``a`` and ``g`` are eigenvectors, None for a diagonal factor. ``eigenvalues`` are damped.
    """
    rotated = rotate(grad, a, g)
    # Not in place: without eigenvectors, ``rotated`` is still the gradient of the caller.
    scaled = rotated / eigenvalues
    back_a, back_g = (_transpose(basis) for basis in (a, g))
    return rotate(scaled, back_a, back_g)


def _transpose(basis: Tensor | Blocks | None) -> Tensor | Blocks | None:
    if basis is None:
        return None
    return basis.mT if isinstance(basis, Tensor) else transposed(basis)


def precondition_inverse(
    grad: Tensor, a_inverse: Tensor | Blocks, g_inverse: Tensor | Blocks
) -> Tensor:
    """Return (G + damping I)^-1 grad (A + damping I)^-1, eq. 10; a diagonal inverse is [..., n]."""
    if not isinstance(g_inverse, Tensor):
        out = left_times(g_inverse, grad)
    elif g_inverse.ndim == grad.ndim:
        out = g_inverse @ grad
    else:
        out = grad * g_inverse.unsqueeze(-1)
    if not isinstance(a_inverse, Tensor):
        return times(out, a_inverse)
    return out @ a_inverse if a_inverse.ndim == grad.ndim else out * a_inverse.unsqueeze(-2)


MOST_ACROSS = 3.0
"""Largest norm of the part of a grafted gradient across the gradient, in norms of the gradient."""

MOST_ACROSS_ELEMENTWISE = 0.5
"""The same limit for optimizers that divide each element by its size, as Adam does."""


def graft(
    dot: Tensor, new_square: Tensor, old_square: Tensor, most_across: float
) -> tuple[Tensor, Tensor]:
    """Return the factors of p and of g, so that their sum is the grafted gradient.

    p is the preconditioned gradient, g the gradient. The grafted gradient is g plus a part across
    g: that of the p whose part along g is g, or in its direction ``most_across`` times the norm of
    g if it is longer. So a step lowers the loss, to first order, as much as a step along g. The
    arguments are <p, g>, <p, p> and <g, g>.
    """
    cosine = dot / (new_square * old_square).sqrt()
    across = (cosine.square().reciprocal() - 1).clamp_min(0).sqrt()
    share = (most_across / across).clamp_max(1.0)
    # The cosine of a zero is not a number. Rounding may make a product of nearly 0 negative.
    has_direction = cosine > 0
    share = torch.where(has_direction, share, torch.zeros_like(share))
    return torch.where(has_direction, share * old_square / dot, share), 1 - share


def times_rates_squared(values: Tensor, lrs: Sequence[float]) -> Tensor:
    """Return lr^2 times the value of each layer, [..., layers].

    ``lrs`` are the learning rates of the layers.
    """
    if len(set(lrs)) == 1:
        return values * lrs[0] ** 2
    # Numbers times tensors: a tensor of the rates would be copied to the device.
    each = zip(values.unbind(-1), lrs, strict=True)
    return torch.stack([value * lr**2 for value, lr in each], -1)


def kl_clip_scale(change: Tensor, kl_clip: float) -> Tensor:
    """Return nu = min(1, sqrt(kl_clip / change)) (eq. 16).

    The change is the sum over layers of lr^2 |<preconditioned gradient, gradient>|.
    """
    # Without a change the quotient is inf, and nu is 1: no clip.
    return (kl_clip / change).sqrt().clamp_max(1.0)


def trust_scale(step_square: Tensor, size_square: Tensor, trust_ratio: float) -> Tensor:
    """Return min(1, trust_ratio size / ||step||) of each layer, of the squares of both lengths.

    The size is above 0, so a step of 0 makes the quotient inf, and the factor 1.
    """
    return (trust_ratio * (size_square / step_square).sqrt()).clamp_max(1.0)


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
