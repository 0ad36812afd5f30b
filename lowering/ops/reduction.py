"""Sums, products, extremes, their positions, variance and norms. An empty ``dim`` means all axes; 16-bit floats
accumulate in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def axes(dim: int | Sequence[int] | None, rank: int) -> list[int]:
    """The axes that ``dim`` names, sorted and non-negative; all of them for None or ``[]``."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else dim
    return sorted({d % max(rank, 1) for d in dims}) if rank else []


def fold(ctx: LoweringContext, x: Value, dim: Any, combiner: str, kind: torch.dtype) -> Value:
    """Reduce in dtype ``kind``, give the promised shape and dtype."""
    result = hlo.reduce(hlo.convert(x, kind), axes(dim, hlo.rank(x)), combiner)
    return hlo.reshape(hlo.convert(result, ctx.out.dtype), ctx.out.shape)


@lowers(aten.sum.default, aten.sum.dim_IntList)
def sum_(ctx: LoweringContext, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return fold(ctx, x, dim, "add", dtypes.opmath(ctx.out.dtype))


@lowers(aten.mean.default, aten.mean.dim)
def mean(ctx: LoweringContext, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    kind = dtypes.opmath(ctx.out.dtype)
    total = hlo.reduce(hlo.convert(x, kind), axes(dim, hlo.rank(x)), "add")
    count = hlo.full_like(total, element_count(x, dim))
    return hlo.reshape(hlo.convert(stablehlo.divide(total, count), ctx.out.dtype), ctx.out.shape)


def element_count(x: Value, dim: Any) -> int:
    """How many elements are folded into one."""
    count = 1
    for a in axes(dim, hlo.rank(x)):
        count *= hlo.shape(x)[a]
    return count


@lowers(aten.prod.default, aten.prod.dim_int)
def prod(ctx: LoweringContext, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return fold(ctx, x, dim, "multiply", dtypes.opmath(ctx.out.dtype))


@lowers(aten.amax.default)
def amax(ctx: LoweringContext, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return fold(ctx, x, dim, "maximum", ctx.out.dtype)


@lowers(aten.amin.default)
def amin(ctx: LoweringContext, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return fold(ctx, x, dim, "minimum", ctx.out.dtype)


@lowers(aten.max.default)
def max_(ctx: LoweringContext, x: Value) -> Value:
    return fold(ctx, x, None, "maximum", ctx.out.dtype)


@lowers(aten.min.default)
def min_(ctx: LoweringContext, x: Value) -> Value:
    return fold(ctx, x, None, "minimum", ctx.out.dtype)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_(ctx: LoweringContext, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return fold(ctx, hlo.convert(x, torch.bool), dim, "or", torch.bool)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def all_(ctx: LoweringContext, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return fold(ctx, hlo.convert(x, torch.bool), dim, "and", torch.bool)


# ---- positions


def arg_reduce(x: Value, at: int, greatest: bool) -> tuple[Value, Value]:
    """(extreme value, its first position as i32) along one axis. A NaN wins over every number, the first NaN over
    later ones."""
    positions = hlo.iota(hlo.shape(x), at)
    kind = hlo.dtype(x)
    inits = [hlo.scalar(hlo.lowest(kind) if greatest else hlo.highest(kind), kind), hlo.scalar(2**31 - 1, torch.int32)]
    direction = "GT" if greatest else "LT"

    def better(a: Value, i: Value, b: Value, j: Value) -> list[Value]:
        wins = hlo.compare(b, a, direction)
        tie = hlo.compare(a, b, "EQ")
        if kind.is_floating_point:
            a_nan, b_nan = hlo.is_nan(a), hlo.is_nan(b)
            wins = stablehlo.or_(wins, stablehlo.and_(b_nan, stablehlo.not_(a_nan)))
            wins = stablehlo.and_(wins, stablehlo.not_(stablehlo.and_(a_nan, stablehlo.not_(b_nan))))
            tie = stablehlo.or_(tie, stablehlo.and_(a_nan, b_nan))
        earlier = stablehlo.and_(tie, hlo.compare(j, i, "LT"))
        take = stablehlo.or_(wins, earlier)
        return [hlo.select(take, b, a), hlo.select(take, j, i)]

    value, index = hlo.reduce_n([x, positions], inits, [at], better)
    return value, index


def _extreme_and_position(ctx: LoweringContext, x: Value, dim: int, greatest: bool) -> tuple[Value, Value]:
    values, indices = ctx.outs
    if not hlo.rank(x):
        return x, hlo.full(0, torch.int64, ())
    value, index = arg_reduce(x, dim % hlo.rank(x), greatest)
    return hlo.reshape(value, values.shape), hlo.reshape(hlo.convert(index, torch.int64), indices.shape)


@lowers(aten.max.dim)
def max_dim(ctx: LoweringContext, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _extreme_and_position(ctx, x, dim, True)


@lowers(aten.min.dim)
def min_dim(ctx: LoweringContext, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _extreme_and_position(ctx, x, dim, False)


def _position(ctx: LoweringContext, x: Value, dim: int | None, greatest: bool) -> Value:
    if not hlo.rank(x):
        return hlo.full(0, torch.int64, ctx.out.shape)
    if dim is None:
        x, dim = hlo.reshape(x, [hlo.numel(x)]), 0
    _, index = arg_reduce(x, dim % hlo.rank(x), greatest)
    return hlo.reshape(hlo.convert(index, torch.int64), ctx.out.shape)


@lowers(aten.argmax.default)
def argmax(ctx: LoweringContext, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _position(ctx, x, dim, True)


@lowers(aten.argmin.default)
def argmin(ctx: LoweringContext, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _position(ctx, x, dim, False)


# ---- moments


def moments(x: Value, dims: Sequence[int], correction: float) -> tuple[Value, Value]:
    """(variance, mean) over ``dims``, in two passes, dims kept as size 1. ``x`` is float or complex."""
    kept = [1 if i in dims else s for i, s in enumerate(hlo.shape(x))]
    count = 1
    for d in dims:
        count *= hlo.shape(x)[d]
    total = hlo.reshape(hlo.reduce(x, dims, "add"), kept)
    average = stablehlo.divide(total, hlo.full_like(total, count))
    centred = stablehlo.subtract(x, hlo.broadcast(average, hlo.shape(x)))
    if hlo.dtype(x).is_complex:
        parts = [stablehlo.multiply(p, p) for p in (stablehlo.real(centred), stablehlo.imag(centred))]
        squares = stablehlo.add(*parts)
    else:
        squares = stablehlo.multiply(centred, centred)
    spread = hlo.reshape(hlo.reduce(squares, dims, "add"), kept)
    return stablehlo.divide(spread, hlo.full_like(spread, max(count - correction, 0))), average


def _moments(ctx: LoweringContext, x: Value, dim: Any, correction: Any) -> tuple[Value, Value]:
    x = hlo.convert(x, dtypes.opmath(hlo.dtype(x)))
    return moments(x, axes(dim, hlo.rank(x)), 1 if correction is None else correction)


def _finish(spec: Any, value: Value) -> Value:
    return hlo.reshape(hlo.convert(value, spec.dtype), spec.shape)


@lowers(aten.var.correction)
def var(ctx: LoweringContext, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    return _finish(ctx.out, _moments(ctx, x, dim, correction)[0])


@lowers(aten.std.correction)
def std(ctx: LoweringContext, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    return _finish(ctx.out, stablehlo.sqrt(_moments(ctx, x, dim, correction)[0]))


@lowers(aten.var_mean.correction)
def var_mean(
    ctx: LoweringContext, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    spread, average = _moments(ctx, x, dim, correction)
    return _finish(ctx.outs[0], spread), _finish(ctx.outs[1], average)


@lowers(aten.logsumexp.default)
def logsumexp(ctx: LoweringContext, x: Value, dim: Any, keepdim: bool = False) -> Value:
    """Shifted by the greatest (real part), so that nothing overflows."""
    x = hlo.convert(x, dtypes.opmath(ctx.out.dtype))
    dims = axes(dim, hlo.rank(x))
    kept = [1 if i in dims else s for i, s in enumerate(hlo.shape(x))]
    top = hlo.reduce(stablehlo.real(x) if hlo.dtype(x).is_complex else x, dims, "maximum")
    finite = hlo.compare(stablehlo.abs(top), hlo.full_like(top, math.inf), "LT")
    top = hlo.convert(hlo.select(finite, top, hlo.full_like(top, 0)), hlo.dtype(x))
    shifted = stablehlo.subtract(x, hlo.broadcast(hlo.reshape(top, kept), hlo.shape(x)))
    total = hlo.reduce(stablehlo.exponential(shifted), dims, "add")
    return _finish(ctx.out, stablehlo.add(stablehlo.log(total), top))


# ---- norms and hashes


@lowers(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    ctx: LoweringContext, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    kind = dtypes.opmath(ctx.out.dtype)
    x = hlo.convert(x, dtypes.complex_of(kind) if hlo.dtype(x).is_complex else kind)
    return _finish(ctx.out, vector_norm(x, axes(dim, hlo.rank(x)), float(ord)))


def vector_norm(x: Value, dims: Sequence[int], order: float) -> Value:
    """The norm of the given order over ``dims`` (dropped); ``x`` is float32 or wider, or complex."""
    if order == 0:
        return hlo.reduce(hlo.convert(hlo.convert(x, torch.bool), dtypes.real(hlo.dtype(x))), dims, "add")
    if order == 2:
        parts = [stablehlo.real(x), stablehlo.imag(x)] if hlo.dtype(x).is_complex else [x]
        squares = [stablehlo.multiply(p, p) for p in parts]
        return stablehlo.sqrt(hlo.reduce(squares[0] if len(squares) == 1 else stablehlo.add(*squares), dims, "add"))
    size = stablehlo.abs(x)
    if math.isinf(order):
        return hlo.reduce(size, dims, "maximum" if order > 0 else "minimum")
    if order == 1:
        return hlo.reduce(size, dims, "add")
    total = hlo.reduce(stablehlo.power(size, hlo.full_like(size, order)), dims, "add")
    return stablehlo.power(total, hlo.full_like(total, 1 / order))


@lowers(aten.hash_tensor.default)
def hash_tensor(ctx: LoweringContext, x: Value, dim: Any = (), *, keepdim: bool = False, mode: int = 0) -> Value:
    """The exclusive or of all elements: of floats the bits as float64, of integers the sign-extended 64 bits."""
    if hlo.dtype(x).is_floating_point:
        wide = hlo.convert(x, torch.float64)
        bits = stablehlo.bitcast_convert(hlo.tensor_type(hlo.shape(x), torch.uint64), wide)
    else:
        bits = hlo.convert(hlo.convert(x, torch.int64), torch.uint64)
    return hlo.reshape(hlo.reduce(bits, axes(dim, hlo.rank(x)), "xor"), ctx.out.shape)
