"""Where values fall among sorted boundaries: searchsorted, bucketize, and the histograms that count them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.indexing import scatter_at, take_along
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

SMALL_SEARCH = 128
"""Up to this many boundaries, comparing with all of them beats a binary search, whose every step is a gather."""


def search(boundaries: Value, values: Value, right: bool) -> Value:
    """How many of the sorted ``boundaries`` [batch…, n] stand before each of ``values`` [batch…, m], as i32; all do
    for a NaN."""
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
    zero, one = hlo.scalar(0, torch.int32), hlo.scalar(1, torch.int32)

    def more(step: Value, *_: Value) -> Value:
        return hlo.compare(step, zero, "GT")

    def narrow(step: Value, low: Value, high: Value) -> list[Value]:
        middle = stablehlo.divide(stablehlo.add(low, high), hlo.full_like(low, 2))
        there = take_along(boundaries, middle, hlo.rank(boundaries) - 1)
        found = hlo.compare(there, values, direction)
        is_open = hlo.compare(low, high, "LT")
        above = hlo.select(stablehlo.and_(is_open, found), middle, high)
        below = stablehlo.and_(is_open, stablehlo.not_(found))
        raised = hlo.select(below, stablehlo.add(middle, hlo.full_like(middle, 1)), low)
        return [stablehlo.subtract(step, one), raised, above]

    return hlo.while_([hlo.scalar(n.bit_length(), torch.int32), low, high], more, narrow)[1]


def _common(boundaries: Value, values: Value) -> tuple[Value, Value]:
    """In the dtype that torch promotes them to, where a 0-dim value gives way."""
    kind = dtypes.promote((hlo.dtype(t), hlo.rank(t)) for t in (boundaries, values))
    return hlo.convert(boundaries, kind), hlo.convert(values, kind)


@lowers(aten.bucketize.Tensor)
def bucketize(
    ctx: LoweringContext, x: Value, boundaries: Value, *, out_int32: bool = False, right: bool = False
) -> Value:
    boundaries, x = _common(boundaries, x)
    found = search(boundaries, hlo.reshape(x, [hlo.numel(x)]), right)
    return hlo.reshape(hlo.convert(found, ctx.out.dtype), ctx.out.shape)


@lowers(aten.bucketize.Scalar)
def bucketize_scalar(
    ctx: LoweringContext, x: Any, boundaries: Value, *, out_int32: bool = False, right: bool = False
) -> Value:
    return bucketize(ctx, _scalar(x, boundaries), boundaries, out_int32=out_int32, right=right)


def _scalar(x: Any, boundaries: Value) -> Value:
    """A Python number in a dtype that keeps its fraction, as torch wraps it."""
    kind = hlo.dtype(boundaries)
    return hlo.scalar(x, torch.get_default_dtype() if isinstance(x, float) and not kind.is_floating_point else kind)


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
    if sorter is not None:
        sorted_sequence = take_along(sorted_sequence, sorter, hlo.rank(sorter) - 1)
    sequence, x = _common(sorted_sequence, x)
    if hlo.rank(sequence) == 1:
        x = hlo.reshape(x, [hlo.numel(x)])
    return hlo.reshape(hlo.convert(search(sequence, x, right or side == "right"), ctx.out.dtype), ctx.out.shape)


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
    value = _scalar(x, sorted_sequence)
    return searchsorted(ctx, sorted_sequence, value, out_int32=out_int32, right=right, side=side, sorter=sorter)


# ---- histograms


def _extent(x: Value, low: float, high: float, margin: float, given: bool) -> tuple[Value, Value]:
    """The outer edges (0-dim): as given, or else the data's own; an empty range grows by ``margin`` on both sides."""
    kind = hlo.dtype(x)
    if given or not hlo.numel(x):
        grown = margin if low == high else 0
        return hlo.scalar(low - grown, kind), hlo.scalar(high + grown, kind)
    axes = range(hlo.rank(x))
    first, last = hlo.reduce(x, axes, "minimum"), hlo.reduce(x, axes, "maximum")
    same, grown = hlo.compare(first, last, "EQ"), hlo.scalar(margin, kind)
    wider = hlo.select(same, grown, hlo.full_like(grown, 0))
    return stablehlo.subtract(first, wider), stablehlo.add(last, wider)


