"""segment_reduce: fold consecutive runs of an axis, given by their lengths or by where they begin and end."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.indexing import take_along
from tpu_compile.lowering.ops.scatter import scatter_along
from tpu_compile.lowering.ops.search import search
from tpu_compile.lowering.registry import lowers
from tpu_compile.lowering.windows import running

aten = torch.ops.aten

_COMBINERS = {"sum": "add", "mean": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


def _segments(data: Value, lengths: Value | None, offsets: Value | None) -> tuple[Value, Value, int]:
    """(each element's segment, or one past the last, shaped like ``data``; lengths [batch…, segments]; the axis)."""
    given = lengths if lengths is not None else offsets
    assert given is not None
    at = hlo.rank(given) - 1
    given = hlo.convert(given, torch.int32)
    if lengths is not None:
        ends, sizes = running(given, at, "add"), given
    else:
        last = hlo.shape(given)[at]
        ends = hlo.slice_axis(given, at, 1, last)
        sizes = stablehlo.subtract(ends, hlo.slice_axis(given, at, 0, last - 1))
    places = hlo.iota([*hlo.shape(ends)[:at], hlo.shape(data)[at]], at)
    segment = search(ends, places, right=True)
    return hlo.broadcast_in_dim(segment, hlo.shape(data), range(at + 1)), sizes, at


def _spread(sizes: Value, shape: Any) -> Value:
    return hlo.broadcast_in_dim(sizes, shape, range(hlo.rank(sizes)))


@lowers(aten.segment_reduce.default)
def segment_reduce(
    ctx: LoweringContext,
    data: Value,
    reduce: str,
    *,
    lengths: Value | None = None,
    indices: Value | None = None,
    offsets: Value | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Value:
    out, kind = ctx.out, dtypes.opmath(ctx.out.dtype)
    segment, sizes, at = _segments(data, lengths, offsets)
    combiner = _COMBINERS[reduce]
    start = hlo.full(hlo.identity(combiner, kind) if initial is None else initial, kind, out.shape)
    result = scatter_along(start, at, segment, hlo.convert(data, kind), combiner)
    if reduce == "mean":
        count = _spread(hlo.convert(sizes, kind), out.shape)
        empty = hlo.compare(count, hlo.full_like(count, 0), "EQ")
        nothing = hlo.full_like(result, math.nan) if initial is None else result
        result = hlo.select(empty, nothing, stablehlo.divide(result, count))
    return hlo.convert(result, out.dtype)


@lowers(aten._segment_reduce_backward.default)
def segment_reduce_backward(
    ctx: LoweringContext,
    grad: Value,
    output: Value,
    data: Value,
    reduce: str,
    *,
    lengths: Value | None = None,
    offsets: Value | None = None,
    axis: int = 0,
    initial: Any = None,
) -> Value:
    out, kind = ctx.out, dtypes.opmath(ctx.out.dtype)
    if not out.numel:
        return hlo.full(0, out.dtype, out.shape)
    segment, sizes, at = _segments(data, lengths, offsets)
    data, grad, output = (hlo.convert(t, kind) for t in (data, grad, output))
    mine = take_along(grad, segment, at)
    if reduce == "mean":
        count = take_along(_spread(hlo.convert(sizes, kind), hlo.shape(grad)), segment, at)
        mine = stablehlo.divide(mine, count)
    elif reduce in ("max", "min"):
        mine = _extreme_share(mine, data, take_along(output, segment, at), segment, hlo.shape(grad), at)
    elif reduce == "prod":
        mine = stablehlo.multiply(mine, _others_product(data, output, segment, at, 1 if initial is None else initial))
    inside = hlo.compare(segment, hlo.full_like(segment, hlo.shape(grad)[at]), "LT")
    return hlo.convert(hlo.select(inside, mine, hlo.full_like(mine, 0)), out.dtype)


def _total(x: Value, segment: Value, shape: Any, at: int) -> Value:
    """For each element, the sum of ``x`` over its segment."""
    sums = scatter_along(hlo.full(0, hlo.dtype(x), shape), at, segment, x, "add")
    return take_along(sums, segment, at)


def _extreme_share(mine: Value, data: Value, extreme: Value, segment: Value, shape: Any, at: int) -> Value:
    """The gradient goes to every element that equals the extreme (or is NaN); torch shares it out only where it is
    positive."""
    hit = stablehlo.or_(hlo.compare(data, extreme, "EQ"), hlo.is_nan(data))
    ties = _total(hlo.convert(hit, hlo.dtype(mine)), segment, shape, at)
    positive = hlo.compare(mine, hlo.full_like(mine, 0), "GT")
    return hlo.select(hit, hlo.select(positive, stablehlo.divide(mine, ties), mine), hlo.full_like(mine, 0))


def _others_product(data: Value, output: Value, segment: Value, at: int, initial: Any) -> Value:
    """For each element, the product of the others of its segment (and of ``initial``), right with zeros and NaN among
    them."""
    kind, shape = hlo.dtype(data), hlo.shape(output)
    zero, nan = hlo.compare(data, hlo.full_like(data, 0), "EQ"), hlo.is_nan(data)
    special = stablehlo.or_(zero, nan)
    plain = hlo.select(special, hlo.full_like(data, 1), data)
    rest = take_along(scatter_along(hlo.full(initial, kind, shape), at, segment, plain, "multiply"), segment, at)
    zeros, nans = hlo.convert(zero, torch.int32), hlo.convert(nan, torch.int32)
    other_zeros = stablehlo.subtract(_total(zeros, segment, shape, at), zeros)
    other_nans = stablehlo.subtract(_total(nans, segment, shape, at), nans)
    with_zeros = hlo.select(hlo.compare(other_zeros, hlo.full_like(zeros, 0), "GT"), hlo.full_like(rest, 0), rest)
    exclusive = hlo.select(
        hlo.compare(other_nans, hlo.full_like(nans, 0), "GT"), hlo.full_like(rest, math.nan), with_zeros
    )
    return hlo.select(special, exclusive, stablehlo.divide(take_along(output, segment, at), data))
