"""Linear algebra against dense float64."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kfac_bench.core import linalg
from tests import oracle

torch.set_num_threads(1)


def for_all(*strategies):
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return lambda test: slow(given(*strategies)(test))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def factor_of(n, seed=0, rows=None, dtype=torch.float64):
    x = torch.randn(rows or 2 * n, n, generator=generator(seed), dtype=torch.float64)
    return (x.T @ x / len(x)).to(dtype)


def conditioned(n, condition, dtype):
    """Eigenvalues from 1 down to 1 / condition."""
    q = torch.linalg.qr(torch.randn(n, n, generator=generator(3), dtype=torch.float64))[0]
    values = torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)
    x = q @ torch.diag(values) @ q.T
    return ((x + x.T) / 2).to(dtype)


# Packed triangles


@for_all(st.integers(1, 40), st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]))
def test_a_triangle_packed_and_unpacked_is_the_same_matrix(n, seed, dtype):
    x = torch.randn(n, n, generator=generator(seed), dtype=dtype)
    x = x + x.T
    before = x.clone()
    numel = n * (n + 1) // 2
    around = torch.full((numel + 5,), 7.0, dtype=dtype)  # packed into a bucket's middle
    linalg.pack_triangle(x, around[2 : 2 + numel])
    got = linalg.unpack_triangle(around[2 : 2 + numel], n)
    assert torch.equal(x, before)
    assert torch.equal(got, before)
    assert got.is_contiguous()
    assert torch.equal(around[:2], around.new_full((2,), 7.0))
    assert torch.equal(around[-3:], around.new_full((3,), 7.0))
    around.zero_()
    assert torch.equal(got, before), "shares memory with the bucket"


@for_all(st.integers(1, 40))
def test_every_element_of_a_triangle_has_one_place(n):
    numel = n * (n + 1) // 2
    x = torch.zeros(n, n)
    rows, columns = torch.tril_indices(n, n)
    x[rows, columns] = torch.arange(1.0, numel + 1)
    x = torch.maximum(x, x.T)
    packed = torch.full((numel,), float("nan"))
    linalg.pack_triangle(x, packed)
    assert sorted(packed.tolist()) == list(range(1, numel + 1))


@for_all(st.integers(1, 40), st.integers(0, 9))
def test_what_is_symmetric_but_for_rounding_is_exactly_so_when_unpacked(n, seed):
    x = torch.randn(n, n, generator=generator(seed))
    packed = torch.empty(n * (n + 1) // 2)
    linalg.pack_triangle(x, packed)
    got = linalg.unpack_triangle(packed, n)
    assert torch.equal(got, got.T)
    assert ((got == x) | (got == x.T)).all()


def test_packing_is_linear():
    """So that a sum over ranks of packed factors is the packed sum."""
    x, y = factor_of(7), factor_of(7, seed=1)
    x, y = (x + x.T) / 2, (y + y.T) / 2
    parts = [torch.empty(28, dtype=torch.float64) for _ in range(2)]
    linalg.pack_triangle(x, parts[0])
    linalg.pack_triangle(y, parts[1])
    assert torch.equal(linalg.unpack_triangle(parts[0] + parts[1], 7), x + y)


# Decompositions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_eigendecompose_restores_the_factor(n, dtype):
    x = factor_of(n, dtype=dtype)
    values, vectors = linalg.eigendecompose(x)
    assert values.dtype == vectors.dtype == dtype
    eps = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(vectors @ torch.diag(values) @ vectors.T, x, rtol=eps, atol=10 * eps)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(n, dtype=dtype), rtol=0, atol=eps)


def test_decompositions_are_contiguous():
    """A rank that made one and the ranks it was sent to must multiply the same bits alike."""
    x = factor_of(5, dtype=torch.float32)
    assert linalg.eigendecompose(x)[1].is_contiguous()
    assert linalg.damped_inverse(x, 0.1).is_contiguous()


def test_negative_eigenvalues_are_clamped():
    q = torch.linalg.qr(torch.randn(3, 3, generator=generator(0)))[0]
    x = q @ torch.diag(torch.tensor([2.0, 1.0, -1e-4])) @ q.T
    x = (x + x.T) / 2
    assert torch.linalg.eigvalsh(x)[0] < -5e-5
    values, _ = linalg.eigendecompose(x)
    torch.testing.assert_close(values, torch.tensor([0.0, 1.0, 2.0]), rtol=1e-5, atol=1e-6)
    assert values[0] == 0


def test_the_inputs_stay_as_they_are():
    x = factor_of(6, dtype=torch.float64)
    before = x.clone()
    linalg.eigendecompose(x)
    linalg.damped_inverse(x, 0.5)
    assert torch.equal(x, before)


class FakeEigh:
    """Fails as told per dtype: ``nan``, ``nan_vectors`` or ``raise``; records the calls."""

    def __init__(self, monkeypatch, **failures):
        self.real, self.failures, self.calls = torch.linalg.eigh, failures, []
        monkeypatch.setattr(torch.linalg, "eigh", self)

    def __call__(self, x):
        kind = str(x.dtype).removeprefix("torch.")
        self.calls.append(kind)
        how = self.failures.get(kind)
        if how == "raise":
            raise torch.linalg.LinAlgError("did not converge")
        values, vectors = self.real(x)
        if how == "nan":
            values[0] = float("nan")
        elif how == "nan_vectors":
            vectors[-1, 0] = float("nan")
        return values, vectors


@pytest.mark.parametrize("how", ["nan", "nan_vectors", "raise"])
def test_a_failed_eigh_is_retried_in_float64(monkeypatch, how):
    x = factor_of(5, dtype=torch.float32)
    want = linalg.eigendecompose(x)
    eigh = FakeEigh(monkeypatch, float32=how)
    values, vectors = linalg.eigendecompose(x)
    assert eigh.calls == ["float32", "float64"]
    assert values.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(values, want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vectors.abs(), want[1].abs(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["nan", "nan_vectors", "raise"])
def test_eigh_failing_in_both_is_an_error(monkeypatch, how):
    eigh = FakeEigh(monkeypatch, float32=how, float64=how)
    with pytest.raises(linalg.DecompositionError, match=r"eigh of a \[5, 5\] factor failed"):
        linalg.eigendecompose(factor_of(5, dtype=torch.float32))
    assert eigh.calls == ["float32", "float64"]


def test_a_good_eigh_is_not_repeated(monkeypatch):
    eigh = FakeEigh(monkeypatch)
    linalg.eigendecompose(factor_of(5, dtype=torch.float32))
    assert eigh.calls == ["float32"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_factors_are_refused_before_lapack_sees_them(monkeypatch, bad):
    x = factor_of(4, dtype=torch.float32)
    x[2, 1] = x[1, 2] = bad
    eigh = FakeEigh(monkeypatch)
    with pytest.raises(linalg.DecompositionError):
        linalg.eigendecompose(x)
    with pytest.raises(linalg.DecompositionError, match=r"Cholesky of a \[4, 4\]"):
        linalg.damped_inverse(x, 0.1)
    assert eigh.calls == []


@pytest.mark.parametrize("damping", [1e-4, 0.03, 2.0])
def test_damped_inverse_is_equation_9(damping):
    x = factor_of(9)
    want = torch.linalg.inv(x + damping * torch.eye(9, dtype=torch.float64))
    torch.testing.assert_close(linalg.damped_inverse(x, damping), want, rtol=1e-9, atol=1e-9)
    got = linalg.damped_inverse(x.float(), damping)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4 * want.abs().max())


def test_a_damping_that_float32_cannot_add_is_added_in_float64():
    """1 + 1e-9 == 1 in float32, and [[1, 1], [1, 1]] has no Cholesky factor."""
    ones, damping = torch.ones(2, 2), 1e-9
    want = torch.linalg.inv(ones.double() + damping * torch.eye(2, dtype=torch.float64))
    got = linalg.damped_inverse(ones, damping)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


def test_cholesky_falls_back_to_float64_then_raises(monkeypatch):
    x, real, seen = factor_of(4, dtype=torch.float32), torch.linalg.cholesky_ex, []

    def failing_in(*dtypes):
        def cholesky_ex(y):
            seen.append(y.dtype)
            lower, info = real(y)
            return lower, info + int(y.dtype in dtypes)

        return cholesky_ex

    want = linalg.damped_inverse(x, 0.1)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing_in(torch.float32))
    torch.testing.assert_close(linalg.damped_inverse(x, 0.1), want)
    assert seen == [torch.float32, torch.float64]
    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing_in(torch.float32, torch.float64))
    with pytest.raises(linalg.DecompositionError, match=r"Cholesky of a \[4, 4\] factor failed"):
        linalg.damped_inverse(x, 0.1)


def test_an_indefinite_factor_has_no_cholesky_inverse():
    with pytest.raises(linalg.DecompositionError):
        linalg.damped_inverse(torch.diag(torch.tensor([1.0, -1.0])), 0.1)


# Preconditioning


@for_all(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 99),
    st.floats(1e-3, 10),
)
def test_preconditioning_is_the_dense_kronecker_solve(a_dim, g_dim, seed, damping):
    a, g = factor_of(a_dim, seed), factor_of(g_dim, seed + 1)
    grad = torch.randn(g_dim, a_dim, generator=generator(seed), dtype=torch.float64)
    before = grad.clone()
    eigen = linalg.precondition_eigen(
        grad, linalg.eigendecompose(a), linalg.eigendecompose(g), damping
    )
    inverse = linalg.precondition_inverse(
        grad, linalg.damped_inverse(a, damping), linalg.damped_inverse(g, damping)
    )
    assert torch.equal(grad, before)
    for got, method in ((eigen, "eigen"), (inverse, "inverse")):
        want = oracle.precondition(grad, a, g, damping, method)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9 * want.abs().max())


@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12])
def test_ill_conditioned_factors_keep_their_accuracy(condition):
    """Against the dense solve of what float32 holds; the damping keeps the problem mild."""
    a, g = (conditioned(n, condition, torch.float32) for n in (12, 7))
    grad, damping = torch.randn(7, 12, generator=generator(5)), 1e-3
    a_eigen, g_eigen = linalg.eigendecompose(a), linalg.eigendecompose(g)
    got = linalg.precondition_eigen(grad, a_eigen, g_eigen, damping)
    want = oracle.precondition(grad, a.double(), g.double(), damping)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=2e-3 * want.abs().max())
    inverses = (linalg.damped_inverse(m, damping) for m in (a, g))
    got = linalg.precondition_inverse(grad, *inverses)
    want = oracle.precondition(grad, a.double(), g.double(), damping, "inverse")
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=2e-3 * want.abs().max())


def test_a_singular_factor_is_damped_not_divided_by_zero():
    a, g = factor_of(6, rows=2, dtype=torch.float32), torch.zeros(3, 3)
    grad = torch.randn(3, 6, generator=generator(0))
    got = linalg.precondition_eigen(
        grad, linalg.eigendecompose(a), linalg.eigendecompose(g), damping=0.5
    )
    torch.testing.assert_close(got, grad / 0.5)


# KL clip


def test_kl_clip_scale_is_equation_16():
    pairs = [(torch.randn(2, n, generator=generator(n)) for _ in range(2)) for n in (3, 4, 5)]
    new, old = zip(*[tuple(p) for p in pairs], strict=True)
    products = [(p * g).sum().item() for p, g in zip(new, old, strict=True)]
    lrs = [0.1, 0.2, 0.05]
    total = sum(abs(x) * lr**2 for x, lr in zip(products, lrs, strict=True))
    got = linalg.kl_clip_scale(new, old, lrs, total / 4)
    assert got.shape == ()
    assert got.item() == pytest.approx(0.5, rel=1e-5)
    assert linalg.kl_clip_scale(new, old, lrs, total / 9).item() == pytest.approx(1 / 3, rel=1e-5)


def test_kl_clip_counts_a_layer_whose_product_is_negative():
    """|.| per layer: one against the gradient must not make room for another."""
    ones = torch.ones(1, 4)
    nu = linalg.kl_clip_scale([ones, -ones], [ones, ones], [1.0, 1.0], 2.0)
    assert nu.item() == pytest.approx(math.sqrt(2 / 8))


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8])
def test_kl_clip_never_enlarges_and_zero_gradients_are_no_nan(size):
    grad = torch.full((2, 2), size)
    assert linalg.kl_clip_scale([grad, grad], [grad, grad], [0.1, 0.1], 1e-3).item() == 1.0
    assert linalg.kl_clip_scale([grad], [grad], [0.0], 1e-3).item() == 1.0
