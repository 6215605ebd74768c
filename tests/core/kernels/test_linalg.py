"""Linear algebra against dense float64."""

import itertools
import math

import pytest
import torch
from hypothesis import strategies as st

from kfac_bench.core.kernels import linalg
from tests.support import oracle
from tests.support.properties import for_all

torch.set_num_threads(1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def factor_of(n, seed=0, rows=None, dtype=torch.float64):
    x = torch.randn(rows or 2 * n, n, generator=generator(seed), dtype=torch.float64)
    return (x.T @ x / len(x)).to(dtype)


def factors_of(count, n, seed=0, rows=None, dtype=torch.float64):
    """[count, n, n], each another one."""
    return torch.stack([factor_of(n, seed + 50 * i, rows, dtype) for i in range(count)])


def eye_like(x):
    return torch.eye(x.shape[-1], dtype=x.dtype)


def dense(factor):
    """[count, n, n], also of diagonals [count, n]."""
    return torch.diag_embed(factor) if factor.ndim == 2 else factor


def conditioned(n, condition, dtype):
    """Eigenvalues from 1 down to 1 / condition."""
    q = torch.linalg.qr(torch.randn(n, n, generator=generator(3), dtype=torch.float64))[0]
    values = torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)
    x = q @ torch.diag(values) @ q.T
    return ((x + x.T) / 2).to(dtype)


# Packed triangles

COUNTS, SIZES = st.integers(1, 5), st.integers(1, 40)


@for_all(COUNTS, SIZES, st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]))
def test_triangles_packed_and_unpacked_are_the_same_matrices(count, n, seed, dtype):
    x = torch.randn(count, n, n, generator=generator(seed), dtype=dtype)
    x = x + x.mT
    before = x.clone()
    numel = count * n * (n + 1) // 2
    around = torch.full((numel + 5,), 7.0, dtype=dtype)  # packed into a bucket's middle
    linalg.pack_triangle(x, around[2 : 2 + numel])
    got = linalg.unpack_triangle(around[2 : 2 + numel], (count, n, n))
    assert torch.equal(x, before)
    assert torch.equal(got, before)
    assert got.is_contiguous()
    assert torch.equal(around[:2], around.new_full((2,), 7.0))
    assert torch.equal(around[-3:], around.new_full((3,), 7.0))
    around.zero_()
    assert torch.equal(got, before), "shares memory with the bucket"


@for_all(COUNTS, SIZES)
def test_every_element_of_a_triangle_has_one_place(count, n):
    numel = n * (n + 1) // 2
    x = torch.zeros(count, n, n)
    rows, columns = torch.tril_indices(n, n)
    x[:, rows, columns] = torch.arange(1.0, count * numel + 1).view(count, numel)
    x = torch.maximum(x, x.mT)
    packed = torch.full((count * numel,), float("nan"))
    linalg.pack_triangle(x, packed)
    assert sorted(packed.tolist()) == list(range(1, count * numel + 1))
    one_by_one = torch.empty(count, numel)
    for matrix, part in zip(x.split(1), one_by_one, strict=True):
        linalg.pack_triangle(matrix, part)
    assert torch.equal(packed.view(count, numel), one_by_one)


