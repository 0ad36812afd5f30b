"""Cumulative ops. A reduce_window over the whole past: XLA rewrites it into a tree of small scans on every platform."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.shape import axis
from tpu_compile.lowering.registry import lowers
from tpu_compile.lowering.windows import running

aten = torch.ops.aten


def _cumulative(ctx: LoweringContext, x: Value, dim: int, combiner: str) -> Value:
    x = hlo.convert(hlo.convert(x, ctx.out.dtype), dtypes.opmath(ctx.out.dtype))
    if hlo.rank(x):
        x = running(x, axis(dim, hlo.rank(x)), combiner)
    return hlo.convert(x, ctx.out.dtype)


@lowers(aten.cumsum.default)
def cumsum(ctx: LoweringContext, x: Value, dim: int, *, dtype: Any = None) -> Value:
    return _cumulative(ctx, x, dim, "add")


@lowers(aten.cumprod.default)
def cumprod(ctx: LoweringContext, x: Value, dim: int, *, dtype: Any = None) -> Value:
    return _cumulative(ctx, x, dim, "multiply")


@lowers(aten.cummax.default)
def cummax(ctx: LoweringContext, x: Value, dim: int) -> tuple[Value, Value]:
    return _running_extreme(x, dim, "maximum")


@lowers(aten.cummin.default)
def cummin(ctx: LoweringContext, x: Value, dim: int) -> tuple[Value, Value]:
    return _running_extreme(x, dim, "minimum")


def _running_extreme(x: Value, dim: int, combiner: str) -> tuple[Value, Value]:
    """(running extreme, where it last stood). An element that equals the extreme so far holds the position from there
    on."""
    if not hlo.rank(x):
        return x, hlo.full(0, torch.int64, ())
    at = axis(dim, hlo.rank(x))
    values = running(x, at, combiner)
    holds = hlo.compare(x, values, "EQ")
    if hlo.dtype(x).is_floating_point:
        holds = stablehlo.or_(holds, hlo.is_nan(x))
    counts = hlo.iota(hlo.shape(x), at)
    positions = running(hlo.select(holds, counts, hlo.full_like(counts, 0)), at, "maximum")
    return values, hlo.convert(positions, torch.int64)


@lowers(aten.logcumsumexp.default)
def logcumsumexp(ctx: LoweringContext, x: Value, dim: int) -> Value:
    x = hlo.convert(x, dtypes.opmath(ctx.out.dtype))
    if hlo.rank(x):
        body = _add_complex_exponentials if hlo.dtype(x).is_complex else _add_exponentials
        x = running(x, axis(dim, hlo.rank(x)), body, init=-math.inf)
    return hlo.convert(x, ctx.out.dtype)


def _add_exponentials(a: Value, b: Value) -> Value:
    """log(exp(a) + exp(b)). Equal infinities have no difference: their sum is the answer, and so it is for NaN."""
    difference = stablehlo.subtract(a, b)
    small = stablehlo.log_plus_one(stablehlo.exponential(stablehlo.negate(stablehlo.abs(difference))))
    return hlo.select(hlo.is_nan(difference), stablehlo.add(a, b), stablehlo.add(stablehlo.maximum(a, b), small))


def _add_complex_exponentials(a: Value, b: Value) -> Value:
    first = hlo.compare(stablehlo.real(a), stablehlo.real(b), "GE")
    high, low = hlo.select(first, a, b), hlo.select(first, b, a)
    ratio = stablehlo.exponential(stablehlo.subtract(low, high))
    total = stablehlo.add(high, stablehlo.log_plus_one(ratio))
    nothing = hlo.compare(stablehlo.real(high), hlo.full_like(stablehlo.real(high), -math.inf), "EQ")
    return hlo.select(nothing, high, total)
