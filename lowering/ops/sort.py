"""Sorting and searching. NaN counts as the greatest number, as torch has it: last when ascending, first when descending."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.indexing import take_along
from tpu_compile.lowering.ops.shape import axis
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

SMALL_SEARCH = 128
"""Up to this many boundaries, comparing with all of them beats a binary search, whose every step is a gather."""


def before(a: Value, b: Value, descending: bool = False) -> Value:
    """Whether ``a`` sorts strictly before ``b``."""
    if descending:
        a, b = b, a
    if hlo.dtype(a) == torch.bool:
        return stablehlo.and_(stablehlo.not_(a), b)
    less = hlo.compare(a, b, "LT")
    if not hlo.dtype(a).is_floating_point:
        return less
    return stablehlo.or_(less, stablehlo.and_(hlo.is_nan(b), stablehlo.not_(hlo.is_nan(a))))


def sort_with_positions(x: Value, at: int, descending: bool) -> tuple[Value, Value]:
    """(sorted values, their former positions as i32), stable."""
    positions = hlo.iota(hlo.shape(x), at)
    values, order = hlo.sort([x, positions], at, lambda a, b, *_: before(a, b, descending))
    return values, order


def _sorted(ctx: LoweringContext, x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    if hlo.rank(x) == 0:
        return x, hlo.full(0, torch.int64, ())
    values, order = sort_with_positions(x, axis(dim, hlo.rank(x)), descending)
    return values, hlo.convert(order, torch.int64)


@lowers(aten.sort.default)
def sort(ctx: LoweringContext, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    return _sorted(ctx, x, dim, descending)


@lowers(aten.sort.stable)
def sort_stable(
    ctx: LoweringContext, x: Value, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Value, Value]:
    return _sorted(ctx, x, dim, descending)


@lowers(aten.topk.default)
def topk(
    ctx: LoweringContext, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    if not hlo.rank(x):
        return hlo.reshape(x, ctx.outs[0].shape), hlo.full(0, torch.int64, ctx.outs[1].shape)
    at = axis(dim, hlo.rank(x))
    if k and largest and hlo.dtype(x) in (torch.float32, torch.bfloat16, torch.float16):
        return _top_floats(x, k, at)
    values, order = sort_with_positions(x, at, descending=largest)
    return hlo.slice_axis(values, at, 0, k), hlo.convert(hlo.slice_axis(order, at, 0, k), torch.int64)


def _top_floats(x: Value, k: int, at: int) -> tuple[Value, Value]:
    """XLA's own top-k, which is fast for float32 and orders by sign bit: NaNs are made positive, so that they come first."""
    kind, last = hlo.dtype(x), hlo.rank(x) - 1
    key = hlo.move_axis(hlo.convert(x, torch.float32), at, last)
    key = hlo.select(hlo.is_nan(key), hlo.full_like(key, math.nan), key)
    sizes = [*hlo.shape(key)[:-1], k]
    results = [hlo.tensor_type(sizes, torch.float32), hlo.tensor_type(sizes, torch.int32)]
    values, order = chlo.TopKOp(key, k, results=results).results
    return hlo.move_axis(hlo.convert(values, kind), last, at), hlo.move_axis(hlo.convert(order, torch.int64), last, at)


# ---- searching


def search(boundaries: Value, values: Value, right: bool) -> Value:
    """For each of ``values`` [batch…, m], how many of the sorted ``boundaries`` [batch…, n] stand before it (i32). A NaN stands after all."""
    direction = "GT" if right else "GE"
    n = hlo.shape(boundaries)[-1]
    if n <= SMALL_SEARCH:
        sizes, last = [*hlo.shape(values), n], hlo.rank(values)
        wall = hlo.broadcast_in_dim(boundaries, sizes, [*range(last - 1), last])
        beyond = stablehlo.not_(hlo.compare(wall, hlo.broadcast_in_dim(values, sizes, range(last)), direction))
        return hlo.reduce(hlo.convert(beyond, torch.int32), [last], "add")
    return _binary_search(boundaries, values, direction)


def _binary_search(boundaries: Value, values: Value, direction: str) -> Value:
    n = hlo.shape(boundaries)[-1]
    low, high = hlo.full(0, torch.int32, hlo.shape(values)), hlo.full(n, torch.int32, hlo.shape(values))
    steps = hlo.scalar(n.bit_length(), torch.int32)

    def more(step: Value, *_: Value) -> Value:
        return hlo.compare(step, hlo.scalar(0, torch.int32), "GT")

    def narrow(step: Value, low: Value, high: Value, boundaries: Value, values: Value) -> list[Value]:
        middle = stablehlo.divide(stablehlo.add(low, high), hlo.full_like(low, 2))
        there = take_along(boundaries, middle, hlo.rank(boundaries) - 1)
        open_ = hlo.compare(low, high, "LT")
        beyond = stablehlo.and_(open_, stablehlo.not_(hlo.compare(there, values, direction)))
        stays = stablehlo.and_(open_, hlo.compare(there, values, direction))
        raised = hlo.select(beyond, stablehlo.add(middle, hlo.full_like(middle, 1)), low)
        return [stablehlo.subtract(step, hlo.scalar(1, torch.int32)), raised, hlo.select(stays, middle, high), boundaries, values]

    return hlo.while_([steps, low, high, boundaries, values], more, narrow)[1]


def _common(boundaries: Value, values: Value) -> tuple[Value, Value]:
    kind = dtypes.promote([(hlo.dtype(boundaries), 1), (hlo.dtype(values), 1)])
    return hlo.convert(boundaries, kind), hlo.convert(values, kind)


@lowers(aten.bucketize.Tensor)
def bucketize(ctx: LoweringContext, x: Value, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    boundaries, x = _common(boundaries, hlo.reshape(x, [hlo.numel(x)]))
    return hlo.reshape(hlo.convert(search(boundaries, x, right), ctx.out.dtype), ctx.out.shape)


@lowers(aten.bucketize.Scalar)
def bucketize_scalar(
    ctx: LoweringContext, x: Any, boundaries: Value, *, out_int32: bool = False, right: bool = False
) -> Value:
    return bucketize(ctx, hlo.scalar(x, hlo.dtype(boundaries)), boundaries, out_int32=out_int32, right=right)


@lowers(aten.searchsorted.Tensor)
def searchsorted(
    ctx: LoweringContext,
    sorted_sequence: Value,
    x: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    right = right or side == "right"
    if sorter is not None:
        sorted_sequence = take_along(sorted_sequence, sorter, hlo.rank(sorter) - 1)
    if hlo.rank(sorted_sequence) == 1:
        x = hlo.reshape(x, [hlo.numel(x)])
    sequence, x = _common(sorted_sequence, x)
    return hlo.reshape(hlo.convert(search(sequence, x, right), ctx.out.dtype), ctx.out.shape)


@lowers(aten.searchsorted.Scalar)
def searchsorted_scalar(
    ctx: LoweringContext,
    sorted_sequence: Value,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    value = hlo.scalar(x, hlo.dtype(sorted_sequence))
    return searchsorted(ctx, sorted_sequence, value, out_int32=out_int32, right=right, side=side, sorter=sorter)