@for_all(COUNTS, SIZES, st.integers(0, 9))
def test_unpacking_makes_a_nearly_symmetric_matrix_exactly_symmetric(count, n, seed):
    x = torch.randn(count, n, n, generator=generator(seed))
    packed = torch.empty(count * n * (n + 1) // 2)
    linalg.pack_triangle(x, packed)
    got = linalg.unpack_triangle(packed, (count, n, n))
    assert torch.equal(got, got.mT)
    assert ((got == x) | (got == x.mT)).all()


def test_packing_is_linear():
    """So that a sum over ranks of packed factors is the packed sum."""
    x, y = factors_of(3, 7), factors_of(3, 7, seed=1)
    x, y = (x + x.mT) / 2, (y + y.mT) / 2
    parts = [torch.empty(3 * 28, dtype=torch.float64) for _ in range(2)]
    linalg.pack_triangle(x, parts[0])
    linalg.pack_triangle(y, parts[1])
    assert torch.equal(linalg.unpack_triangle(parts[0] + parts[1], (3, 7, 7)), x + y)


# Decompositions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("count", [1, 3])
def test_eigendecompose_restores_the_factors(count, n, dtype):
    x = factors_of(count, n, dtype=dtype)
    values, vectors = linalg.eigendecompose(x)
    assert values.dtype == vectors.dtype == dtype
    assert values.shape == (count, n)
    eps = 20 * torch.finfo(dtype).eps
    restored = vectors @ torch.diag_embed(values) @ vectors.mT
    torch.testing.assert_close(restored, x, rtol=eps, atol=10 * eps)
    eye = eye_like(x).expand(count, n, n)
    torch.testing.assert_close(vectors.mT @ vectors, eye, rtol=0, atol=eps)


def test_decompositions_are_contiguous():
    """A rank that made one and the ranks it was sent to must multiply the same bits alike."""
    for x in (factor_of(5, dtype=torch.float32), factors_of(3, 5, dtype=torch.float32)):
        assert linalg.eigendecompose(x)[1].is_contiguous()
        assert linalg.damped_inverse(x, 0.1).is_contiguous()


def test_negative_eigenvalues_are_clamped():
    q = torch.linalg.qr(torch.randn(3, 3, generator=generator(0)))[0]
    x = q @ torch.diag(torch.tensor([2.0, 1.0, -1e-4])) @ q.T
    x = (x + x.T) / 2
    assert torch.linalg.eigvalsh(x)[0] < -5e-5
    values, _ = linalg.eigendecompose(torch.stack([torch.eye(3), x]))
    want = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    torch.testing.assert_close(values, want, rtol=1e-5, atol=1e-6)
    assert values[1, 0] == 0


def test_the_inputs_stay_as_they_are():
    x = factor_of(6, dtype=torch.float64)
    before = x.clone()
    linalg.eigendecompose(x)
    linalg.damped_inverse(x, 0.5)
    linalg.damped_inverse(x, torch.tensor(0.5))
    assert torch.equal(x, before)


class FakeEigh:
    """Fails as told per dtype: ``nan``, ``nan_vectors`` or ``raise``; records the calls.

    With ``times`` only so many first calls of a dtype fail.
    """

    def __init__(self, monkeypatch, times=None, **failures):
        self.real, self.failures, self.times = torch.linalg.eigh, failures, times or {}
        self.calls, self.inputs = [], []
        monkeypatch.setattr(torch.linalg, "eigh", self)

    def __call__(self, x):
        kind = str(x.dtype).removeprefix("torch.")
        self.calls.append(kind)
        self.inputs.append(x.clone())
        fails = self.calls.count(kind) <= self.times.get(kind, math.inf)
        how = self.failures.get(kind) if fails else None
        if how == "raise":
            raise torch.linalg.LinAlgError("did not converge")
        values, vectors = self.real(x)
        if how == "nan":
            values[..., -1, 0] = float("nan")
        elif how == "nan_vectors":
            vectors[..., -1, 0] = float("nan")
        return values, vectors


@pytest.mark.parametrize("how", ["nan", "nan_vectors", "raise"])
def test_a_failed_eigh_is_retried_in_float64(monkeypatch, how):
    x = factors_of(2, 5, dtype=torch.float32)
    want = linalg.eigendecompose(x)
    eigh = FakeEigh(monkeypatch, float32=how)
    values, vectors = linalg.eigendecompose(x)
    assert eigh.calls == ["float32", "float32", "float64"]
    assert values.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(values, want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vectors.abs(), want[1].abs(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("times", [{"float32": 1}, {"float32": 2, "float64": 1}])
@pytest.mark.parametrize("how", ["nan", "nan_vectors", "raise"])
def test_a_failed_eigh_is_retried_with_a_shift(monkeypatch, how, times):
    """Of each matrix by its own mean eigenvalue; the eigenvalues are those without the shift."""
    scales = torch.tensor([1.0, 1e6])[:, None, None]
    x = scales * factors_of(2, 5, dtype=torch.float32)
    want = linalg.eigendecompose(x)
    eigh = FakeEigh(monkeypatch, times, float32=how, float64=how)
    values, vectors = linalg.eigendecompose(x)
    assert eigh.calls == ["float32"] * 2 + ["float64"] * (2 * len(times) - 2)
    shift = (eigh.inputs[-1].double() - x.double()) / scales
    wanted = x.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * 1e-6 * torch.eye(5) / scales
    torch.testing.assert_close(shift, wanted.double(), rtol=0, atol=3e-7)
    assert (shift.diagonal(dim1=-2, dim2=-1) > 0).all()
    atol = 1e-6 if "float64" in times else 4e-6  # the shift is about 2e-6
    torch.testing.assert_close(values / scales[..., 0], want[0] / scales[..., 0], rtol=0, atol=atol)
    torch.testing.assert_close(vectors.abs(), want[1].abs(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["nan", "nan_vectors", "raise"])
def test_eigh_failing_in_every_way_is_an_error(monkeypatch, how):
    eigh = FakeEigh(monkeypatch, float32=how, float64=how)
    with pytest.raises(linalg.DecompositionError, match=r"eigh of a \[2, 5, 5\] factor failed"):
        linalg.eigendecompose(factors_of(2, 5, dtype=torch.float32))
    assert eigh.calls == ["float32", "float32", "float64", "float64"]


def test_a_good_eigh_is_not_repeated(monkeypatch):
    eigh = FakeEigh(monkeypatch)
    linalg.eigendecompose(factor_of(5, dtype=torch.float32))
    assert eigh.calls == ["float32"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_factors_are_refused_before_lapack_sees_them(monkeypatch, bad):
    x = factors_of(3, 4, dtype=torch.float32)
    x[1, 2, 1] = x[1, 1, 2] = bad
    eigh = FakeEigh(monkeypatch)
    with pytest.raises(linalg.DecompositionError):
        linalg.eigendecompose(x)
    with pytest.raises(linalg.DecompositionError, match=r"Cholesky of a \[3, 4, 4\]"):
        linalg.damped_inverse(x, 0.1)
    assert eigh.calls == []


@pytest.mark.parametrize("damping", [1e-4, 0.03, 2.0])
@pytest.mark.parametrize("count", [1, 4])
def test_damped_inverse_is_equation_9(count, damping):
    x = factors_of(count, 9)
    want = torch.linalg.inv(x + damping * eye_like(x))
    torch.testing.assert_close(linalg.damped_inverse(x, damping), want, rtol=1e-9, atol=1e-9)
    got = linalg.damped_inverse(x.float(), damping)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4 * want.abs().max())


@for_all(st.integers(1, 5), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_each_matrix_of_a_batch_has_a_damping_of_its_own(count, n, seed, singular):
    x = factors_of(count, n, seed, rows=max(1, n // 2) if singular else None)
    dampings = torch.logspace(-3, 1, count, dtype=torch.float64).flip(0)
    got = linalg.damped_inverse(x, dampings)
    for one, damping, inverse in zip(x, dampings, got, strict=True):
        want = torch.linalg.inv(one + damping * eye_like(one))
        torch.testing.assert_close(inverse, want, rtol=1e-8, atol=1e-9 * want.abs().max().item())
    alone = linalg.damped_inverse(x[0], dampings[0])  # a matrix and a 0-d tensor
    torch.testing.assert_close(alone, got[0])
    of_all = linalg.damped_inverse(x, dampings[0])  # a batch and a 0-d tensor
    torch.testing.assert_close(of_all, linalg.damped_inverse(x, dampings[0].item()))


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda d: torch.tensor([0.5, d])])
def test_a_damping_that_float32_cannot_add_is_added_in_float64(kind):
    """1 + 1e-9 == 1 in float32, and [[1, 1], [1, 1]] has no Cholesky factor."""
    ones, damping = torch.ones(2, 2, 2), 1e-9
    want = torch.linalg.inv(ones[1].double() + damping * torch.eye(2, dtype=torch.float64))
    got = linalg.damped_inverse(ones, kind(damping))
    torch.testing.assert_close(got[1].double(), want, rtol=1e-5, atol=0)


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
    indefinite = torch.diag(torch.tensor([1.0, -1.0]))
    for x in (indefinite, torch.stack([torch.eye(2), indefinite])):
        with pytest.raises(linalg.DecompositionError):
            linalg.damped_inverse(x, 0.1)


@pytest.mark.parametrize(
    "decompose", [linalg.eigendecompose, lambda x: linalg.damped_inverse(x, 1)]
)
def test_one_bad_matrix_fails_its_batch(decompose):
    x = factors_of(3, 4, dtype=torch.float32)
    x[2, 0, 0] = float("nan")
    with pytest.raises(linalg.DecompositionError):
        decompose(x)
    decompose(x[:2])


# Rows of zeros


def with_zero_rows(x, rows):
    """A copy with zeros in these rows and columns."""
    x = x.clone()
    x[..., rows, :] = 0
    x[..., rows] = 0
    return x


def check_eigen(x, values, vectors):
    eps = 50 * torch.finfo(x.dtype).eps
    assert (values.diff() >= 0).all()
    assert (values >= 0).all()
    restored = vectors @ torch.diag_embed(values) @ vectors.mT
    scale = max(1.0, x.abs().max().item())
    torch.testing.assert_close(restored, x, rtol=0, atol=eps * scale)
    torch.testing.assert_close(vectors.mT @ vectors, eye_like(x).expand_as(x), rtol=0, atol=eps)
    assert vectors.is_contiguous()


@for_all(
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(0, 99),
    st.data(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_rows_of_zeros_against_dense_linear_algebra(count, n, seed, data, dtype):
    """Each matrix of a batch may have other ones."""
    x = factors_of(count, n, seed, dtype=dtype)
    rows = [sorted(data.draw(st.sets(st.integers(0, n - 1)))) for _ in range(count)]
    x = torch.stack([with_zero_rows(*pair) for pair in zip(x, rows, strict=True)])
    before = x.clone()
    values, vectors = linalg.eigendecompose(x)
    check_eigen(x, values, vectors)
    for zeros, matrix_values, matrix_vectors in zip(rows, values, vectors, strict=True):
        first = len(zeros)
        assert (matrix_values[:first] == 0).all()
        units = torch.eye(n, dtype=dtype)[:, zeros]
        if first < n:
            assert torch.equal(matrix_vectors[:, :first], units)
        assert (matrix_vectors[zeros, first:] == 0).all()
    dampings = torch.logspace(-2, 0, count, dtype=dtype)
    got = linalg.damped_inverse(x, dampings)
    want = torch.linalg.inv(x.double() + dampings.double()[:, None, None] * torch.eye(n).double())
    rtol = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(got.double(), want, rtol=0, atol=rtol * want.abs().max().item())
    for zeros, damping, inverse in zip(rows, dampings, got, strict=True):
        assert (inverse.diagonal()[zeros] == 1 / damping).all()
    assert torch.equal(x, before)


def test_a_matrix_of_zeros():
    x = torch.zeros(2, 4, 4)
    values, vectors = linalg.eigendecompose(x)
    assert torch.equal(values, torch.zeros(2, 4))
    assert torch.equal(vectors, torch.eye(4).expand(2, 4, 4))
    assert torch.equal(linalg.damped_inverse(x, 0.5), 2 * torch.eye(4).expand(2, 4, 4))


def test_lapack_does_not_see_rows_of_zeros(monkeypatch):
    x = with_zero_rows(factors_of(2, 8, dtype=torch.float32), [1, 5, 6])
    eigh = FakeEigh(monkeypatch)
    linalg.eigendecompose(x)
    assert [y.shape for y in eigh.inputs] == [(5, 5), (5, 5)]
    sizes, real = [], torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda y: sizes.append(y.shape[-1]) or real(y))
    linalg.damped_inverse(x, 0.1)
    assert sizes == [5, 5]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("offsets", [[4], [4, 5, 7, 8]])
def test_factors_of_convolutions_whose_kernels_meet_padding(offsets, threads, monkeypatch):
    """eigh itself fails on about half of these matrices in float32, on others with each LAPACK."""
    eigh = FakeEigh(monkeypatch)
    torch.set_num_threads(threads)
    try:
        for seed in range(6):
            a = torch.randn(64, 16 * len(offsets), generator=generator(seed)).relu()
            part = (a.T @ a / len(a)).view(16, len(offsets), 16, len(offsets))
            x = torch.zeros(16, 9, 16, 9)
            for i, j in itertools.product(range(len(offsets)), repeat=2):
                x[:, offsets[i], :, offsets[j]] = part[:, i, :, j]
            x = x.reshape(144, 144)
            check_eigen(x, *linalg.eigendecompose(x))
    finally:
        torch.set_num_threads(1)
    assert eigh.calls == ["float32"] * 6


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e20])
def test_the_largest_eigenvalue_of_a_matrix_of_any_scale(scale):
    matrices = factors_of(2, 16, rows=64, dtype=torch.float32) * scale
    want = torch.linalg.eigvalsh(matrices.double())[:, -1].float()
    torch.testing.assert_close(linalg.largest_eigenvalue(matrices), want, rtol=0.05, atol=0)


# Damping of the product


def test_split_damping_by_hand():
    """pi = sqrt(mean_a / mean_g): 2, 1/3; A gets pi sqrt(damping), G sqrt(damping) / pi."""
    a, g = linalg.split_damping(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 9.0]), 0.25)
    torch.testing.assert_close(a, torch.tensor([1.0, 0.5 / 3]))
    torch.testing.assert_close(g, torch.tensor([0.25, 1.5]))
    tensor = linalg.split_damping(torch.tensor(4.0), torch.tensor(1.0), torch.tensor(0.25))
    assert [x.item() for x in tensor] == [1.0, 0.25]


@for_all(st.floats(1e-8, 1e8), st.floats(1e-8, 1e8), st.floats(1e-8, 1e2))
def test_split_dampings_multiply_to_the_damping_and_follow_the_means(mean_a, mean_g, damping):
    means = (torch.tensor(m, dtype=torch.float64) for m in (mean_a, mean_g))
    a, g = (x.item() for x in linalg.split_damping(*means, damping))
    assert a * g == pytest.approx(damping)
    assert a / g == pytest.approx(mean_a / mean_g)


@pytest.mark.parametrize("means", [(0.0, 3.0), (3.0, 0.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_a_factor_without_a_trace_splits_the_damping_evenly(means):
    a, g = linalg.split_damping(*torch.tensor([means, (1.0, 1.0)]).T, 0.09)
    torch.testing.assert_close(a, torch.full((2,), 0.3))
    torch.testing.assert_close(g, torch.full((2,), 0.3))


@pytest.mark.parametrize("means", [(1e-25, 1e25), (10.0, 1e-38)])
def test_means_of_very_different_size_split_the_damping_finitely(means):
    a, g = linalg.split_damping(*torch.tensor(means), 1e-3)
    pi = math.sqrt(means[0] / means[1])
    assert a.item() == pytest.approx(pi * math.sqrt(1e-3), rel=1e-4)
    assert g.item() == pytest.approx(math.sqrt(1e-3) / pi, rel=1e-4)


@pytest.mark.parametrize("factored", [False, True])
def test_damped_eigenvalues_are_those_of_the_dense_matrix(factored):
    a, g, damping = factors_of(3, 5), factors_of(3, 4, seed=9), 0.07
    values = [torch.linalg.eigvalsh(x) for x in (a, g)]
    before = [v.clone() for v in values]
    got = linalg.damped_eigenvalues(*values, damping, factored=factored)
    assert got.shape == (3, 4, 5)
    assert all(map(torch.equal, values, before))
    for one_a, one_g, one in zip(a, g, got, strict=True):
        want = torch.linalg.eigvalsh(oracle.curvature(one_a, one_g, damping, "eigen", factored))
        torch.testing.assert_close(one.flatten().sort().values, want)


# Preconditioning


def precondition(grad, a, g, damping, method, factored=False):
    """With the functions under test, as the executor combines them."""
    if method == "eigen":
        (va, qa), (vg, qg) = (
            (x, None) if x.ndim == 2 else linalg.eigendecompose(x) for x in (a, g)
        )
        values = linalg.damped_eigenvalues(va, vg, damping, factored=factored)
        return linalg.precondition_eigen(grad, qa, qg, values)
    dampings = (damping, damping)
    if factored:
        mean_a, mean_g = (dense(x).diagonal(dim1=-2, dim2=-1).mean(-1) for x in (a, g))
        dampings = linalg.split_damping(mean_a, mean_g, damping)
    inverses = []
    for x, d in zip((a, g), dampings, strict=True):
        if x.ndim == 2:
            inverses.append(1 / (x + (d.unsqueeze(-1) if factored else d)))
        else:
            inverses.append(linalg.damped_inverse(x, d))
    return linalg.precondition_inverse(grad, *inverses)


@for_all(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 99),
    st.floats(1e-3, 10),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(["eigen", "inverse"]),
    st.booleans(),
)
def test_preconditioning_is_the_dense_kronecker_solve(
    groups, a_dim, g_dim, seed, damping, diagonal, method, factored
):
    factors = [factors_of(groups, a_dim, seed), factors_of(groups, g_dim, seed + 1)]
    a, g = (
        x.diagonal(dim1=-2, dim2=-1).contiguous() if d else x
        for x, d in zip(factors, diagonal, strict=True)
    )
    grad = torch.randn(groups, g_dim, a_dim, generator=generator(seed), dtype=torch.float64)
    before = [x.clone() for x in (grad, a, g)]
    got = precondition(grad, a, g, damping, method, factored)
    assert all(map(torch.equal, (grad, a, g), before))
    want = oracle.solve(grad, a, g, damping, method, factored)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9 * want.abs().max())


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12])
def test_ill_conditioned_factors_keep_their_accuracy(condition, method, factored):
    """Against the dense solve of what float32 holds; the damping keeps the problem mild."""
    a, g = (
        torch.stack([conditioned(n, c, torch.float32) for c in (10, condition)]) for n in (12, 7)
    )
    grad = torch.randn(2, 7, 12, generator=generator(5))
    got = precondition(grad, a, g, 1e-3, method, factored)
    want = oracle.solve(grad, a, g, 1e-3, method, factored)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=2e-3 * want.abs().max())


