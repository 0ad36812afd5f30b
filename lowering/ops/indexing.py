"""Reading and writing at tensor indices: index, index_put, gather, index_select, take, put and the index_* family.

Indices are narrowed to i32 wherever the sizes allow. Python's negative indices are valid where torch takes them (index,
index_put, take, put), and only there. What lies out of range is an error in torch: here reads are clamped and writes
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.shape import axis
from tpu_compile.lowering.registry import lowers
from tpu_compile.lowering.windows import running

aten = torch.ops.aten

Combine = str | Callable[[Value, Value], Value]


def take_axis(x: Value, index: Value, at: int) -> Value:
    """``x`` at the positions ``index`` (any shape, non-negative) of one axis: shape[:at] + index.shape +
    shape[at+1:]."""
    sizes = hlo.shape(x)
    result = [*sizes[:at], *hlo.shape(index), *sizes[at + 1 :]]
    if not math.prod(result):
        return hlo.full(0, hlo.dtype(x), result)
    index = hlo.index_operand(index, sizes[at])
    window = range(at, at + hlo.rank(index))
    return hlo.gather(
        x,
        index,
        offset_dims=[i for i in range(len(result)) if i not in window],
        collapsed=[at],
        start_index_map=[at],
        slice_sizes=[1 if i == at else s for i, s in enumerate(sizes)],
        index_vector_dim=hlo.rank(index),
    )


# ---- index and index_put


@dataclass(frozen=True)
class Picked:
    """What ``x[indices]`` means: the indexed axes, one index vector per picked position, and where the picked axes
    stand in the result."""

    dims: list[int]
    vectors: Value
    shape: list[int]
    window: list[int]


def picked(x: Value, indices: Sequence[Value | None]) -> Picked:
    """Broadcast the integer ``indices`` against each other; their axes stay in place if adjacent, and come first if
    not."""
    sizes = hlo.shape(x)
    dims = [i for i, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    common = list(np.broadcast_shapes(*(tuple(hlo.shape(index)) for index in given)))
    widest = max([sizes[d] for d in dims], default=0)
    parts = [_wrapped(index, sizes[d], widest, common) for d, index in zip(dims, given, strict=True)]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    first = dims[0] if adjacent else 0
    rest = [s for i, s in enumerate(sizes) if i not in dims]
    shape = [*rest[:first], *common, *rest[first:]]
    window = [i for i in range(len(shape)) if not first <= i < first + len(common)]
    return Picked(dims, hlo.concatenate(parts, len(common)), shape, window)


def _wrapped(index: Value, size: int, widest: int, common: Sequence[int]) -> Value:
    index = hlo.wrap_negative(hlo.index_operand(index, widest), size)
    return hlo.unsqueeze(hlo.broadcast(index, common), len(common))


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: LoweringContext, x: Value, indices: Sequence[Value | None]) -> Value:
    given = [i for i in indices if i is not None]
    if not given:
        return x
    if any(map(_is_mask, given)):
        if len(given) > 1:
            ctx.refuse("a boolean mask together with other index tensors", "use torch.where")
        return _masked_pick(ctx, x, [index is not None for index in indices].index(True), given[0])
    at = picked(x, indices)
    if at.shape != list(ctx.out.shape):
        ctx.refuse("torch promises another shape than it gives, for indices that pick nothing")
    if not ctx.out.numel:
        return hlo.full(0, ctx.out.dtype, ctx.out.shape)
    return hlo.gather(
        x,
        at.vectors,
        offset_dims=at.window,
        collapsed=at.dims,
        start_index_map=at.dims,
        slice_sizes=[1 if i in at.dims else s for i, s in enumerate(hlo.shape(x))],
    )


def _masked_pick(ctx: LoweringContext, x: Value, at: int, mask: Value) -> Value:
    """``x[..., mask, ...]`` where the graph knows how many trues there are: the true positions, packed, index ``x``."""
    mask = hlo.convert(mask, torch.bool)
    sizes, total, count = hlo.shape(x), hlo.numel(mask), ctx.out.shape[at]
    flat = hlo.reshape(mask, [total])
    places = hlo.select(flat, true_positions(flat), hlo.full(count, torch.int32, [total]))
    nowhere, everywhere = hlo.full(0, torch.int32, [count]), hlo.iota([total], 0)
    packed = scatter_at(nowhere, hlo.unsqueeze(places, 1), everywhere, "second", update_window=[], dims=[0])
    x = hlo.reshape(x, [*sizes[:at], total, *sizes[at + hlo.rank(mask) :]])
    return take_axis(x, packed, at)


def _is_mask(index: Value) -> bool:
    return hlo.dtype(index) in (torch.bool, torch.uint8)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: LoweringContext, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    values = hlo.convert(values, hlo.dtype(x))
    given = [i for i in indices if i is not None]
    if not given:
        spread = hlo.broadcast(values, hlo.shape(x))
        return stablehlo.add(x, spread) if accumulate else spread
    if any(map(_is_mask, given)):
        if len(given) > 1:
            ctx.refuse("a boolean mask together with other index tensors", "use torch.where")
        at = [index is not None for index in indices].index(True)
        return _masked_put(x, at, given[0], values, accumulate)
    spots = picked(x, indices)
    if not math.prod(spots.shape):
        return x
    values = hlo.broadcast(_without_leading_ones(values, len(spots.shape)), spots.shape)
    if len(given) == 1 and hlo.numel(given[0]) == 1 and not accumulate:
        return _put_slice(x, [index is not None for index in indices].index(True), given[0], values)
    combine = "add" if accumulate else "second"
    return scatter_at(x, spots.vectors, values, combine, update_window=spots.window, dims=spots.dims)


def _put_slice(x: Value, at: int, index: Value, values: Value) -> Value:
    """One place on one axis, in a loop of one turn, or none if it is out of range: a loop's state is written in place,
    where XLA copies ``x`` for a scatter, and for a slice that is read afterwards."""
    sizes = hlo.shape(x)
    place = hlo.index_operand(hlo.wrap_negative(hlo.reshape(index, []), sizes[at]), max(sizes))
    zero = hlo.full_like(place, 0)
    update = hlo.reshape(values, [1 if axis == at else size for axis, size in enumerate(sizes)])
    starts = [place if axis == at else zero for axis in range(len(sizes))]
    inside = stablehlo.and_(hlo.compare(place, zero, "GE"), hlo.compare(place, hlo.full_like(place, sizes[at]), "LT"))

    def put(_: Value, x: Value) -> list[Value]:
        return [hlo.scalar(False, torch.bool), hlo.dynamic_update_slice(x, update, starts)]

    return hlo.while_([inside, x], lambda going, _: going, put)[1]


@lowers(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(
    ctx: LoweringContext, x: Value, mask: Value, indices: Sequence[Value | None], values: Value
) -> Value:
    """index_put that adds only where ``mask`` holds, at indices clamped into range. torch rounds after each
    addition."""
    sizes = hlo.shape(x)
    if not hlo.numel(x):
        return x
    bounded = [i if i is None else _clamped(i, sizes[d]) for d, i in enumerate(indices)]
    values = hlo.convert(values, hlo.dtype(x))
    at = picked(x, bounded)
    values = hlo.select(hlo.broadcast(mask, hlo.shape(values)), values, hlo.full_like(values, 0))
    return scatter_at(
        x, at.vectors, hlo.broadcast(values, at.shape), stablehlo.add, update_window=at.window, dims=at.dims
    )


def _clamped(index: Value, size: int) -> Value:
    return hlo.clamp(index, hlo.scalar(-size, hlo.dtype(index)), hlo.scalar(size - 1, hlo.dtype(index)))


def _without_leading_ones(values: Value, rank: int) -> Value:
    extra = max(hlo.rank(values) - rank, 0)
    return hlo.squeeze(values, range(extra))


def scatter_at(
    x: Value,
    vectors: Value,
    updates: Value,
    combine: Combine,
    *,
    update_window: Sequence[int],
    dims: Sequence[int],
    **batching: Any,
) -> Value:
    """Combine ``updates`` into ``x`` at index vectors. Named 16-bit sums and products are made in float32 and rounded
    once."""
    kind = hlo.dtype(x)
    wide = dtypes.opmath(kind) if combine in ("add", "multiply") else kind
    if kind == torch.bool and combine in ("add", "multiply"):
        combine = {"add": "or", "multiply": "and"}[str(combine)]
    (result,) = hlo.scatter(
        [hlo.convert(x, wide)],
        vectors,
        [hlo.convert(updates, wide)],
        combine,
        update_window_dims=update_window,
        inserted=dims,
        scatter_dims=dims,
        **batching,
    )
    return hlo.convert(result, kind)


def _masked_put(x: Value, at: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """``x[..., mask, ...] = values``. The axis of picked positions is 1 long in ``values``, or as long as the mask has
    trues."""
    mask = hlo.convert(mask, torch.bool)
    sizes, covered = hlo.shape(x), hlo.rank(mask)
    after = sizes[at + covered :]
    values = _without_leading_ones(values, at + 1 + len(after))
    values = hlo.reshape(values, [1] * (at + 1 + len(after) - hlo.rank(values)) + hlo.shape(values))
    count = hlo.shape(values)[at]
    if count == 0:
        return x
    flat = [*sizes[:at], hlo.numel(mask), *after]
    if count == 1:
        values = hlo.broadcast(values, flat)
    else:
        values = hlo.broadcast(take_axis(values, true_positions(hlo.reshape(mask, [hlo.numel(mask)])), at), flat)
    values = hlo.reshape(values, sizes)
    keep = hlo.broadcast_in_dim(mask, sizes, range(at, at + covered))
    return hlo.select(keep, stablehlo.add(x, values) if accumulate else values, x)


def true_positions(mask: Value) -> Value:
    """For each element of a 1-dim mask, how many trues stand before it (i32): the place of its value in a packed
    list."""
    ones = hlo.convert(mask, torch.int32)
    n = hlo.shape(mask)[0]
    if not n:
        return ones
    return stablehlo.subtract(running(ones, 0, "add"), ones)


# ---- one axis


@lowers(aten.index_select.default)
def index_select(ctx: LoweringContext, x: Value, dim: int, index: Value) -> Value:
    if not hlo.rank(x):
        return hlo.broadcast_in_dim(x, ctx.out.shape, ())
    index = hlo.reshape(index, [hlo.numel(index)])
    return hlo.reshape(take_axis(x, index, axis(dim, hlo.rank(x))), ctx.out.shape)


@lowers(aten.gather.default)
def gather(ctx: LoweringContext, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if not hlo.rank(x):
        return hlo.broadcast_in_dim(x, ctx.out.shape, ())
    if not hlo.rank(index):
        index = hlo.reshape(index, [1] * hlo.rank(x))
    return hlo.reshape(take_along(x, index, axis(dim, hlo.rank(x))), ctx.out.shape)


def take_along(x: Value, index: Value, at: int) -> Value:
    """``result[i, j, …] = x[i, index[i, j, …], …]`` with ``index`` on axis ``at``; ``index`` may be smaller on the
    other axes."""
    sizes = hlo.shape(index)
    if not hlo.numel(index):
        return hlo.full(0, hlo.dtype(x), sizes)
    limits = [s if i == at else sizes[i] for i, s in enumerate(hlo.shape(x))]
    x = hlo.slice_(x, [0] * len(sizes), limits)
    others = [i for i in range(len(sizes)) if i != at]
    return hlo.gather(
        x,
        hlo.index_operand(index, hlo.shape(x)[at]),
        offset_dims=[],
        collapsed=[at],
        start_index_map=[at],
        slice_sizes=[1] * len(sizes),
        operand_batching=others,
        indices_batching=others,
        index_vector_dim=len(sizes),
    )


@lowers(aten.take.default)
def take(ctx: LoweringContext, x: Value, index: Value) -> Value:
    flat = hlo.reshape(x, [hlo.numel(x)])
    index = hlo.wrap_negative(hlo.index_operand(index, hlo.numel(x)), hlo.numel(x))
    return take_axis(flat, index, 0)


@lowers(aten.put.default)
def put(ctx: LoweringContext, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    count, total = hlo.numel(index), hlo.numel(x)
    if not count:
        return x
    index = hlo.wrap_negative(hlo.index_operand(hlo.reshape(index, [count, 1]), total), total)
    flat = scatter_at(
        hlo.reshape(x, [total]),
        index,
        hlo.reshape(source, [count]),
        "add" if accumulate else "second",
        update_window=[],
        dims=[0],
    )
    return hlo.reshape(flat, hlo.shape(x))
