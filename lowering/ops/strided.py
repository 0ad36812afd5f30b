"""as_strided and its scatter: ops that speak of a tensor's memory rather than of its elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import Layout, LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.program import row_major
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

_BEYOND = "it reaches memory that is not the tensor's own"
_HINT = "apply as_strided to the tensor that owns the memory"


@dataclass(frozen=True)
class Pattern:
    """Positions ``offset + sum(i * stride)`` in a flat value, for all ``i`` within ``size``."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def last(self) -> int:
        return self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))


def memory(x: Value, layout: Layout) -> tuple[Value, bool] | None:
    """(``x`` as it lies in memory, flat, from its first element to its last; whether without gaps). None if strides
    overlap."""
    axes = sorted(range(hlo.rank(x)), key=lambda i: (layout.stride[i], layout.shape[i]), reverse=True)
    repeated = [i for i in axes if layout.stride[i] == 0]
    axes = [i for i in axes if layout.stride[i] and layout.shape[i] != 1]
    x = hlo.slice_(x, [0] * hlo.rank(x), [1 if i in repeated else n for i, n in enumerate(hlo.shape(x))])
    rest = [i for i in range(hlo.rank(x)) if i not in axes]
    x = hlo.transpose(x, [*rest, *axes])
    x = hlo.reshape(x, [layout.shape[i] for i in axes])
    extent, dense = 1, True
    for at in reversed(range(len(axes))):
        n, step = layout.shape[axes[at]], layout.stride[axes[at]]
        if step < extent:
            return None
        dense &= step == extent
        x = hlo.reshape(x, [*hlo.shape(x)[: at + 1], extent])
        x = hlo.pad(x, 0, [0] * (at + 2), [0] * (at + 1) + [step - extent])
        extent = (n - 1) * step + extent
        x = hlo.reshape(x, [*hlo.shape(x)[:at], n * step])
        x = hlo.slice_axis(x, at, 0, extent)
    return hlo.reshape(x, [extent]), dense


def take_pattern(flat: Value, pattern: Pattern) -> Value:
    """The elements of a flat value at the pattern's positions: one slice if they are consecutive, else a gather of
    rows."""
    size, stride = list(pattern.size), list(pattern.stride)
    if 0 in size:
        return hlo.full(0, hlo.dtype(flat), size)
    if all(n == 1 or s == r for n, s, r in zip(size, stride, row_major(tuple(size)), strict=True)):
        return hlo.reshape(hlo.slice_axis(flat, 0, pattern.offset, pattern.last + 1), size)
    row = size[-1] if stride[-1] == 1 else 1
    lead = size[:-1] if row > 1 else size
    starts = _positions(lead, stride, pattern.offset, hlo.numel(flat))
    rows = hlo.gather(
        flat,
        starts,
        offset_dims=[len(lead)],
        collapsed=[],
        start_index_map=[0],
        slice_sizes=[row],
        index_vector_dim=len(lead),
    )
    return hlo.reshape(rows, size)


def _positions(size: Sequence[int], stride: Sequence[int], offset: int, limit: int) -> Value:
    kind = torch.int32 if limit <= torch.iinfo(torch.int32).max else torch.int64
    positions = hlo.full(offset, kind, size)
    for at, step in zip(range(len(size)), stride, strict=False):
        if size[at] > 1 and step:
            counts = hlo.iota(size, at, kind)
            positions = stablehlo.add(positions, stablehlo.multiply(counts, hlo.full_like(counts, step)))
    return positions


def _fits(pattern: Pattern, layout: Layout, dense: bool, extent: int) -> bool:
    """Whether every position holds an element of the tensor. Gaps are looked up one by one: strides that make them are
    rare."""
    if 0 in pattern.size:
        return True
    if pattern.offset < 0 or pattern.last >= extent:
        return False
    if dense:
        return True
    held = np.zeros(extent, np.bool_)
    held[_table(Pattern(layout.shape, layout.stride, 0))] = True
    return bool(held[_table(pattern)].all())


def _table(pattern: Pattern) -> np.ndarray:
    places = np.full((), pattern.offset, np.int64)
    for n, step in zip(pattern.size, pattern.stride, strict=True):
        places = places[..., None] + np.arange(n) * step
    return places


def _pattern(layout: Layout, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Pattern:
    offset = layout.offset if storage_offset is None else storage_offset
    return Pattern(tuple(size), tuple(stride), offset - layout.offset)


@lowers(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(
    ctx: LoweringContext, x: Value, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Value:
    layout = ctx.walk.layout(0)
    pattern = _pattern(layout, size, stride, storage_offset)
    if not math.prod(size):
        return hlo.full(0, ctx.out.dtype, ctx.out.shape)
    image = memory(x, layout) if hlo.numel(x) else None
    if image is None or not _fits(pattern, layout, image[1], hlo.numel(image[0])):
        ctx.refuse(_BEYOND, _HINT)
    return take_pattern(image[0], pattern)


@lowers(aten.as_strided_scatter.default)
def as_strided_scatter(
    ctx: LoweringContext,
    x: Value,
    src: Value,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Value:
    layout = ctx.walk.layout(0)
    pattern = _pattern(layout, size, stride, storage_offset)
    image = memory(x, layout) if hlo.numel(x) else None
    if not math.prod(size):
        return x
    if image is None or not _fits(pattern, layout, image[1], hlo.numel(image[0])):
        ctx.refuse(_BEYOND, _HINT)
    flat = image[0]
    places = _positions(size, stride, pattern.offset, hlo.numel(flat))
    (written,) = hlo.scatter(
        [flat],
        places,
        [hlo.broadcast(hlo.convert(src, hlo.dtype(x)), list(size))],
        "second",
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
        index_vector_dim=len(size),
    )
    return take_pattern(written, Pattern(layout.shape, layout.stride, 0))