def _edges(low: Value, high: Value, bins: int) -> Value:
    """``bins + 1`` even steps, counted from the nearer end, as torch.linspace does."""
    sizes, kind = [bins + 1], hlo.dtype(low)
    step = hlo.broadcast(stablehlo.divide(stablehlo.subtract(high, low), hlo.scalar(bins, kind)), sizes)
    counts = hlo.iota(sizes, 0)
    back = stablehlo.subtract(hlo.full_like(counts, bins), counts)
    up = stablehlo.add(hlo.broadcast(low, sizes), stablehlo.multiply(step, hlo.convert(counts, kind)))
    down = stablehlo.subtract(hlo.broadcast(high, sizes), stablehlo.multiply(step, hlo.convert(back, kind)))
    return hlo.select(hlo.compare(counts, hlo.full_like(counts, (bins + 1) // 2), "LT"), up, down)


def _bin_of(x: Value, low: Value, high: Value, bins: int, position: Value) -> Value:
    """``position`` (i32) of each element of 1-dim ``x``, the last edge drawn in, and ``bins`` for what is outside the
    edges or NaN."""
    position = stablehlo.minimum(position, hlo.full_like(position, bins - 1))
    inside = stablehlo.and_(
        hlo.compare(x, hlo.broadcast(low, hlo.shape(x)), "GE"), hlo.compare(x, hlo.broadcast(high, hlo.shape(x)), "LE")
    )
    return hlo.select(inside, position, hlo.full_like(position, bins))


def _count(place: Value, bins: Sequence[int], valid_below: int, weight: Value | None, kind: torch.dtype) -> Value:
    """Add up weights (1 each, if none) by place in the flattened bins; places from ``valid_below`` on are dropped."""
    wide = dtypes.opmath(kind)
    ones = hlo.full(1, wide, hlo.shape(place))
    weights = ones if weight is None else hlo.convert(hlo.reshape(weight, hlo.shape(place)), wide)
    zeros = hlo.full(0, wide, [valid_below])
    counts = scatter_at(zeros, hlo.unsqueeze(place, 1), weights, "add", update_window=[], dims=[0])
    return hlo.reshape(counts, bins)


@lowers(aten.histc.default)
def histc(ctx: LoweringContext, x: Value, bins: int = 100, min: Any = 0, max: Any = 0) -> Value:
    flat = hlo.reshape(x, [hlo.numel(x)])
    kind = hlo.dtype(x)
    low, high = _extent(flat, float(min), float(max), 1.0, given=min != max)
    above = stablehlo.subtract(flat, hlo.broadcast(low, hlo.shape(flat)))
    scaled = stablehlo.multiply(above, hlo.full_like(above, bins))
    span = hlo.broadcast(stablehlo.subtract(high, low), hlo.shape(flat))
    position = hlo.convert(stablehlo.divide(scaled, span), torch.int32)
    return hlo.convert(_count(_bin_of(flat, low, high, bins, position), [bins], bins, None, kind), ctx.out.dtype)


def _histogram(columns: Sequence[Value], edges: Sequence[Value], weight: Value | None, density: bool) -> Value:
    """Counts over the product of bins; ``columns`` are the coordinates of each sample, 1-dim, ``edges`` increase."""
    kind = hlo.dtype(columns[0])
    bins = [hlo.shape(e)[0] - 1 for e in edges]
    total = math.prod(bins)
    place = hlo.full(0, torch.int32, hlo.shape(columns[0]))
    outside = hlo.full(False, torch.bool, hlo.shape(place))
    for x, edge, count in zip(columns, edges, bins, strict=True):
        low, high = (hlo.squeeze(hlo.slice_axis(edge, 0, i, i + 1), [0]) for i in (0, count))
        found = search(edge, x, right=True)
        bin_ = _bin_of(x, low, high, count, stablehlo.subtract(found, hlo.full_like(found, 1)))
        outside = stablehlo.or_(outside, hlo.compare(bin_, hlo.full_like(bin_, count), "EQ"))
        place = stablehlo.add(stablehlo.multiply(place, hlo.full_like(place, count)), bin_)
    place = hlo.select(outside, hlo.full_like(place, total), place)
    counts = _count(place, bins, total, weight, kind)
    return hlo.convert(_density(counts, edges) if density else counts, kind)


def _density(counts: Value, edges: Sequence[Value]) -> Value:
    """Each bin's share of the total, by the bin's volume."""
    total = hlo.reduce(counts, range(hlo.rank(counts)), "add")
    counts = stablehlo.divide(counts, hlo.broadcast(total, hlo.shape(counts)))
    for i, edge in enumerate(edges):
        edge = hlo.convert(edge, hlo.dtype(counts))
        n = hlo.shape(edge)[0]
        length = stablehlo.subtract(hlo.slice_axis(edge, 0, 1, n), hlo.slice_axis(edge, 0, 0, n - 1))
        counts = stablehlo.divide(counts, hlo.broadcast_in_dim(length, hlo.shape(counts), [i]))
    return counts


def _columns(x: Value) -> list[Value]:
    """The coordinates of samples [..., d] as d 1-dim values."""
    *lead, width = hlo.shape(x)
    count = math.prod(lead)
    flat = hlo.reshape(x, [count, width])
    return [hlo.reshape(hlo.slice_axis(flat, 1, i, i + 1), [count]) for i in range(width)]


def _even_edges(columns: Sequence[Value], bins: Sequence[int], limits: Sequence[float] | None) -> list[Value]:
    edges = []
    for i, (x, count) in enumerate(zip(columns, bins, strict=True)):
        low, high = (limits[2 * i], limits[2 * i + 1]) if limits else (0.0, 1.0)
        edges.append(_edges(*_extent(x, low, high, 0.5, given=bool(limits)), count))
    return edges


@lowers(aten.histogram.bin_ct)
def histogram(
    ctx: LoweringContext,
    x: Value,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> tuple[Value, Value]:
    flat = hlo.reshape(x, [hlo.numel(x)])
    edges = _even_edges([flat], [bins], range)
    return _histogram([flat], edges, weight, density), edges[0]


@lowers(aten.histogram.bins_tensor)
def histogram_edges(
    ctx: LoweringContext, x: Value, bins: Value, *, weight: Value | None = None, density: bool = False
) -> tuple[Value, Value]:
    return _histogram([hlo.reshape(x, [hlo.numel(x)])], [bins], weight, density), bins


@lowers(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(
    ctx: LoweringContext,
    x: Value,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> list[Value]:
    return _even_edges(_columns(x), bins, range)


@lowers(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_bin_cts(
    ctx: LoweringContext,
    x: Value,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> Value:
    columns = _columns(x)
    return _histogram(columns, _even_edges(columns, bins, range), weight, density)


@lowers(aten._histogramdd_from_bin_tensors.default)
def histogramdd_from_bin_tensors(
    ctx: LoweringContext, x: Value, bins: Sequence[Value], *, weight: Value | None = None, density: bool = False
) -> Value:
    return _histogram(_columns(x), bins, weight, density)
