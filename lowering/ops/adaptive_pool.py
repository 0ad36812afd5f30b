"""Adaptive pooling: window o of an axis is [floor(o * n / m), ceil((o + 1) * n / m)), for n elements and m windows.

The elements' view of it is the same formula with n and m exchanged, so a gradient is a pooling too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops import pool
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def bounds(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """First element and length of each of ``count`` windows."""
    o = np.arange(count)
    start = o * size // count
    return start, -(-(o + 1) * size // count) - start


def gathered(x: Value, axis: int, count: int) -> tuple[Value, Value]:
    """(windows, which of their elements count): ``axis`` becomes two, [count, longest window]."""
    sizes, rank = hlo.shape(x), hlo.rank(x)
    size, longest = sizes[axis], int(bounds(sizes[axis], count)[1].max())
    kind = torch.int32 if count * size < 2**31 else torch.int64
    o, taps = hlo.iota([count, longest], 0, kind), hlo.iota([count, longest], 1, kind)

    first = stablehlo.divide(stablehlo.multiply(o, hlo.full_like(o, size)), hlo.full_like(o, count))
    place = stablehlo.add(first, taps)
    # ceil((o + 1) * size / count) - 1 is floor(((o + 1) * size - 1) / count)
    end = stablehlo.multiply(stablehlo.add(o, hlo.full_like(o, 1)), hlo.full_like(o, size))
    last = stablehlo.divide(stablehlo.subtract(end, hlo.full_like(o, 1)), hlo.full_like(o, count))
    windows = hlo.gather(
        x,
        hlo.unsqueeze(hlo.index_operand(stablehlo.minimum(place, last), size), 2),
        offset_dims=[i if i < axis else i + 1 for i in range(rank) if i != axis],
        collapsed=(axis,),
        start_index_map=(axis,),
        slice_sizes=[1 if i == axis else n for i, n in enumerate(sizes)],
    )
    return windows, hlo.broadcast_in_dim(hlo.compare(place, last, "LE"), hlo.shape(windows), [axis, axis + 1])


def sums(x: Value, axis: int, count: int) -> Value:
    """The sum of each window of one axis."""
    size = hlo.shape(x)[axis]
    if count == size:
        return x
    if count and size % count == 0:
        split = hlo.reshape(x, [*hlo.shape(x)[:axis], count, size // count, *hlo.shape(x)[axis + 1 :]])
        return hlo.reduce(split, [axis + 1], "add")
    if size and count % size == 0:
        sizes = [*hlo.shape(x)[: axis + 1], count // size, *hlo.shape(x)[axis + 1 :]]
        wide = hlo.broadcast_in_dim(x, sizes, [i if i <= axis else i + 1 for i in range(hlo.rank(x))])
        return hlo.reshape(wide, [*hlo.shape(x)[:axis], count, *hlo.shape(x)[axis + 1 :]])
    windows, mask = gathered(x, axis, count)
    return hlo.reduce(hlo.select(mask, windows, hlo.full_like(windows, 0)), [axis + 1], "add")


def divided(x: Value, axis: int, size: int) -> Value:
    """``x`` over the lengths of its windows, which cover ``size`` elements."""
    _, length = bounds(size, hlo.shape(x)[axis])
    if (length == length[0]).all():
        return stablehlo.divide(x, hlo.full_like(x, int(length[0])))
    column = hlo.dense(length.astype(dtypes.NUMPY[hlo.dtype(x)]), hlo.dtype(x))
    return stablehlo.divide(x, hlo.broadcast_in_dim(column, hlo.shape(x), [axis]))


def _average(ctx: LoweringContext, x: Value, spatial: int) -> Value:
    out = ctx.out
    if 0 in out.shape:
        return hlo.full(0, out.dtype, out.shape)
    x = hlo.convert(x, dtypes.opmath(out.dtype))
    for axis in range(hlo.rank(x) - spatial, hlo.rank(x)):
        x = divided(sums(x, axis, out.shape[axis]), axis, hlo.shape(x)[axis])
    return hlo.convert(x, out.dtype)


@lowers(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(ctx: LoweringContext, x: Value, output_size: Sequence[int]) -> Value:
    return _average(ctx, x, 2)


@lowers(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(ctx: LoweringContext, x: Value, output_size: Sequence[int]) -> Value:
    return _average(ctx, x, 3)


def _average_backward(ctx: LoweringContext, grad: Value, spatial: int) -> Value:
    out = ctx.out
    if hlo.numel(grad) == 0 or 0 in out.shape:
        return hlo.full(0, out.dtype, out.shape)
    grad = hlo.convert(grad, dtypes.opmath(out.dtype))
    for axis in range(hlo.rank(grad) - spatial, hlo.rank(grad)):
        grad = sums(divided(grad, axis, out.shape[axis]), axis, out.shape[axis])
    return hlo.convert(grad, out.dtype)


@lowers(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(ctx: LoweringContext, grad_output: Value, x: Value) -> Value:
    return _average_backward(ctx, grad_output, 2)


@lowers(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d_backward(ctx: LoweringContext, grad_output: Value, x: Value) -> Value:
    return _average_backward(ctx, grad_output, 3)


# ---- max


def _max_along(x: Value, index: Value, axis: int, count: int) -> tuple[Value, Value]:
    (values, mask), (places, _) = gathered(x, axis, count), gathered(index, axis, count)
    element = hlo.dtype(x)
    values = hlo.select(mask, values, hlo.full_like(values, pool.lowest(element)))
    places = hlo.select(mask, places, hlo.full_like(places, -1))
    inits = [hlo.scalar(pool.lowest(element), element), hlo.scalar(-1, torch.int32)]
    value, place = hlo.reduce_n([values, places], inits, [axis + 1], pool.either)
    return value, place


def _max(ctx: LoweringContext, x: Value, spatial: int) -> tuple[Value, Value]:
    values, indices = ctx.outs
    if 0 in values.shape:
        return hlo.full(0, values.dtype, values.shape), hlo.full(0, indices.dtype, indices.shape)
    axes = range(hlo.rank(x) - spatial, hlo.rank(x))
    index = pool.flat_positions(x, axes)
    for axis in reversed(axes):
        x, index = _max_along(x, index, axis, values.shape[axis])
    return x, hlo.convert(index, indices.dtype)


@lowers(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(ctx: LoweringContext, x: Value, output_size: Sequence[int]) -> tuple[Value, Value]:
    return _max(ctx, x, 2)


@lowers(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(ctx: LoweringContext, x: Value, output_size: Sequence[int]) -> tuple[Value, Value]:
    return _max(ctx, x, 3)


def _max_backward(ctx: LoweringContext, grad: Value, indices: Value, spatial: int) -> Value:
    grad = hlo.convert(grad, dtypes.opmath(ctx.out.dtype))
    result = pool.scatter_flat(grad, hlo.index_operand(indices, 2**31 - 1), ctx.out.shape, spatial)
    return hlo.convert(result, ctx.out.dtype)


@lowers(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(ctx: LoweringContext, grad_output: Value, x: Value, indices: Value) -> Value:
    return _max_backward(ctx, grad_output, indices, 2)


@lowers(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(ctx: LoweringContext, grad_output: Value, x: Value, indices: Value) -> Value:
    return _max_backward(ctx, grad_output, indices, 3)
