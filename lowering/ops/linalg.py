"""Matrix factorisations, by jax.numpy: LAPACK on a CPU, XLA's own algorithms on a TPU. Batched, real and complex.

Signs and bases are LAPACK's on a CPU, as in torch. ``info`` and pivots are int32 and count from 1; info 0 is success.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.jnp import call, jnp, lax, lowers_jnp
from tpu_compile.lowering.ops.eigenvector_signs import with_torch_signs
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

Array = Any


def adjoint(a: Array) -> Array:
    """The conjugate transpose of the last two axes."""
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def real_dtype(a: Array) -> Any:
    """The dtype of ``a``'s parts."""
    return jnp.finfo(a.dtype).dtype


def no_errors(a: Array) -> Array:
    """``info`` of a batch that cannot fail."""
    return jnp.zeros(a.shape[:-2], jnp.int32)


# ---- Cholesky


@lowers_jnp(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(x: Array, *, upper: bool = False, check_errors: bool = False) -> Any:
    factor = cholesky_factor(x, upper)
    failed = jnp.isnan(jnp.diagonal(factor, axis1=-2, axis2=-1)).any(-1)
    info = lax.cond(failed.any(), lambda a: failed_minor(a, upper), no_errors, x) if x.size else no_errors(x)
    return factor, jnp.where(failed, info, 0)


@lowers_jnp(aten.cholesky.default)
def cholesky(x: Array, upper: bool = False) -> Array:
    return cholesky_factor(x, upper)


def cholesky_factor(a: Array, upper: bool) -> Array:
    """The triangular factor, from the triangle that ``upper`` names; NaN where the matrix is not positive definite."""
    lower = lax.linalg.cholesky(adjoint(a) if upper else a, symmetrize_input=False)
    return adjoint(lower) if upper else lower


def failed_minor(a: Array, upper: bool) -> Array:
    """The order of the first leading minor that is not positive: elimination, a column at a time."""
    a, n = (adjoint(a) if upper else a), a.shape[-1]
    below = jnp.arange(n)

    def step(k: Array, state: Any) -> Any:
        rest, info = state
        column = jnp.where(below >= k, lax.dynamic_index_in_dim(rest, k, -1, keepdims=False), 0)
        pivot = jnp.real(lax.dynamic_index_in_dim(column, k, -1, keepdims=False))
        info = jnp.where((info == 0) & ~(pivot > 0), (k + 1).astype(jnp.int32), info)
        scale = jnp.where(pivot > 0, pivot, 1)[..., None, None]
        return rest - column[..., :, None] * jnp.conj(column[..., None, :]) / scale, info

    return lax.fori_loop(0, n, step, (a, no_errors(a)))[1]


@lowers_jnp(aten.cholesky_inverse.default)
def cholesky_inverse(x: Array, upper: bool = False) -> Array:
    return cholesky_solution(jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape), x, upper)


@lowers_jnp(aten.cholesky_solve.default)
def cholesky_solve(x: Array, input2: Array, upper: bool = False) -> Array:
    return cholesky_solution(x, input2, upper)


@lowers_jnp(aten._cholesky_solve_helper.default)
def _cholesky_solve_helper(x: Array, A: Array, upper: bool) -> Array:
    return cholesky_solution(x, A, upper)


def cholesky_solution(b: Array, factor: Array, upper: bool) -> Array:
    """The solution of ``L L^H x = b`` (or ``U^H U x = b``), batches broadcast."""
    first = triangular(factor, b, upper=upper, adjoint_a=upper)
    return triangular(factor, first, upper=upper, adjoint_a=not upper)


def triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, adjoint_a: bool = False, unit: bool = False
) -> Array:
    """``op(a)^-1 b``, or ``b op(a)^-1``, reading one triangle of ``a``; batches broadcast."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    if not b.size:
        return b
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, transpose_a=adjoint_a, conjugate_a=adjoint_a, unit_diagonal=unit
    )


# ---- QR


@lowers_jnp(aten.linalg_qr.default)
def linalg_qr(A: Array, mode: str = "reduced") -> Any:
    if mode == "r":
        return jnp.zeros((0,), A.dtype), jnp.linalg.qr(A, mode="r")
    return tuple(jnp.linalg.qr(A, mode=mode))


@lowers_jnp(aten.geqrf.default)
def geqrf(x: Array) -> Any:
    reflectors, scales = jnp.linalg.qr(x, mode="raw")
    return jnp.swapaxes(reflectors, -1, -2), scales


@lowers_jnp(aten.linalg_householder_product.default)
def linalg_householder_product(input: Array, tau: Array) -> Array:
    return lax.linalg.householder_product(input, tau) if input.size else input


@lowers_jnp(aten.ormqr.default)
def ormqr(x: Array, input2: Array, input3: Array, left: bool = True, transpose: bool = False) -> Array:
    if not input3.size:
        return input3
    rows, columns = x.shape[-2:]
    square = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, max(rows - columns, 0))])[..., :rows]
    q = lax.linalg.householder_product(square, input2)
    q = adjoint(q) if transpose else q
    return q @ input3 if left else input3 @ q


# ---- eigenvalues and singular values


@lowers_jnp(aten._linalg_eigh.default)
def _linalg_eigh(A: Array, UPLO: str = "L", compute_v: bool = True) -> Any:
    lower = UPLO.upper() == "L"
    vectors, values = lax.linalg.eigh(A, lower=lower, symmetrize_input=False)
    if not compute_v:
        return values, jnp.zeros((0,), A.dtype)
    signed = functools.partial(with_torch_signs, lower=lower)
    return values, lax.platform_dependent(A, vectors, cpu=signed, default=lambda _, v: v)


@lowers_jnp(aten.linalg_eig.default)
def linalg_eig(x: Array) -> Any:
    return tuple(jnp.linalg.eig(x))


@lowers_jnp(aten._linalg_eigvals.default)
def _linalg_eigvals(x: Array) -> Array:
    return jnp.linalg.eigvals(x)


@lowers_jnp(aten._linalg_svd.default)
def _linalg_svd(A: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
    if not compute_uv:
        nothing = jnp.zeros((0,), A.dtype)
        return nothing, jnp.linalg.svd(A, compute_uv=False), nothing
    return tuple(jnp.linalg.svd(A, full_matrices=full_matrices))


@lowers_jnp(aten.linalg_pinv.atol_rtol_tensor)
def linalg_pinv(x: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False) -> Array:
    """Singular values up to ``max(atol, rtol * largest)`` count as 0; rtol is eps * size unless an atol was given."""
    if not x.size:
        return jnp.swapaxes(x, -1, -2)
    if hermitian:
        u, s = lax.linalg.eigh(x, symmetrize_input=False)
        v, size = u, jnp.abs(s)
    else:
        u, s, vh = jnp.linalg.svd(x, full_matrices=False)
        v, size = adjoint(vh), s
    default = jnp.asarray(jnp.finfo(x.dtype).eps * max(x.shape[-2:]), s.dtype)
    absolute = jnp.zeros((), s.dtype) if atol is None else atol.astype(s.dtype)
    relative = jnp.where(absolute > 0, 0, default) if rtol is None else rtol.astype(s.dtype)
    limit = jnp.maximum(absolute[..., None], relative[..., None] * size.max(-1, keepdims=True))
    keep = size > limit
    inverse = jnp.where(keep, 1 / jnp.where(keep, s, 1), 0)
    return (v * inverse[..., None, :].astype(x.dtype)) @ adjoint(u)


# ---- matrix functions


@lowers(aten.linalg_matrix_exp.default, tier="jnp")
def linalg_matrix_exp(ctx: LoweringContext, x: Value) -> Value:
    if ctx.family == "cpu" and hlo.dtype(x).itemsize == 2:
        ctx.refuse("torch's CPU kernel gives no finite numbers in 16 bits", "call it on x.float()")
    return call(ctx, matrix_exponential, x)


def matrix_exponential(x: Array) -> Array:
    """18 terms of Taylor's series of a power-of-two fraction, squared back: torch's degree and bounds."""
    if x.shape[-1] <= 1:
        return jnp.exp(x)
    norm = jnp.abs(x).sum(-2).max(-1)
    bound = 1.09 if norm.dtype == jnp.float64 else 3.01
    squarings = jnp.maximum(jnp.ceil(jnp.log2(jnp.where(norm > 0, norm / bound, 1))), 0)
    squarings = jnp.where(jnp.isfinite(norm), squarings, 0).astype(jnp.int32)
    result = exponential_series(x * jnp.exp2(-squarings.astype(norm.dtype))[..., None, None].astype(x.dtype))

    def square(i: Array, value: Array) -> Array:
        return jnp.where((i < squarings)[..., None, None], product(value, value), value)

    return lax.fori_loop(0, squarings.max(initial=0), square, result)


SEQUENTIAL = 400
"""torch multiplies matrices of fewer multiplications than this in three plain loops."""


def product(a: Array, b: Array) -> Array:
    """``a @ b`` of square matrices, small ones with torch's roundings: squaring a large exponential again and again
    makes them visible."""
    n = a.shape[-1]
    if n**3 >= SEQUENTIAL:
        return a @ b
    return rounded_sum([a[..., :, k, None] * b[..., None, k, :] for k in range(n)])


def rounded_sum(terms: list[Array]) -> Array:
    """The terms, each rounded, from the first to the last. A choice that changes nothing keeps LLVM from contracting a
    multiplication and an addition into one operation, which no option of XLA does."""
    return functools.reduce(jnp.add, [jnp.where(term == term, term, jnp.nan) for term in terms])


# Rows are polynomials in I, A, A^2, A^3, A^6. Bader, Blanes, Casas: Computing the matrix exponential with an optimized
# Taylor polynomial approximation, Mathematics 7 (2019), table 3.
TAYLOR_18 = (
    (0.0, -1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04, 0.0),
    (0.0, 3.97849749499645077844e-01, 1.36783778460411720168, 4.98289622525382669416e-01, -6.37898194594723280150e-04),
    (
        -10.9676396052962061844,
        1.68015813878906206114,
        5.71779846478865511061e-02,
        -6.98210122488052056106e-03,
        3.34975017086070470649e-05,
    ),
    (
        -9.04316832390810593223e-02,
        -6.76404519071381882256e-02,
        6.75961301770459654925e-02,
        2.95552570429315521194e-02,
        -1.39180257516060693404e-05,
    ),
    (0.0, 0.0, -9.23364619367118555360e-02, -1.69364939002081722752e-02, -1.40086798182036094347e-05),
)


def exponential_series(a: Array) -> Array:
    """Taylor's series of degree 18 in five products."""
    squared = product(a, a)
    cubed = product(a, squared)
    powers = (jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape), a, squared, cubed, product(cubed, cubed))
    b1, b2, b3, b4, b5 = (
        rounded_sum([c * power for c, power in zip(row, powers, strict=True) if c]) for row in TAYLOR_18
    )
    half = product(b1, b5) + b4
    return b2 + product(b3 + half, half)
