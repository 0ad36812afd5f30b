"""Linear systems, inverses and determinants, by jax.numpy. Pivots are LAPACK's: int32, counted from 1."""

from __future__ import annotations

from typing import Any

import torch

from tpu_compile.lowering.jnp import jnp, lax, lowers_jnp
from tpu_compile.lowering.ops.linalg import Array, adjoint, triangular

aten = torch.ops.aten


@lowers_jnp(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(
    x: Array, B: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    return triangular(x, B, upper=upper, left=left, unit=unitriangular)


@lowers_jnp(aten.triangular_solve.default)
def triangular_solve(
    x: Array, A: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    """(solution, a copy of A, batches broadcast); ``transpose`` does not conjugate."""
    batch = jnp.broadcast_shapes(A.shape[:-2], x.shape[:-2])
    copy = jnp.broadcast_to(A, (*batch, *A.shape[-2:]))
    a = jnp.swapaxes(copy, -1, -2) if transpose else copy
    return triangular(a, x, upper=upper != transpose, unit=unitriangular), copy


# ---- LU


def lu(a: Array) -> Any:
    """(packed factors, pivots counted from 1, info: the first pivot that is exactly 0)."""
    factors, pivots, _ = lax.linalg.lu(a)
    zero = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    if not zero.shape[-1]:
        return factors, pivots.astype(jnp.int32), jnp.zeros(a.shape[:-2], jnp.int32)
    first = jnp.where(zero.any(-1), jnp.argmax(zero, -1) + 1, 0)
    return factors, (pivots + 1).astype(jnp.int32), first.astype(jnp.int32)


@lowers_jnp(aten.linalg_lu_factor_ex.default)
def linalg_lu_factor_ex(A: Array, *, pivot: bool = True, check_errors: bool = False) -> Any:
    return lu(A)


@lowers_jnp(aten.linalg_lu.default)
def linalg_lu(A: Array, *, pivot: bool = True) -> Any:
    factors, pivots, _ = lu(A)
    return unpacked_pivots(factors, pivots), *unpacked(factors)


@lowers_jnp(aten.lu_unpack.default)
def lu_unpack(LU_data: Array, LU_pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    nothing = jnp.zeros((0,), LU_data.dtype)
    permutation = unpacked_pivots(LU_data, LU_pivots) if unpack_pivots else nothing
    return permutation, *(unpacked(LU_data) if unpack_data else (nothing, nothing))


def unpacked(factors: Array) -> tuple[Array, Array]:
    """L with its unit diagonal, and U."""
    rank = min(factors.shape[-2:])
    lower = jnp.tril(factors[..., :, :rank], -1) + jnp.eye(factors.shape[-2], rank, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :rank, :])


def permutation_of(pivots: Array, size: int) -> Array:
    """The order of rows after all the swaps."""
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, size)


def unpacked_pivots(factors: Array, pivots: Array) -> Array:
    """The permutation matrix P of ``A = P L U``."""
    rows = factors.shape[-2]
    order = permutation_of(pivots, rows)
    return (order[..., None, :] == jnp.arange(rows)[:, None]).astype(factors.dtype)


@lowers_jnp(aten.linalg_lu_solve.default)
def linalg_lu_solve(LU: Array, pivots: Array, B: Array, *, left: bool = True, adjoint: bool = False) -> Array:
    return lu_solution(LU, pivots, B, left, adjoint)


def lu_solution(factors: Array, pivots: Array, b: Array, left: bool = True, adjoint_a: bool = False) -> Array:
    """The solution x of ``A x = b`` or ``x A = b``, with A or its adjoint, batches broadcast."""
    if not left:
        return adjoint(lu_solution(factors, pivots, adjoint(b), True, not adjoint_a))
    batch = jnp.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    if not b.size:
        return b
    order = jnp.broadcast_to(permutation_of(pivots, factors.shape[-1]), (*batch, factors.shape[-1]))[..., None]
    if not adjoint_a:
        b = jnp.take_along_axis(b, order, -2)
        return triangular(factors, triangular(factors, b, upper=False, unit=True), upper=True)
    first = triangular(factors, b, upper=True, adjoint_a=True)
    second = triangular(factors, first, upper=False, adjoint_a=True, unit=True)
    return jnp.take_along_axis(second, jnp.argsort(order, -2), -2)


@lowers_jnp(aten._linalg_solve_ex.default)
def _linalg_solve_ex(A: Array, B: Array, *, left: bool = True, check_errors: bool = False) -> Any:
    """(solution, LU, pivots, info). ``B`` may be a batch of vectors."""
    factors, pivots, info = lu(A)
    vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    result = lu_solution(factors, pivots, B[..., None] if vector else B, left)
    return result[..., 0] if vector else result, factors, pivots, info


@lowers_jnp(aten.linalg_inv_ex.default)
def linalg_inv_ex(A: Array, *, check_errors: bool = False) -> Any:
    factors, pivots, info = lu(A)
    identity = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
    return lu_solution(factors, pivots, identity), info
