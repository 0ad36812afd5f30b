"""Embedding look-ups, bags of them, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.indexing import scatter_at, take_axis
from tpu_compile.lowering.ops.reduction import vector_norm
from tpu_compile.lowering.ops.search import search
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

SUM, MEAN, MAX = range(3)


@lowers(aten.embedding.default)
def embedding(
    ctx: LoweringContext,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return take_axis(weight, indices, 0)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: LoweringContext,
    grad_output: Value,
    indices: Value,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Value:
    out, count = ctx.out, hlo.numel(indices)
    updates = hlo.reshape(grad_output, [count, *out.shape[1:]])
    return _rows_gradient(ctx, updates, hlo.reshape(indices, [count]), padding_idx, scale_grad_by_freq)


def _rows_gradient(ctx: LoweringContext, updates: Value, rows: Value, padding_idx: int, by_frequency: bool) -> Value:
    """Add ``updates[n]`` to row ``rows[n]``, in float32. The padding row's are sent out of range: a scatter drops
    them."""
    out = ctx.out
    wide, num_weights = dtypes.opmath(out.dtype), out.shape[0]
    zeros = hlo.full(0, wide, out.shape)
    if not hlo.numel(updates):
        return hlo.convert(zeros, out.dtype)
    rows, updates = hlo.index_operand(rows, num_weights), hlo.convert(updates, wide)
    if by_frequency:
        share = hlo.convert(_frequency(rows, num_weights), wide)
        updates = stablehlo.divide(updates, hlo.broadcast_in_dim(share, hlo.shape(updates), [0]))
    padding = hlo.compare(rows, hlo.full_like(rows, padding_idx), "EQ")
    rows = hlo.unsqueeze(hlo.select(padding, hlo.full_like(rows, num_weights), rows), 1)
    return hlo.convert(_add_rows(zeros, rows, updates), out.dtype)


def _add_rows(x: Value, rows: Value, updates: Value, combine: str = "add") -> Value:
    return scatter_at(x, rows, updates, combine, update_window=range(1, hlo.rank(updates)), dims=[0])


def _frequency(rows: Value, num_weights: int) -> Value:
    """How often each element's value occurs among ``rows``."""
    ones = hlo.full(1, torch.int32, hlo.shape(rows))
    counts = _add_rows(hlo.full(0, torch.int32, [num_weights]), hlo.unsqueeze(rows, 1), ones)
    return take_axis(counts, rows, 0)


@lowers(aten.embedding_renorm.default)
def embedding_renorm(ctx: LoweringContext, x: Value, indices: Value, max_norm: float, norm_type: float) -> Value:
    """Rows that are looked up and longer than ``max_norm`` are scaled down to it."""
    count = hlo.numel(indices)
    if not count:
        return x
    indices = hlo.reshape(indices, [count])
    rows = hlo.convert(take_axis(x, indices, 0), dtypes.opmath(ctx.out.dtype))
    norm = vector_norm(rows, [1], float(norm_type))
    scale = stablehlo.divide(hlo.full_like(norm, max_norm), stablehlo.add(norm, hlo.full_like(norm, 1e-7)))
    long = hlo.compare(norm, hlo.full_like(norm, max_norm), "GT")
    scale = hlo.select(long, scale, hlo.full_like(norm, 1))
    scaled = stablehlo.multiply(rows, hlo.broadcast_in_dim(scale, hlo.shape(rows), [0]))
    places = hlo.unsqueeze(hlo.index_operand(indices, hlo.shape(x)[0]), 1)
    return _add_rows(x, places, hlo.convert(scaled, ctx.out.dtype), "second")


# ---- bags


def _bags(offsets: Value, count: int) -> Value:
    """The bag (i32) of each of ``count`` samples; ``offsets`` say where each bag begins."""
    places = hlo.iota([count], 0)
    after = search(hlo.convert(offsets, torch.int32), places, right=True)
    return stablehlo.subtract(after, hlo.full_like(after, 1))


def _bag_of(offsets: Value, indices: Value, padding_idx: int, num_bags: int) -> tuple[Value, Value]:
    """(the bag of each sample, the same but out of range for padding)."""
    bag = _bags(offsets, hlo.shape(indices)[0])
    padding = hlo.compare(indices, hlo.full_like(indices, padding_idx), "EQ")
    return bag, hlo.select(padding, hlo.full_like(bag, num_bags), bag)


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    ctx: LoweringContext,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Value, ...]:
    output, offset2bag, bag_size, max_indices = ctx.outs
    num_bags, kind = output.shape[0], dtypes.opmath(output.dtype)
    bag, place = _bag_of(offsets, indices, padding_idx, num_bags)
    place = hlo.unsqueeze(place, 1)
    ones = hlo.full(1, torch.int32, hlo.shape(bag))
    sizes = _add_rows(hlo.full(0, torch.int32, [num_bags]), place, ones)
    rows = hlo.convert(take_axis(weight, indices, 0), kind)
    if per_sample_weights is not None:
        scale = hlo.convert(per_sample_weights, kind)
        rows = stablehlo.multiply(rows, hlo.broadcast_in_dim(scale, hlo.shape(rows), [0]))
    if mode == MAX:
        result, best = _bag_max(rows, indices, place, sizes, output.shape, max_indices.dtype)
    else:
        result, best = _add_rows(hlo.full(0, kind, output.shape), place, rows), None
    if mode == MEAN:
        share = hlo.convert(stablehlo.maximum(sizes, hlo.full_like(sizes, 1)), kind)
        result = stablehlo.divide(result, hlo.broadcast_in_dim(share, output.shape, [0]))
    return (
        hlo.convert(result, output.dtype),
        _sized(bag, offset2bag),
        _sized(sizes, bag_size),
        best if best is not None else hlo.full(0, max_indices.dtype, max_indices.shape),
    )


