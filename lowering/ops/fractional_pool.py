"""Fractional max pooling: windows of one size whose starts are drawn, for every channel of every sample on its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops import pool
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten
Ints = Sequence[int]


def starts(sample: Value, size: int, count: int, kernel: int) -> Value:
    """i32 [planes, count]: where an axis' windows begin; one number in [0, 1) a plane, torch's arithmetic."""
    planes, kind = hlo.shape(sample)[0], hlo.dtype(sample)
    last = hlo.full(size - kernel, torch.int32, [planes, 1])
    if count == 1:
        return last
    sizes = [planes, count - 1]
    alpha = stablehlo.divide(hlo.full(size - kernel, kind, sizes), hlo.full(count - 1, kind, sizes))
    drawn = hlo.broadcast_in_dim(sample, sizes, [0])
    scaled = stablehlo.multiply(stablehlo.add(hlo.iota(sizes, 1, kind), drawn), alpha)
    base = stablehlo.multiply(drawn, alpha)
    first = stablehlo.subtract(hlo.convert(scaled, torch.int32), hlo.convert(base, torch.int32))
    return hlo.concatenate([first, last], 1)


def windows(x: Value, begin: Value, axis: int, kernel: int) -> Value:
    """[planes, ..., count, kernel, ...] of [planes, ...]: ``axis`` cut into windows at the plane's own starts."""
    planes, count = hlo.shape(begin)
    sizes = [planes, count, kernel]
    at = stablehlo.add(hlo.broadcast_in_dim(begin, sizes, [0, 1]), hlo.iota(sizes, 2))
    rank = hlo.rank(x)
    return hlo.gather(
        x,
        hlo.unsqueeze(at, 3),
        offset_dims=[i if i < axis else i + 1 for i in range(1, rank) if i != axis],
        collapsed=(axis,),
        start_index_map=(axis,),
        slice_sizes=[1 if i in (0, axis) else n for i, n in enumerate(hlo.shape(x))],
        operand_batching=(0,),
        indices_batching=(0,),
    )


def _pool(ctx: LoweringContext, x: Value, kernel: Ints, samples: Value, order: Ints) -> tuple[Value, Value]:
    """``order[i]``: which of a plane's samples belongs to spatial axis i."""
    values, indices = ctx.outs
    spatial = len(kernel)
    if 0 in (*values.shape, *hlo.shape(x)):
        return hlo.full(0, values.dtype, values.shape), hlo.full(0, indices.dtype, indices.shape)
    volume = hlo.shape(x)[-spatial:]
    planes = hlo.numel(x) // math.prod(volume)
    best = hlo.reshape(x, [planes, *volume])
    place = pool.flat_positions(best, range(1, spatial + 1))
    drawn = hlo.reshape(samples, [planes, spatial])
    element = hlo.dtype(x)
    inits = [hlo.scalar(pool.lowest(element), element), hlo.scalar(-1, torch.int32)]
    for axis in range(1, spatial + 1):
        sample = hlo.squeeze(hlo.slice_axis(drawn, 1, order[axis - 1], order[axis - 1] + 1), [1])
        begin = starts(sample, volume[axis - 1], values.shape[axis - 1 - spatial], kernel[axis - 1])
        cut = [windows(v, begin, axis, kernel[axis - 1]) for v in (best, place)]
        best, place = hlo.reduce_n(cut, inits, [axis + 1], pool.either)
    return hlo.reshape(best, values.shape), hlo.reshape(hlo.convert(place, indices.dtype), indices.shape)


@lowers(aten.fractional_max_pool2d.default)
def fractional_max_pool2d(
    ctx: LoweringContext, x: Value, kernel_size: Ints, output_size: Ints, random_samples: Value
) -> tuple[Value, Value]:
    return _pool(ctx, x, kernel_size, random_samples, (1, 0))


@lowers(aten.fractional_max_pool3d.default)
def fractional_max_pool3d(
    ctx: LoweringContext, x: Value, kernel_size: Ints, output_size: Ints, random_samples: Value
) -> tuple[Value, Value]:
    return _pool(ctx, x, kernel_size, random_samples, (0, 1, 2))


def _backward(ctx: LoweringContext, grad: Value, indices: Value, spatial: int) -> Value:
    grad = hlo.convert(grad, dtypes.opmath(ctx.out.dtype))
    result = pool.scatter_flat(grad, hlo.index_operand(indices, 2**31 - 1), ctx.out.shape, spatial)
    return hlo.convert(result, ctx.out.dtype)


@lowers(aten.fractional_max_pool2d_backward.default)
def fractional_max_pool2d_backward(
    ctx: LoweringContext, grad_output: Value, x: Value, kernel_size: Ints, output_size: Ints, indices: Value
) -> Value:
    return _backward(ctx, grad_output, indices, 2)


@lowers(aten.fractional_max_pool3d_backward.default)
def fractional_max_pool3d_backward(
    ctx: LoweringContext, grad_output: Value, x: Value, kernel_size: Ints, output_size: Ints, indices: Value
) -> Value:
    return _backward(ctx, grad_output, indices, 3)
