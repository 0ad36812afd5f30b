"""Views, permutations, joins and splits. A view is a new value here: AOTAutograd has already turned writes through
views into copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def axis(dim: int, rank: int) -> int:
    """A non-negative axis; a 0-dim tensor takes 0 and -1 too."""
    return dim % max(rank, 1)


@lowers(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
)
def view(ctx: LoweringContext, x: Value, *_: Any, **__: Any) -> Value:
    return hlo.reshape(x, ctx.out.shape)


@lowers(
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.squeeze_copy.dim,
    aten.unsqueeze_copy.default,
)
def squeeze(ctx: LoweringContext, x: Value, *_: Any) -> Value:
    return hlo.reshape(x, ctx.out.shape)


@lowers(aten.expand.default, aten.expand_copy.default)
def expand(ctx: LoweringContext, x: Value, size: Any, *, implicit: bool = False) -> Value:
    return hlo.broadcast(x, ctx.out.shape)


@lowers(aten.permute.default, aten.permute_copy.default)
def permute(ctx: LoweringContext, x: Value, dims: Sequence[int]) -> Value:
    return hlo.transpose(x, [axis(d, hlo.rank(x)) for d in dims])


@lowers(aten.transpose.int, aten.transpose_copy.int)
def transpose(ctx: LoweringContext, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(hlo.rank(x)))
    if order:
        a, b = axis(dim0, len(order)), axis(dim1, len(order))
        order[a], order[b] = order[b], order[a]
    return hlo.transpose(x, order)


@lowers(aten.t.default, aten.t_copy.default)
def t(ctx: LoweringContext, x: Value) -> Value:
    return hlo.transpose(x, range(hlo.rank(x))[::-1])


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(
    ctx: LoweringContext,
    x: Value,
    dim: int = 0,
    start: int | Value | None = None,
    end: int | Value | None = None,
    step: int = 1,
) -> Value:
    at = axis(dim, hlo.rank(x))
    if hlo.is_value(start):
        return _slice_from(x, at, start, ctx.out.shape[at], step)
    if hlo.is_value(end):
        start = clamp_range(start, None, hlo.shape(x)[at])[0]
        return hlo.slice_axis(x, at, start, start + (ctx.out.shape[at] - 1) * step + 1, step)
    low, high = clamp_range(start, end, hlo.shape(x)[at])
    return hlo.slice_axis(x, at, low, high, step)


def _slice_from(x: Value, at: int, start: Value, length: int, step: int = 1) -> Value:
    """``length`` elements from a place that only the running program knows."""
    if not length:
        return hlo.slice_axis(x, at, 0, 0)
    sizes = hlo.shape(x)
    window = (length - 1) * step + 1
    start = hlo.wrap_negative(hlo.index_operand(start, sizes[at]), sizes[at])
    zero = hlo.full_like(start, 0)
    starts = [start if i == at else zero for i in range(len(sizes))]
    window_sizes = [window if i == at else n for i, n in enumerate(sizes)]
    return hlo.slice_axis(hlo.dynamic_slice(x, starts, window_sizes), at, 0, window, step)


def clamp_range(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Python's slice bounds for an axis of ``size``."""
    low, high, _ = slice(start, end).indices(size)
    return low, max(low, high)


@lowers(aten.narrow_copy.default)
def narrow_copy(ctx: LoweringContext, x: Value, dim: int, start: int, length: int) -> Value:
    at = axis(dim, hlo.rank(x))
    start += hlo.shape(x)[at] if start < 0 else 0
    return hlo.slice_axis(x, at, start, start + length)


@lowers(aten.select.int, aten.select_copy.int)
def select(ctx: LoweringContext, x: Value, dim: int, index: int | Value) -> Value:
    at = axis(dim, hlo.rank(x))
    if hlo.is_value(index):
        return hlo.reshape(_slice_from(x, at, index, 1), ctx.out.shape)
    index %= hlo.shape(x)[at]
    return hlo.reshape(hlo.slice_axis(x, at, index, index + 1), ctx.out.shape)


@lowers(aten.cat.default)
def cat(ctx: LoweringContext, tensors: Sequence[Value], dim: int = 0) -> Value:
    out = ctx.out
    parts = [hlo.convert(t, out.dtype) for t in tensors if hlo.shape(t) != [0] or len(out.shape) == 1]
    return hlo.concatenate(parts, axis(dim, len(out.shape)))


@lowers(aten.stack.default)
def stack(ctx: LoweringContext, tensors: Sequence[Value], dim: int = 0) -> Value:
    out = ctx.out
    at = axis(dim, len(out.shape))
    return hlo.concatenate([hlo.unsqueeze(hlo.convert(t, out.dtype), at) for t in tensors], at)