def _bag_max(
    rows: Value, indices: Value, place: Value, sizes: Value, shape: Any, index_dtype: torch.dtype
) -> tuple[Value, Value]:
    """(greatest of each bag and column, the first index that holds it); zeros for an empty bag."""
    top = _add_rows(hlo.full(-math.inf, hlo.dtype(rows), shape), place, rows, "maximum")
    mine = take_axis(top, hlo.squeeze(place, [1]), 0)
    samples = hlo.iota(hlo.shape(rows), 0)
    never = hlo.full_like(samples, 2**31 - 1)
    holds = hlo.select(hlo.compare(rows, mine, "EQ"), samples, never)
    first = _add_rows(hlo.full(2**31 - 1, torch.int32, shape), place, holds, "minimum")
    best = hlo.convert(take_axis(indices, first, 0), index_dtype)
    empty = hlo.broadcast_in_dim(hlo.compare(sizes, hlo.full_like(sizes, 0), "EQ"), shape, [0])
    return hlo.select(empty, hlo.full_like(top, 0), top), hlo.select(empty, hlo.full_like(best, 0), best)


def _sized(x: Value, spec: Any) -> Value:
    """``x`` as the 1-dim result that FakeTensor promises, which torch leaves shorter or longer where nobody reads
    it."""
    n, wanted = hlo.shape(x)[0], spec.shape[0]
    x = hlo.slice_axis(x, 0, 0, min(n, wanted))
    return hlo.convert(hlo.pad(x, 0, [0], [max(wanted - n, 0)]), spec.dtype)


@lowers(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    ctx: LoweringContext,
    grad: Value,
    indices: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:
    kind = dtypes.opmath(ctx.out.dtype)
    grad = hlo.convert(grad, kind)
    if mode == MAX:
        return _bag_max_gradient(ctx, grad, bag_size, maximum_indices)
    rows = take_axis(grad, offset2bag, 0)
    if mode == MEAN:
        share = take_axis(hlo.convert(bag_size, kind), offset2bag, 0)
        rows = stablehlo.divide(rows, hlo.broadcast_in_dim(share, hlo.shape(rows), [0]))
    if per_sample_weights is not None:
        scale = hlo.convert(per_sample_weights, kind)
        rows = stablehlo.multiply(rows, hlo.broadcast_in_dim(scale, hlo.shape(rows), [0]))
    return _rows_gradient(ctx, rows, indices, padding_idx, scale_grad_by_freq)


def _bag_max_gradient(ctx: LoweringContext, grad: Value, bag_size: Value, maximum_indices: Value) -> Value:
    """Each bag and column hands its gradient to the row that was greatest there."""
    out, shape = ctx.out, hlo.shape(grad)
    empty = hlo.compare(bag_size, hlo.full_like(bag_size, 0), "EQ")
    rows = hlo.index_operand(maximum_indices, out.shape[0])
    rows = hlo.select(hlo.broadcast_in_dim(empty, shape, [0]), hlo.full_like(rows, out.shape[0]), rows)
    vectors = hlo.concatenate([hlo.unsqueeze(rows, 2), hlo.unsqueeze(hlo.iota(shape, 1, hlo.dtype(rows)), 2)], 2)
    zeros = hlo.full(0, hlo.dtype(grad), out.shape)
    return hlo.convert(scatter_at(zeros, vectors, grad, "add", update_window=[], dims=[0, 1]), out.dtype)


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(
    ctx: LoweringContext,
    grad: Value,
    weight: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    mode: int,
    padding_idx: int = -1,
) -> Value:
    kind = dtypes.opmath(ctx.out.dtype)
    count = hlo.shape(indices)[0]
    bag = offset2bag if hlo.shape(offset2bag)[0] == count else _bags(offsets, count)
    mine = hlo.convert(take_axis(grad, bag, 0), kind)
    rows = hlo.convert(take_axis(weight, indices, 0), kind)
    dots = hlo.reduce(stablehlo.multiply(mine, rows), [1], "add")
    padding = hlo.compare(indices, hlo.full_like(indices, padding_idx), "EQ")
    return hlo.convert(hlo.select(padding, hlo.full_like(dots, 0), dots), ctx.out.dtype)


@lowers(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    ctx: LoweringContext,
    grad: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:
    if sparse:
        ctx.refuse("a sparse gradient", "use EmbeddingBag(sparse=False)")
    count = hlo.shape(indices)[0]
    bag = offset2bag if hlo.shape(offset2bag)[0] == count else _bags(offsets, count)
    return embedding_bag_dense_backward(
        ctx,
        grad,
        indices,
        bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )
