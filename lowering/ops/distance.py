"""Pairwise distances and their gradients: fused reductions, or for many Euclidean ones a matrix product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.attention import unbroadcast
from tpu_compile.lowering.ops.reduction import vector_norm
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

PRODUCT_ROWS = 25
"""With more rows than this on a side torch computes Euclidean distances through a matrix product."""


def norm_of(difference: Value, p: float) -> Value:
    """The p-norm over the last axis."""
    size, axis = stablehlo.abs(difference), [hlo.rank(difference) - 1]
    if p == 0:
        return hlo.reduce(hlo.convert(hlo.compare(size, hlo.full_like(size, 0), "NE"), hlo.dtype(size)), axis, "add")
    if p == 1:
        return hlo.reduce(size, axis, "add")
    if p == 2:
        return stablehlo.sqrt(hlo.reduce(stablehlo.multiply(size, size), axis, "add"))
    if math.isinf(p):
        return hlo.reduce(size, axis, "maximum", 0)
    total = hlo.reduce(stablehlo.power(size, hlo.full_like(size, p)), axis, "add")
    return stablehlo.power(total, hlo.full_like(total, 1 / p))


def norm_gradient(difference: Value, grad: Value, distance: Value, p: float) -> Value:
    """What each component of ``difference`` gets of ``grad``; 0 where the distance is. All of one shape."""
    zero = hlo.full_like(difference, 0)
    if p == 0:
        return zero
    size, sign = stablehlo.abs(difference), stablehlo.sign(difference)
    if p == 1:
        return stablehlo.multiply(grad, sign)
    if math.isinf(p):
        return hlo.select(hlo.compare(size, distance, "EQ"), stablehlo.multiply(grad, sign), zero)
    if p == 2:
        result = stablehlo.divide(stablehlo.multiply(grad, difference), distance)
    else:
        exponent = hlo.full_like(size, p - 1)
        rise = stablehlo.divide(stablehlo.power(size, exponent), stablehlo.power(distance, exponent))
        result = stablehlo.multiply(stablehlo.multiply(sign, rise), grad)
        if p < 1:
            result = hlo.select(hlo.compare(size, zero, "EQ"), zero, result)
    return hlo.select(hlo.compare(distance, zero, "EQ"), zero, result)


@lowers(aten.dist.default)
def dist(ctx: LoweringContext, x: Value, other: Value, p: Any = 2) -> Value:
    """The p-norm of the whole difference, which torch takes after it has rounded the difference."""
    a, b = (hlo.convert(v, dtypes.promote([(hlo.dtype(x), 1), (hlo.dtype(other), 1)])) for v in (x, other))
    sizes = [max(m, n) if min(m, n) else 0 for m, n in zip(*_padded(hlo.shape(a), hlo.shape(b)), strict=True)]
    difference = stablehlo.subtract(hlo.broadcast(a, sizes), hlo.broadcast(b, sizes))
    norm = vector_norm(hlo.convert(difference, dtypes.opmath(hlo.dtype(difference))), range(len(sizes)), float(p))
    return hlo.reshape(hlo.convert(norm, ctx.out.dtype), ctx.out.shape)


def _padded(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[int]]:
    """Both shapes with ones in front, to one rank."""
    rank = max(len(a), len(b))
    return [1] * (rank - len(a)) + [*a], [1] * (rank - len(b)) + [*b]


def _pairs(a: Value, b: Value) -> tuple[Value, Value]:
    """[..., P, 1, M] and [..., 1, R, M], broadcast to one shape."""
    *lead, p, m = hlo.shape(a)
    r = hlo.shape(b)[-2]
    n, sizes = len(lead), [*lead, p, r, m]
    keep = list(range(n))
    return hlo.broadcast_in_dim(a, sizes, [*keep, n, n + 2]), hlo.broadcast_in_dim(b, sizes, [*keep, n + 1, n + 2])


@lowers(aten._cdist_forward.default)
def cdist_forward(ctx: LoweringContext, x1: Value, x2: Value, p: float, compute_mode: int | None) -> Value:
    out = ctx.out
    if 0 in out.shape or not hlo.shape(x1)[-1]:
        return hlo.full(0, out.dtype, out.shape)
    kind = dtypes.opmath(out.dtype)
    lead = out.shape[:-2]
    a, b = (hlo.broadcast(hlo.convert(v, kind), [*lead, *hlo.shape(v)[-2:]]) for v in (x1, x2))
    many = out.shape[-2] > PRODUCT_ROWS or out.shape[-1] > PRODUCT_ROWS
    if p == 2 and (compute_mode == 1 or (not compute_mode and many)):
        return hlo.convert(euclidean(a, b), out.dtype)
    a, b = _pairs(a, b)
    return hlo.convert(norm_of(stablehlo.subtract(a, b), p), out.dtype)


def euclidean(a: Value, b: Value) -> Value:
    """``sqrt(|a|^2 - 2ab + |b|^2)`` of every pair of rows, negative rounding errors cut off."""
    n = hlo.rank(a) - 2
    sizes = [*hlo.shape(a)[:-1], hlo.shape(b)[-2]]
    squares = [hlo.reduce(stablehlo.multiply(v, v), [n + 1], "add") for v in (a, b)]
    rows = hlo.broadcast_in_dim(squares[0], sizes, [*range(n), n])
    columns = hlo.broadcast_in_dim(squares[1], sizes, [*range(n), n + 1])
    cross = hlo.dot_general(a, b, ((n + 1,), (n + 1,)), (tuple(range(n)), tuple(range(n))))
    total = stablehlo.subtract(stablehlo.add(rows, columns), stablehlo.multiply(cross, hlo.full_like(cross, 2)))
    return stablehlo.sqrt(stablehlo.maximum(total, hlo.full_like(total, 0)))


@lowers(aten._cdist_backward.default)
def cdist_backward(ctx: LoweringContext, grad: Value, x1: Value, x2: Value, p: float, cdist: Value) -> Value:
    out = ctx.out
    if 0 in (*out.shape, *hlo.shape(grad)):
        return hlo.full(0, out.dtype, out.shape)
    kind = dtypes.opmath(out.dtype)
    lead = hlo.shape(cdist)[:-2]
    a, b = _pairs(*(hlo.broadcast(hlo.convert(v, kind), [*lead, *hlo.shape(v)[-2:]]) for v in (x1, x2)))
    sizes = hlo.shape(a)
    pull, length = (hlo.broadcast_in_dim(hlo.convert(v, kind), sizes, range(len(sizes) - 1)) for v in (grad, cdist))
    parts = norm_gradient(stablehlo.subtract(a, b), pull, length, p)
    result = hlo.reduce(parts, [len(sizes) - 2], "add")
    return hlo.convert(unbroadcast(result, out.shape), out.dtype)


# ---- the condensed form: pairs (i, j) with i < j, in row-major order


def condensed(i: Value, j: Value, n: int) -> Value:
    """Where the pair (i, j), i < j, stands among the pairs of ``n`` rows."""
    before = stablehlo.multiply(i, stablehlo.subtract(hlo.full_like(i, 2 * n - 1), i))
    before = stablehlo.divide(before, hlo.full_like(i, 2))
    return stablehlo.add(before, stablehlo.subtract(stablehlo.subtract(j, i), hlo.full_like(i, 1)))


def _pair_indices(n: int) -> tuple[Value, Value]:
    return hlo.iota([n, n], 0), hlo.iota([n, n], 1)


@lowers(aten._pdist_forward.default)
def pdist_forward(ctx: LoweringContext, x: Value, p: float = 2.0) -> Value:
    out = ctx.out
    if 0 in out.shape or not hlo.shape(x)[1]:
        return hlo.full(0, out.dtype, out.shape)
    x = hlo.convert(x, dtypes.opmath(out.dtype))
    square = norm_of(stablehlo.subtract(*_pairs(x, x)), p)
    n = hlo.shape(x)[0]
    i, j = _pair_indices(n)
    # the pairs with i >= j aim behind the end, where scatter drops them
    target = hlo.select(hlo.compare(i, j, "LT"), condensed(i, j, n), hlo.full_like(i, out.shape[0]))
    result = hlo.scatter(
        [hlo.full(0, hlo.dtype(square), out.shape)],
        hlo.unsqueeze(target, 2),
        [square],
        "second",
        update_window_dims=(),
        inserted=(0,),
        scatter_dims=(0,),
    )[0]
    return hlo.convert(result, out.dtype)


@lowers(aten._pdist_backward.default)
def pdist_backward(ctx: LoweringContext, grad: Value, x: Value, p: float, pdist: Value) -> Value:
    out = ctx.out
    if 0 in (*out.shape, *hlo.shape(grad)):
        return hlo.full(0, out.dtype, out.shape)
    kind = dtypes.opmath(out.dtype)
    x, n = hlo.convert(x, kind), out.shape[0]
    a, b = _pairs(x, x)
    squares = (_square_form(hlo.convert(v, kind), n) for v in (grad, pdist))
    pull, length = (hlo.broadcast_in_dim(v, hlo.shape(a), [0, 1]) for v in squares)
    return hlo.convert(hlo.reduce(norm_gradient(stablehlo.subtract(a, b), pull, length, p), [1], "add"), out.dtype)


def _square_form(v: Value, n: int) -> Value:
    """The symmetric matrix of condensed values, its diagonal 0."""
    i, j = _pair_indices(n)
    at = condensed(stablehlo.minimum(i, j), stablehlo.maximum(i, j), n)
    full = hlo.gather(v, hlo.unsqueeze(at, 2), offset_dims=(), collapsed=(0,), start_index_map=(0,), slice_sizes=(1,))
    return hlo.select(hlo.compare(i, j, "EQ"), hlo.full_like(full, 0), full)