@pytest.mark.parametrize("factored", [False, True])
def test_a_singular_factor_is_damped_not_divided_by_zero(factored):
    a = torch.stack([factor_of(6, rows=2, dtype=torch.float32), torch.eye(6)])
    g = torch.zeros(2, 3, 3)
    grad = torch.randn(2, 3, 6, generator=generator(0))
    got = precondition(grad, a, g, 0.5, "eigen", factored)
    if not factored:
        torch.testing.assert_close(got, grad / 0.5)
    want = oracle.solve(grad, a, g, 0.5, "eigen", factored)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    zero = torch.zeros(2, 6)  # tokens that never came
    got = precondition(grad, zero, g, 0.5, "inverse", factored)
    torch.testing.assert_close(got, grad / (0.5 if factored else 0.25))


def test_rotations_are_transposes_of_each_other():
    a, g = (torch.linalg.qr(factors_of(2, n))[0] for n in (5, 4))
    x = torch.randn(2, 4, 5, generator=generator(1), dtype=torch.float64)
    there = linalg.rotate(x, a, g)
    torch.testing.assert_close(there, torch.einsum("bij,bik,bkl->bjl", g, x, a))
    torch.testing.assert_close(linalg.rotate(there, a.mT, g.mT), x)
    torch.testing.assert_close(linalg.rotate(x, a, None), x @ a)
    torch.testing.assert_close(linalg.rotate(x, None, g), g.mT @ x)
    assert torch.equal(linalg.rotate(x, None, None), x)


