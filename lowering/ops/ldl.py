"""Symmetric indefinite systems, ``A = L D L^T`` with Bunch and Kaufman's pivots, stored as LAPACK's sytrf does.

D has blocks of one or two; a block of two at k has the pivot ``-p`` (counted from 1) in both places, one of one has
``p``. A swap at step k is not applied to the columns of L before k.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tpu_compile.lowering.jnp import jnp, lax, lowers_jnp
from tpu_compile.lowering.ops.linalg import Array

aten = torch.ops.aten

ALPHA = (1 + 17**0.5) / 8


@lowers_jnp(aten.linalg_ldl_factor_ex.default)
def linalg_ldl_factor_ex(x: Array, *, hermitian: bool = False, check_errors: bool = False) -> Any:
    factor = jnp.vectorize(partial(_factor, hermitian=hermitian), signature="(n,n)->(n,n),(n),()")
    if not x.size:
        return x, jnp.zeros(x.shape[:-1], jnp.int32), jnp.zeros(x.shape[:-2], jnp.int32)
    return factor(x)


@lowers_jnp(aten.linalg_ldl_solve.default)
def linalg_ldl_solve(LD: Array, pivots: Array, B: Array, *, hermitian: bool = False) -> Array:
    if not LD.size or not B.size:
        batch = jnp.broadcast_shapes(LD.shape[:-2], B.shape[:-2])
        return jnp.broadcast_to(B, (*batch, *B.shape[-2:]))
    return jnp.vectorize(partial(_solve, hermitian=hermitian), signature="(n,n),(n),(n,m)->(n,m)")(LD, pivots, B)


def _size(a: Array) -> Array:
    """LAPACK's cheap absolute value."""
    return jnp.abs(a.real) + jnp.abs(a.imag) if jnp.iscomplexobj(a) else jnp.abs(a)


def _swap(a: Array, i: Array, j: Array, axis: int) -> Array:
    """``a`` with two places of an axis exchanged."""
    order = jnp.arange(a.shape[axis])
    return jnp.take(a, jnp.where(order == i, j, jnp.where(order == j, i, order)), axis)


def _largest(values: Array, allowed: Array) -> tuple[Array, Array]:
    """(place, size) of the largest entry among the allowed ones; size 0 if there are none."""
    sizes = jnp.where(allowed, _size(values), -1)
    place = jnp.argmax(sizes)
    return place, jnp.maximum(sizes[place], 0)


def _pivot(rest: Array, k: Array) -> tuple[Array, Array, Array]:
    """(row to bring up, whether the block is one of two, whether the column is all 0) at step k."""
    places = jnp.arange(rest.shape[0])
    here = _size(rest[k, k])
    place, column = _largest(rest[:, k], places > k)
    _, row = _largest(rest[:, place], (places >= k) & (places != place))
    stays = (here >= ALPHA * column) | (here * row >= ALPHA * column * column)
    alone = _size(rest[place, place]) >= ALPHA * row
    singular = ~(jnp.maximum(here, column) > 0)
    stays = stays | singular
    return jnp.where(stays, k, place), ~stays & ~alone, singular


def _factor(a: Array, hermitian: bool) -> Any:
    n, places = a.shape[0], jnp.arange(a.shape[0])
    turn = jnp.conj if hermitian else lambda v: v
    lower = jnp.tril(a, -1)
    diagonal = jnp.real(jnp.diagonal(a)).astype(a.dtype) if hermitian else jnp.diagonal(a)
    full = lower + turn(lower.T) + jnp.diag(diagonal)

    def step(state: Any) -> Any:
        k, rest, done, pivots, info = state
        place, two, singular = _pivot(rest, k)
        last = k + two  # the last place of the block
        rest = _swap(_swap(rest, last, place, 0), last, place, 1)
        after = places > last
        columns = jnp.stack([rest[:, k], jnp.where(two, rest[:, last], 0)], 1)
        block = _block(rest[k, k], rest[last, k], rest[k, last], rest[last, last], two)
        block = jnp.where(singular, jnp.eye(2, dtype=a.dtype), block)
        below = jnp.where(after[:, None], columns, 0)
        scaled = below @ _inverse(block)
        rest = rest - scaled @ turn(below.T)
        kept = jnp.where(after, scaled[:, 0], jnp.where(places >= k, columns[:, 0], 0))
        done = done.at[:, k].set(jnp.where(singular, jnp.where(places == k, columns[:, 0], 0), kept))
        second = jnp.where(after, scaled[:, 1], jnp.where(places == last, columns[:, 1], 0))
        done = jnp.where(two & (places == last)[None, :], second[:, None], done)
        number = (jnp.where(two, -1, 1) * (place + 1)).astype(jnp.int32)
        pivots = jnp.where((places >= k) & (places <= last), number, pivots)
        info = jnp.where((info == 0) & singular, k + 1, info).astype(jnp.int32)
        return last + 1, rest, done, pivots, info

    start = (jnp.int32(0), full, jnp.zeros_like(a), jnp.zeros(n, jnp.int32), jnp.int32(0))
    _, _, done, pivots, info = lax.while_loop(lambda state: state[0] < n, step, start)
    return done, pivots, info


def _block(first: Array, lower: Array, upper: Array, last: Array, two: Array) -> Array:
    """A block of D as a 2×2 matrix, filled up with 1 if it is a block of one."""
    return jnp.array([[first, jnp.where(two, upper, 0)], [jnp.where(two, lower, 0), jnp.where(two, last, 1)]])


def _inverse(block: Array) -> Array:
    """Of a 2×2 matrix, scaled by its corner as LAPACK does, so that nothing overflows."""
    corner = block[1, 0]
    paired = corner != 0
    safe = jnp.where(paired, corner, 1)
    p, q, ratio = block[0, 0] / safe, block[1, 1] / safe, block[0, 1] / safe
    inverse = jnp.array([[q, -ratio], [-jnp.ones_like(q), p]]) / ((p * q - ratio) * safe)
    return jnp.where(paired, inverse, jnp.diag(1 / jnp.diagonal(block)))


def _solve(factor: Array, pivots: Array, b: Array, hermitian: bool) -> Array:
    n, places = factor.shape[0], jnp.arange(factor.shape[0])
    turn = jnp.conj if hermitian else lambda v: v
    two = pivots < 0
    target = jnp.abs(pivots) - 1

    def strict(k: Array, last: Array) -> Array:
        """The columns of L at a block, two of them, the second 0 if the block is one of one."""
        pair = jnp.stack([factor[:, k], jnp.where(last > k, factor[:, last], 0)], 1)
        return jnp.where((places > last)[:, None], pair, 0)

    def forward(state: Any) -> Any:
        k, x = state
        last = k + two[k]
        x = _swap(x, last, target[k], 0)
        pair = jnp.stack([x[k], jnp.where(last > k, x[last], 0)])
        x = x - strict(k, last) @ pair
        corner = factor[last, k]
        block = _block(factor[k, k], corner, turn(corner), factor[last, last], last > k)
        solved = _inverse(block) @ pair
        x = x.at[k].set(solved[0])
        return last + 1, jnp.where((last > k) & (places == last)[:, None], solved[1], x)

    def backward(state: Any) -> Any:
        last, x = state
        k = last - two[last]
        sums = turn(strict(k, last)).T @ x
        x = x.at[k].add(-sums[0])
        x = jnp.where((last > k) & (places == last)[:, None], x - sums[1], x)
        return k - 1, _swap(x, last, target[last], 0)

    _, x = lax.while_loop(lambda state: state[0] < n, forward, (jnp.int32(0), b))
    _, x = lax.while_loop(lambda state: state[0] >= 0, backward, (jnp.int32(n - 1), x))
    return x