@lowers(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def split(ctx: LoweringContext, x: Value, split_size: int, dim: int = 0) -> list[Value]:
    at = axis(dim, hlo.rank(x))
    return _pieces(x, at, [o.shape[at] for o in ctx.outs])


@lowers(aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(ctx: LoweringContext, x: Value, split_sizes: Sequence[int], dim: int = 0) -> list[Value]:
    return _pieces(x, axis(dim, hlo.rank(x)), split_sizes)


def _pieces(x: Value, at: int, sizes: Sequence[int]) -> list[Value]:
    starts = np.cumsum([0, *sizes]).tolist()
    return [hlo.slice_axis(x, at, s, s + n) for s, n in zip(starts, sizes, strict=False)]


@lowers(aten.unbind.int, aten.unbind_copy.int)
def unbind(ctx: LoweringContext, x: Value, dim: int = 0) -> list[Value]:
    at = axis(dim, hlo.rank(x))
    return [hlo.squeeze(piece, [at]) for piece in _pieces(x, at, [1] * hlo.shape(x)[at])]


@lowers(
    aten.alias.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.alias_copy.default,
)
def alias(ctx: LoweringContext, x: Value) -> Value:
    return x


@lowers(aten.clone.default)
def clone(ctx: LoweringContext, x: Value, *, memory_format: Any = None) -> Value:
    return x


@lowers(torch.ops.prims.copy_strided.default)
def copy_strided(ctx: LoweringContext, a: Value, stride: Sequence[int]) -> Value:
    return a


@lowers(aten.copy.default, aten.copy_.default)
def copy(ctx: LoweringContext, x: Value, src: Value, non_blocking: bool = False) -> Value:
    return hlo.broadcast(hlo.convert(src, ctx.out.dtype), ctx.out.shape)


@lowers(aten._to_copy.default, torch.ops.prims.convert_element_type.default, aten.to.dtype)
def to_copy(ctx: LoweringContext, x: Any, *_: Any, **__: Any) -> Value:
    """``x`` is a Python number where vmap has met one."""
    return hlo.convert(x, ctx.out.dtype) if hlo.is_value(x) else hlo.scalar(x, ctx.out.dtype)


@lowers(aten.flip.default)
def flip(ctx: LoweringContext, x: Value, dims: Sequence[int]) -> Value:
    return hlo.reverse(x, sorted({axis(d, hlo.rank(x)) for d in dims})) if hlo.rank(x) else x


@lowers(aten.roll.default)
def roll(ctx: LoweringContext, x: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts = shifts if isinstance(shifts, (list, tuple)) else [shifts]
    if not dims:
        return hlo.reshape(_roll(hlo.reshape(x, [hlo.numel(x)]), shifts[0], 0), hlo.shape(x))
    for shift, dim in zip(shifts, dims if isinstance(dims, (list, tuple)) else [dims], strict=True):
        x = _roll(x, shift, axis(dim, hlo.rank(x)))
    return x


def _roll(x: Value, shift: int, at: int) -> Value:
    size = hlo.shape(x)[at] if hlo.rank(x) else 0
    cut = -shift % size if size else 0
    return hlo.concatenate([hlo.slice_axis(x, at, cut, size), hlo.slice_axis(x, at, 0, cut)], at) if cut else x


@lowers(aten.repeat.default)
def repeat(ctx: LoweringContext, x: Value, repeats: Sequence[int]) -> Value:
    sizes = [1] * (len(repeats) - hlo.rank(x)) + hlo.shape(x)
    between = [s for pair in zip(repeats, sizes, strict=True) for s in pair]
    wide = hlo.broadcast_in_dim(hlo.reshape(x, sizes), between, range(1, 2 * len(sizes), 2))
    return hlo.reshape(wide, ctx.out.shape)


@lowers(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: LoweringContext, x: Value, pad: Sequence[int], value: Any = 0) -> Value:
    low, high = [0] * hlo.rank(x), [0] * hlo.rank(x)
    for i in range(len(pad) // 2):
        low[-1 - i], high[-1 - i] = pad[2 * i], pad[2 * i + 1]
    return hlo.pad(x, value, low, high)


def _triangle(x: Value, diagonal: int, direction: str) -> Value:
    sizes = hlo.shape(x)[-2:]
    rows, columns = hlo.iota(sizes, 0), hlo.iota(sizes, 1)
    keep = hlo.compare(columns, stablehlo.add(rows, hlo.full_like(rows, diagonal)), direction)
    return hlo.select(hlo.broadcast(keep, hlo.shape(x)), x, hlo.full_like(x, 0))


@lowers(aten.tril.default)
def tril(ctx: LoweringContext, x: Value, diagonal: int = 0) -> Value:
    return _triangle(x, diagonal, "LE")


@lowers(aten.triu.default)
def triu(ctx: LoweringContext, x: Value, diagonal: int = 0) -> Value:
    return _triangle(x, diagonal, "GE")


@lowers(aten.unfold.default)
def unfold(ctx: LoweringContext, x: Value, dimension: int, size: int, step: int) -> Value:
    at = axis(dimension, hlo.rank(x))
    if not hlo.rank(x):
        return hlo.reshape(x, ctx.out.shape)
    if not ctx.out.numel:
        return hlo.full(0, ctx.out.dtype, ctx.out.shape)
    count, rank = ctx.out.shape[at], hlo.rank(x)
    starts = hlo.iota([count], 0)
    starts = stablehlo.multiply(starts, hlo.full_like(starts, step))
    windows = hlo.gather(
        x,
        starts,
        offset_dims=[i for i in range(rank + 1) if i != at],
        collapsed=[],
        start_index_map=[at],
        slice_sizes=[size if i == at else s for i, s in enumerate(hlo.shape(x))],
        index_vector_dim=1,
        sorted_=True,
    )
    return hlo.move_axis(windows, at + 1, rank)


def _diagonal_last(x: Value, dim1: int, dim2: int) -> list[int]:
    """The order of axes that puts the diagonal's two axes last."""
    a, b = axis(dim1, hlo.rank(x)), axis(dim2, hlo.rank(x))
    return [*(i for i in range(hlo.rank(x)) if i not in (a, b)), a, b]


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(ctx: LoweringContext, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """In row-major memory a diagonal is every (columns + 1)-th element."""
    x = hlo.transpose(x, _diagonal_last(x, dim1, dim2))
    length = ctx.out.shape[-1]
    if not ctx.out.numel:
        return hlo.full(0, ctx.out.dtype, ctx.out.shape)
    *lead, rows, columns = hlo.shape(x)
    start = offset if offset >= 0 else -offset * columns
    flat = hlo.reshape(x, [*lead, rows * columns])
    return hlo.slice_axis(flat, len(lead), start, start + (length - 1) * (columns + 1) + 1, columns + 1)


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: LoweringContext, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    order = _diagonal_last(x, dim1, dim2)
    square = hlo.transpose(x, order)
    *lead, rows, columns = hlo.shape(square)
    row, length = max(-offset, 0), hlo.shape(src)[-1]
    if not hlo.numel(src):
        return x
    low, high = [0] * hlo.rank(src), [0] * hlo.rank(src)
    low[-1], high[-1] = row, rows - row - length
    values = hlo.pad(hlo.convert(src, hlo.dtype(x)), 0, low, high)
    values = hlo.broadcast_in_dim(values, hlo.shape(square), range(len(lead) + 1))
    i, j = hlo.iota([rows, columns], 0), hlo.iota([rows, columns], 1)
    on = hlo.compare(j, stablehlo.add(i, hlo.full_like(i, offset)), "EQ")
    on = hlo.broadcast_in_dim(on, hlo.shape(square), [len(lead), len(lead) + 1])
    return hlo.transpose(hlo.select(on, values, square), np.argsort(order).tolist())


@lowers(aten.slice_scatter.default)
def slice_scatter(
    ctx: LoweringContext,
    x: Value,
    src: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    at = axis(dim, hlo.rank(x))
    size = hlo.shape(x)[at]
    low, high = clamp_range(start, end, size)
    count = len(range(low, high, step))
    if not count:
        return x
    src = hlo.broadcast(hlo.convert(src, hlo.dtype(x)), [*hlo.shape(x)[:at], count, *hlo.shape(x)[at + 1 :]])
    last = low + (count - 1) * step + 1
    lows, highs, inner = ([0] * hlo.rank(x) for _ in range(3))
    lows[at], highs[at], inner[at] = low, size - last, step - 1
    if step == 1:
        pieces = [hlo.slice_axis(x, at, 0, low), src, hlo.slice_axis(x, at, last, size)]
        return hlo.concatenate([p for p in pieces if hlo.shape(p)[at]], at)
    positions = hlo.iota([size], 0)
    offset = stablehlo.subtract(positions, hlo.full_like(positions, low))
    inside = stablehlo.and_(
        stablehlo.and_(
            hlo.compare(offset, hlo.full_like(offset, 0), "GE"),
            hlo.compare(positions, hlo.full_like(positions, last), "LT"),
        ),
        hlo.compare(stablehlo.remainder(offset, hlo.full_like(offset, step)), hlo.full_like(offset, 0), "EQ"),
    )
    mask = hlo.broadcast_in_dim(inside, hlo.shape(x), [at])
    return hlo.select(mask, hlo.pad(src, 0, lows, highs, inner), x)


@lowers(aten.select_scatter.default)
def select_scatter(ctx: LoweringContext, x: Value, src: Value, dim: int, index: int) -> Value:
    at = axis(dim, hlo.rank(x))
    index %= hlo.shape(x)[at]
    source = hlo.unsqueeze(hlo.convert(src, hlo.dtype(x)), at)
    pieces = [hlo.slice_axis(x, at, 0, index), source, hlo.slice_axis(x, at, index + 1, hlo.shape(x)[at])]
    return hlo.concatenate([p for p in pieces if hlo.shape(p)[at]], at)


@lowers(aten.pixel_shuffle.default)
def pixel_shuffle(ctx: LoweringContext, x: Value, upscale_factor: int) -> Value:
    r = upscale_factor
    *lead, c, h, w = hlo.shape(x)
    n = len(lead)
    x = hlo.reshape(x, [*lead, c // (r * r), r, r, h, w])
    x = hlo.transpose(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return hlo.reshape(x, ctx.out.shape)


@lowers(aten._local_scalar_dense.default)
def item(ctx: LoweringContext, x: Value) -> Value:
    """The number stays in the program: see ``lowering.numbers``."""
    return hlo.reshape(hlo.convert(x, ctx.out.dtype), ())
