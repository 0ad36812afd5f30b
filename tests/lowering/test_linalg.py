"""Linear algebra against eager: factorisations, solvers, determinants, what they raise, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import linalg as la

DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
Fn = Callable[..., Any]


def compiled(fn: Fn) -> Fn:
    return torch.compile(fn, backend="tpu", fullgraph=True)


def check(fn: Fn, *args: torch.Tensor) -> None:
    got, want = compiled(fn)(*args), fn(*args)
    tolerance = 3e-4 if args[0].dtype in (torch.float32, torch.complex64) else 1e-9
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def square(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Random matrices that are far from singular."""
    torch.manual_seed(sum(sizes))
    return torch.randn(*sizes, dtype=dtype) + 2 * torch.eye(sizes[-1], dtype=dtype)


def positive(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    a = square(dtype, *sizes)
    return a @ a.mH + torch.eye(sizes[-1], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factorisations(dtype: torch.dtype) -> None:
    def fn(a: torch.Tensor, s: torch.Tensor, tall: torch.Tensor, wide: torch.Tensor) -> Any:
        reflectors, scales = torch.geqrf(tall)
        return (
            la.cholesky_ex(s),
            la.cholesky_ex(s.triu(), upper=True),
            torch.ops.aten.cholesky(s),
            la.qr(tall),
            la.qr(tall, mode="complete"),
            la.qr(wide, mode="r"),
            (reflectors, scales, la.householder_product(reflectors, scales)),
            torch.ormqr(reflectors, scales, tall, transpose=True),
            torch.ormqr(reflectors, scales, wide, left=False),
            la.lu_factor_ex(tall),
            la.lu(tall),
            la.lu(wide),
            torch.lu_unpack(*la.lu_factor_ex(a)[:2], unpack_data=False)[0],
        )

    tall = torch.randn(3, 5, 4, dtype=dtype)
    check(fn, square(dtype, 2, 3, 4, 4), positive(dtype, 2, 3, 4, 4), tall, tall.mT.contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spectra(dtype: torch.dtype) -> None:
    """Vectors are compared through what they reconstruct."""

    def fn(a: torch.Tensor, s: torch.Tensor, tall: torch.Tensor) -> Any:
        values, vectors = la.eigh(s)
        upper, _ = la.eigh(s.triu(), UPLO="U")
        complex_values, complex_vectors = la.eig(a)
        u, sizes, vh = la.svd(tall, full_matrices=False)
        full = la.svd(tall)
        return (
            (values, upper, vectors @ torch.diag_embed(values).to(s.dtype) @ vectors.mH),
            complex_vectors @ torch.diag_embed(complex_values) - a.to(complex_vectors.dtype) @ complex_vectors,
            (sizes, (u * sizes.unsqueeze(-2)) @ vh, la.svdvals(tall), full[0].mH @ full[0], full[2].shape),
            (la.pinv(tall), la.pinv(s, hermitian=True), la.pinv(tall, rtol=0.5), la.matrix_rank(tall), la.cond(a)),
        )

    check(fn, square(dtype, 2, 4, 4), positive(dtype, 2, 4, 4), torch.randn(3, 5, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_solvers(dtype: torch.dtype) -> None:
    def fn(a: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> Any:
        lower, (factors, pivots, _) = la.cholesky_ex(s)[0], la.lu_factor_ex(a)
        sides = [(b, True), (b.mT, False)]
        return (
            [la.lu_solve(factors, pivots, x, left=left, adjoint=t) for x, left in sides for t in (False, True)],
            [la.solve_ex(a, x, left=left) for x, left in sides],
            la.solve_ex(a[0], b[0, 0]),
            la.solve_ex(a, b[..., 0]),
            [torch.cholesky_solve(b, f, upper=u) for f, u in ((lower, False), (lower.mH, True))],
            [torch.cholesky_inverse(f, upper=u) for f, u in ((lower, False), (lower.mH, True))],
            la.solve_triangular(lower, b, upper=False),
            la.solve_triangular(lower.mT, b.mT, upper=True, left=False, unitriangular=True),
            la.inv_ex(a),
            la.matrix_power(s, 3),
        )

    check(fn, square(dtype, 2, 3, 4, 4), positive(dtype, 2, 3, 4, 4), torch.randn(2, 3, 4, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_determinants_of_both_layouts(dtype: torch.dtype) -> None:
    def fn(a: torch.Tensor) -> Any:
        return [f(m) for f in (la.det, la.slogdet) for m in (a, a.mT, a[0])], torch.ops.aten._linalg_det(a)

    check(fn, square(dtype, 2, 3, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrix_exp_of_small_and_large_norms(dtype: torch.dtype) -> None:
    a = square(dtype, 3, 3)
    check(lambda a: [la.matrix_exp(a * scale) for scale in (0, 1e-6, 1, -5)], a)
    assert not compiled(la.matrix_exp)(a * 1e6).isfinite().any()


def test_nothing_but_shapes() -> None:
    def fn(none: torch.Tensor, batch: torch.Tensor, flat: torch.Tensor) -> Any:
        return (
            (la.inv_ex(none), la.det(none), la.slogdet(none), la.cholesky_ex(none), la.matrix_exp(none), la.eigh(none)),
            (la.inv_ex(batch), la.det(batch), la.qr(batch), la.svd(batch), la.cholesky_ex(batch), la.lu(batch)),
            (la.qr(flat), la.pinv(flat), la.svdvals(flat), la.solve_ex(none, flat.mT)),
        )

    check(fn, torch.zeros(2, 0, 0), torch.zeros(0, 3, 3), torch.zeros(2, 3, 0))


def test_info_counts_from_one() -> None:
    matrices = torch.stack([torch.diag(torch.tensor(d)) for d in ([1.0, 2, -1, 3], [0.0, 1, 1, 1], [1.0, 1, 1, 1])])
    matrices[:, 3, 0] = 0.5
    check(lambda m: (la.cholesky_ex(m).info, la.cholesky_ex(m, upper=True).info, la.inv_ex(m).info), matrices)
    with_zero = matrices.clone()
    with_zero[0, 2, 2] = 0
    check(lambda m: (la.lu_factor_ex(m).info, la.solve_ex(m, m[..., :1]).info), with_zero)


@pytest.mark.parametrize("fn", [la.inv, la.cholesky, lambda a: la.solve(a, a)], ids=["inv", "cholesky", "solve"])
def test_what_eager_raises_is_raised(fn: Fn) -> None:
    run = compiled(lambda a: fn(a) + 1)
    run(torch.eye(3))
    with pytest.raises(torch.linalg.LinAlgError, match=r"singular|positive-definite"):
        run(torch.zeros(3, 3))


def test_an_argument_is_not_written_when_the_check_fails() -> None:
    def fn(a: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
        inverse = la.inv(a)
        log.add_(1)
        return inverse

    log = torch.zeros(2)
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(fn)(torch.zeros(3, 3), log)
    assert not log.any()


GRADIENTS: dict[str, Fn] = {
    "inv": la.inv,
    "det": la.det,
    "det_of_transpose": lambda a: la.det(a.mT),
    "slogdet": lambda a: la.slogdet(a).logabsdet,
    "solve": lambda a: la.solve(a, a.sin()) + la.solve(a.mT, a, left=False),
    "cholesky": lambda a: la.cholesky(a @ a.mT),
    "qr": lambda a: la.qr(a).R,
    "lu": lambda a: la.lu(a)[2],
    "eigh": lambda a: la.eigh(a + a.mT).eigenvalues,
    "eig": lambda a: la.eigvals(a).abs().sum(-1),
    "svd": la.svdvals,
    "pinv": la.pinv,
    "matrix_exp": la.matrix_exp,
    "triangular": lambda a: la.solve_triangular(a, a.cos(), upper=True),
    "cholesky_solve": lambda a: torch.cholesky_solve(a.sin(), la.cholesky(a @ a.mT)),
    "householder": lambda a: la.householder_product(*torch.geqrf(a.detach())) * a,
    "nuclear": lambda a: la.matrix_norm(a, "nuc"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    grads = []
    for fn in (GRADIENTS[name], compiled(GRADIENTS[name])):
        a = square(torch.float64, 2, 3, 3).requires_grad_()
        grads.append(torch.autograd.grad(fn(a).sin().sum(), a))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_symmetric_indefinite(dtype: torch.dtype, hermitian: bool) -> None:
    """Zeros on the diagonal make blocks of two, and swaps."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        factors, pivots, info = la.ldl_factor_ex(a, hermitian=hermitian)
        return factors, pivots, info, la.ldl_solve(factors, pivots, b, hermitian=hermitian)

    torch.manual_seed(0)
    a = torch.randn(4, 6, 6, dtype=dtype)
    a[:2].diagonal(0, -2, -1).zero_()
    check(fn, a, torch.randn(6, 2, dtype=dtype).expand(4, 6, 2))
    assert compiled(la.ldl_factor_ex)(torch.zeros(2, 3, 3)).info.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("uplo", ["L", "U"])
@pytest.mark.parametrize("n", [3, 6, 12])
def test_eigenvectors_have_the_signs_of_eager(dtype: torch.dtype, uplo: str, n: int) -> None:
    a = torch.randn(4, n, n, dtype=dtype, generator=torch.Generator().manual_seed(n))
    a = a + a.mH

    def fn(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigh(a, UPLO=uplo).eigenvectors

    torch.testing.assert_close(torch.compile(fn, backend="tpu")(a), fn(a))


def test_small_matrix_exponentials_round_as_eager() -> None:
    a = torch.randn(5, 4, 4) * 6
    assert torch.equal(torch.compile(torch.linalg.matrix_exp, backend="tpu")(a), torch.linalg.matrix_exp(a))
    with pytest.raises(Exception, match=r"call it on x.float\(\)"):
        torch.compile(torch.linalg.matrix_exp, backend="tpu", fullgraph=True)(a.bfloat16())