# KL clip


def kl_clip(new, old, lrs, kappa):
    dots = torch.stack([(p * g).sum().abs() for p, g in zip(new, old, strict=True)])
    return linalg.kl_clip_scale(linalg.times_rates_squared(dots, lrs).sum(), kappa)


def test_kl_clip_scale_is_equation_16():
    shapes = [(1, 2, 3), (3, 2, 4), (1, 2, 5)]
    new, old = ([torch.randn(s, generator=generator(sum(s) + i)) for s in shapes] for i in (0, 50))
    products = [(p * g).sum().item() for p, g in zip(new, old, strict=True)]
    lrs = [0.1, 0.2, 0.05]
    total = sum(abs(x) * lr**2 for x, lr in zip(products, lrs, strict=True))
    got = kl_clip(new, old, lrs, total / 4)
    assert got.shape == ()
    assert got.item() == pytest.approx(0.5, rel=1e-5)
    assert kl_clip(new, old, lrs, total / 9).item() == pytest.approx(1 / 3, rel=1e-5)


def test_kl_clip_counts_a_layer_whose_product_is_negative():
    """|.| per layer: one against the gradient must not make room for another."""
    ones = torch.ones(1, 4)
    nu = kl_clip([ones, -ones], [ones, ones], [1.0, 1.0], 2.0)
    assert nu.item() == pytest.approx(math.sqrt(2 / 8))


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8])
def test_kl_clip_never_enlarges_and_zero_gradients_give_no_nan(size):
    grad = torch.full((2, 2), size)
    assert kl_clip([grad, grad], [grad, grad], [0.1, 0.1], 1e-3).item() == 1.0
    assert kl_clip([grad], [grad], [0.0], 1e-3).item() == 1.0
