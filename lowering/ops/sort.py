"""Sorting and picking by rank. NaN counts as the greatest number, as torch has it: last if ascending, first if
descending."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.indexing import take_along
from tpu_compile.lowering.ops.quickselect import nth_element, quickselect
from tpu_compile.lowering.ops.shape import axis
from tpu_compile.lowering.registry import lowers
from tpu_compile.lowering.windows import running

aten = torch.ops.aten


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


def sort_with_positions(x: Value, at: int, descending: bool = False, stable: bool = True) -> tuple[Value, Value]:
    """(sorted values, their former positions as i32)."""
    positions = hlo.iota(hlo.shape(x), at)
    values, order = hlo.sort([x, positions], at, lambda a, b, *_: before(a, b, descending), stable)
    return values, order


def _sorted(x: Value, dim: int, descending: bool, stable: bool) -> tuple[Value, Value]:
    if not hlo.rank(x):
        return x, hlo.full(0, torch.int64, ())
    values, order = sort_with_positions(x, axis(dim, hlo.rank(x)), descending, stable)
    return values, hlo.convert(order, torch.int64)


@lowers(aten.sort.default)
def sort(ctx: LoweringContext, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    """Equal elements come in no promised order; on a CPU, torch and XLA happen to run the same std::sort."""
    return _sorted(x, dim, descending, stable=False)


@lowers(aten.sort.stable)
def sort_stable(
    ctx: LoweringContext, x: Value, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Value, Value]:
    return _sorted(x, dim, descending, bool(stable))


@lowers(aten.topk.default)
def topk(
    ctx: LoweringContext, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    if not hlo.rank(x):
        return hlo.reshape(x, ctx.outs[0].shape), hlo.full(0, torch.int64, ctx.outs[1].shape)
    if not math.prod(ctx.outs[0].shape):
        return tuple(hlo.full(0, out.dtype, out.shape) for out in ctx.outs)
    at = axis(dim, hlo.rank(x))
    wanted = min(k + 1, hlo.shape(x)[at])  # one more: whether it equals the last
    floats = largest and hlo.dtype(x) in (torch.float32, torch.bfloat16, torch.float16)
    ranked, order = _top_floats(x, wanted, at) if floats else sort_with_positions(x, at, descending=largest)

    def as_eager() -> Value:
        return _rowwise(x, at, lambda rows: _top_among_ties(rows, k, largest, sorted))

    order = hlo.slice_axis(order, at, 0, k)
    if _ties_as_eager(ctx, x) and k * 64 > hlo.shape(x)[at]:
        order = _unless_tied(hlo.slice_axis(ranked, at, 0, wanted), at, largest, order, as_eager)
    return take_along(x, order, at), hlo.convert(order, torch.int64)


def _top_floats(x: Value, k: int, at: int) -> tuple[Value, Value]:
    """XLA's own top-k, as float32: fast, and ordered by sign bit, so that NaNs are made positive to come first.

    It is a sort that XLA recognises by the slices of its results: nothing may slice them further.
    """
    last = hlo.rank(x) - 1
    key = hlo.move_axis(hlo.convert(x, torch.float32), at, last)
    key = hlo.select(hlo.is_nan(key), hlo.full_like(key, math.nan), key)
    key = hlo.select(hlo.compare(key, hlo.full_like(key, 0), "EQ"), hlo.full_like(key, 0), key)  # -0 is no less than 0
    sizes = [*hlo.shape(key)[:-1], k]
    results = [hlo.tensor_type(sizes, torch.float32), hlo.tensor_type(sizes, torch.int32)]
    values, order = hlo.optimization_barrier(chlo.TopKOp(key, k, results=results).results)
    return hlo.move_axis(values, last, at), hlo.move_axis(order, last, at)


def _top_among_ties(rows: Value, k: int, largest: bool, sorted: bool) -> Value:
    """The positions that torch's CPU kernel gives: the k-th element's place is final, those before it are sorted."""

    def first(a: Value, b: Value) -> Value:
        return before(a, b, largest)

    order = hlo.slice_axis(nth_element(rows, k - 1, first), 1, 0, k)
    if not sorted or k < 3:
        return order
    head = hlo.slice_axis(order, 1, 0, k - 1)
    values = take_along(rows, head, 1)
    _, head = hlo.sort([values, head], 1, lambda a, b, *_: first(a, b), stable=False)
    return hlo.concatenate([head, hlo.slice_axis(order, 1, k - 1, k)], 1)


def _ties_as_eager(ctx: LoweringContext, x: Value) -> bool:
    """Whether equal elements come in the order of torch's CPU kernels: where ties are common, at the price of a second
    branch that takes XLA a few tenths of a second to compile. float32 and float64, and other platforms, give the first
    ones."""
    return ctx.family == "cpu" and hlo.dtype(x) not in (torch.float32, torch.float64)


def _unless_tied(ranked: Value, at: int, descending: bool, order: Value, as_eager: Callable[[], Value]) -> Value:
    """``order``, or what ``as_eager`` gives if two neighbours of the ``ranked`` elements are equal somewhere."""
    n = hlo.shape(ranked)[at]
    if n < 2:
        return order
    low, high = hlo.slice_axis(ranked, at, 0, n - 1), hlo.slice_axis(ranked, at, 1, n)
    apart = hlo.reduce(before(low, high, descending), range(hlo.rank(ranked)), "and")
    return hlo.case(hlo.convert(apart, torch.int32), [as_eager, lambda: order], [order.type])[0]


def _rowwise(x: Value, at: int, select: Callable[[Value], Value]) -> Value:
    """``select`` of [rows, n] → [rows, k], applied along one axis."""
    moved = hlo.move_axis(x, at, hlo.rank(x) - 1)
    batch, n = hlo.shape(moved)[:-1], hlo.shape(moved)[-1]
    chosen = select(hlo.reshape(moved, [math.prod(batch), n]))
    return hlo.move_axis(hlo.reshape(chosen, [*batch, hlo.shape(chosen)[1]]), hlo.rank(x) - 1, at)


# ---- one element by rank


def _picked(ctx: LoweringContext, value: Value, position: Value) -> tuple[Value, Value]:
    values, indices = ctx.outs
    return hlo.reshape(value, values.shape), hlo.reshape(hlo.convert(position, torch.int64), indices.shape)


@lowers(aten.kthvalue.default)
def kthvalue(ctx: LoweringContext, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    if not hlo.rank(x):
        return _picked(ctx, x, hlo.full(0, torch.int32, ()))
    at = axis(dim, hlo.rank(x))
    if not hlo.numel(x):
        return tuple(hlo.full(0, out.dtype, out.shape) for out in ctx.outs)
    values, ranks = sort_with_positions(x, at)
    order = hlo.slice_axis(ranks, at, k - 1, k)
    if _ties_as_eager(ctx, x):
        near = hlo.slice_axis(values, at, max(k - 2, 0), min(k + 1, hlo.shape(x)[at]))
        order = _unless_tied(
            near, at, False, order, lambda: _rowwise(x, at, lambda rows: quickselect(rows, k - 1, before))
        )
    return _picked(ctx, take_along(x, order, at), order)


def _median(x: Value, at: int, ignore_nan: bool) -> tuple[Value, Value]:
    """(lower median, its position), the axis kept as size 1. A NaN is the median, unless ignored; the first one,
    then."""
    values, order = sort_with_positions(x, at)
    n = hlo.shape(x)[at]
    sizes = [1 if i == at else s for i, s in enumerate(hlo.shape(x))]
    rank = hlo.full((n - 1) // 2, torch.int32, sizes)
    if hlo.dtype(x).is_floating_point:
        numbers = hlo.convert(stablehlo.not_(hlo.is_nan(x)), torch.int32)
        count = hlo.reshape(hlo.reduce(numbers, [at], "add"), sizes)
        rank = _median_rank(count, n, ignore_nan)
    return take_along(values, rank, at), take_along(order, rank, at)


def _median_rank(count: Value, n: int, ignore_nan: bool) -> Value:
    """The place of the median among sorted values of which ``count`` are numbers and the rest, at the end, NaN."""
    if not ignore_nan:
        return hlo.select(hlo.compare(count, hlo.full_like(count, n), "EQ"), hlo.full_like(count, (n - 1) // 2), count)
    last = stablehlo.maximum(stablehlo.subtract(count, hlo.full_like(count, 1)), hlo.full_like(count, 0))
    return stablehlo.divide(last, hlo.full_like(count, 2))


def _median_of_all(ctx: LoweringContext, x: Value, ignore_nan: bool) -> Value:
    if not hlo.numel(x):
        return hlo.full(math.nan if ctx.out.dtype.is_floating_point else 0, ctx.out.dtype, ctx.out.shape)
    value, _ = _median(hlo.reshape(x, [hlo.numel(x)]), 0, ignore_nan)
    return hlo.reshape(value, ctx.out.shape)


def _median_of_axis(ctx: LoweringContext, x: Value, dim: int, ignore_nan: bool) -> tuple[Value, Value]:
    if not hlo.rank(x):
        return _picked(ctx, x, hlo.full(0, torch.int32, ()))
    return _picked(ctx, *_median(x, axis(dim, hlo.rank(x)), ignore_nan))


@lowers(aten.median.default)
def median(ctx: LoweringContext, x: Value) -> Value:
    return _median_of_all(ctx, x, ignore_nan=False)


@lowers(aten.nanmedian.default)
def nanmedian(ctx: LoweringContext, x: Value) -> Value:
    return _median_of_all(ctx, x, ignore_nan=True)


@lowers(aten.median.dim)
def median_dim(ctx: LoweringContext, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _median_of_axis(ctx, x, dim, ignore_nan=False)


@lowers(aten.nanmedian.dim)
def nanmedian_dim(ctx: LoweringContext, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _median_of_axis(ctx, x, dim, ignore_nan=True)


@lowers(aten.mode.default)
def mode(ctx: LoweringContext, x: Value, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """The smallest of the most frequent values, and its last position: the end of the first longest run once sorted."""
    if not hlo.rank(x):
        return _picked(ctx, x, hlo.full(0, torch.int32, ()))
    at = axis(dim, hlo.rank(x))
    values, order = sort_with_positions(x, at)
    n = hlo.shape(x)[at]
    counts = hlo.iota(hlo.shape(x), at)
    same = hlo.compare(hlo.slice_axis(values, at, 1, n), hlo.slice_axis(values, at, 0, n - 1), "EQ")
    edge = [0] * hlo.rank(x)
    edge[at] = 1
    same = hlo.pad(same, False, edge, [0] * hlo.rank(x))
    start = running(hlo.select(same, hlo.full_like(counts, 0), counts), at, "maximum")
    length = stablehlo.subtract(counts, start)
    longest = hlo.broadcast_in_dim(
        hlo.reduce(length, [at], "maximum"), hlo.shape(x), [i for i in range(hlo.rank(x)) if i != at]
    )
    ends = hlo.select(hlo.compare(length, longest, "EQ"), counts, hlo.full_like(counts, n - 1))
    sizes = [1 if i == at else s for i, s in enumerate(hlo.shape(x))]
    rank = hlo.reshape(hlo.reduce(ends, [at], "minimum"), sizes)
    return _picked(ctx, take_along(values, rank, at), take_along(order, rank, at))
