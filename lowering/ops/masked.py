"""Ops that take a mask of the tensor's own shape, or pack what a mask picks into a result of known size."""

from __future__ import annotations

import torch

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.indexing import take_axis, true_positions
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.masked_scatter.default)
def masked_scatter(ctx: LoweringContext, x: Value, mask: Value, source: Value) -> Value:
    """The k-th true of the mask takes the k-th element of ``source``."""
    shape = ctx.out.shape
    if not hlo.numel(source):
        return hlo.broadcast(x, shape)
    flat = hlo.reshape(hlo.broadcast(mask, shape), [ctx.out.numel])
    values = take_axis(hlo.reshape(source, [hlo.numel(source)]), true_positions(flat), 0)
    return hlo.select(hlo.reshape(flat, shape), hlo.reshape(values, shape), hlo.broadcast(x, shape))


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(ctx: LoweringContext, grad_output: Value, mask: Value, sizes: object) -> Value:
    """The gradients under the mask, packed to the front of the source's shape; the source's unused tail gets 0."""
    out, shape = ctx.out, hlo.shape(grad_output)
    total = hlo.numel(grad_output)
    flat = hlo.reshape(hlo.broadcast(mask, shape), [total])
    places = hlo.select(flat, true_positions(flat), hlo.full(out.numel, torch.int32, [total]))
    (packed,) = hlo.scatter(
        [hlo.full(0, out.dtype, [out.numel])],
        hlo.unsqueeze(places, 1),
        [hlo.reshape(grad_output, [total])],
        "second",
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
    )
    return hlo.reshape(packed, out.shape)


@lowers(aten.nonzero_static.default)
def nonzero_static(ctx: LoweringContext, x: Value, *, size: int, fill_value: int = -1) -> Value:
    """Positions of the first ``size`` nonzero elements, row by row; the rest is ``fill_value``."""
    total, shape = hlo.numel(x), hlo.shape(x)
    table = hlo.full(fill_value, torch.int64, ctx.out.shape)
    if not ctx.out.numel or not total:
        return table
    flat = hlo.reshape(hlo.convert(x, torch.bool), [total])
    places = hlo.select(flat, true_positions(flat), hlo.full(size, torch.int32, [total]))
    axes = [hlo.reshape(hlo.iota(shape, i, torch.int64), [total, 1]) for i in range(len(shape))]
    (packed,) = hlo.scatter(
        [table],
        hlo.unsqueeze(places, 1),
        [hlo.concatenate(axes, 1)],
        "second",
        update_window_dims=[1],
        inserted=[0],
        scatter_dims=[0],
    )
    return packed
