"""Products of row groups with a matrix each (mixture of experts): rows before ``ends[0]`` with matrix 0, and so on.

Rows are worked through in tiles, each within one group, so that the work does not grow with the number of groups. How
many tiles there are is known only at run time: ceil(rows / TILE) + groups at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

TILE = 128
"""Rows multiplied at once: what a TPU's matrix unit holds."""


@dataclass(frozen=True)
class Tile:
    """One step of the walk: ``start`` and ``group`` are 0-dim i32, ``inside`` a bool for each of the tile's rows."""

    group: Value
    start: Value
    inside: Value


def walk_tiles(ends: Value, rows: int, carries: list[Value], step: Callable[..., list[Value]]) -> list[Value]:
    """Run ``step(tile, *carries)`` for every tile. ``ends``: i32, where each group ends, not decreasing."""
    groups, size = hlo.shape(ends)[0], min(TILE, rows)
    begins = hlo.pad(hlo.slice_axis(ends, 0, 0, groups - 1), 0, [1], [0])
    tiles = ceil_divide(stablehlo.subtract(ends, begins), size)
    past = running_sum(tiles)
    total = hlo.reshape(hlo.slice_axis(past, 0, groups - 1, groups), ())
    zero = hlo.scalar(0, torch.int32)

    def go_on(i: Value, total: Value, *_: Value) -> Value:
        return hlo.compare(i, total, "LT")

    def body(
        i: Value, total: Value, begins: Value, ends: Value, tiles: Value, past: Value, *state: Value
    ) -> list[Value]:
        done = hlo.compare(past, hlo.broadcast(i, [groups]), "LE")
        group = hlo.reduce(hlo.convert(done, torch.int32), [0], "add")
        begin, end, count, after = (_element(v, group) for v in (begins, ends, tiles, past))
        nth = stablehlo.subtract(i, stablehlo.subtract(after, count))
        start = stablehlo.add(begin, stablehlo.multiply(nth, hlo.scalar(size, torch.int32)))
        here = stablehlo.add(hlo.iota([size], 0), hlo.broadcast(start, [size]))
        tile = Tile(group, start, hlo.compare(here, hlo.broadcast(end, [size]), "LT"))
        return [stablehlo.add(i, hlo.scalar(1, torch.int32)), total, begins, ends, tiles, past, *step(tile, *state)]

    return hlo.while_([zero, total, begins, ends, tiles, past, *carries], go_on, body)[6:]


def ceil_divide(x: Value, by: int) -> Value:
    """Non-negative integers divided, rounded up."""
    return stablehlo.divide(stablehlo.add(x, hlo.full_like(x, by - 1)), hlo.full_like(x, by))


def running_sum(x: Value) -> Value:
    """Inclusive prefix sums of a short i32 vector."""
    n = hlo.shape(x)[0]
    below = hlo.compare(hlo.iota([n, n], 1), hlo.iota([n, n], 0), "LE")
    spread = hlo.broadcast(x, [n, n])
    return hlo.reduce(hlo.select(below, spread, hlo.full_like(spread, 0)), [1], "add")


def _element(v: Value, at: Value) -> Value:
    return hlo.reshape(hlo.dynamic_slice(v, [at], [1]), ())


def _rows(x: Value, tile: Tile) -> Value:
    """The tile's rows of a padded ``x``; those of the next group are 0."""
    size, width = hlo.shape(tile.inside)[0], hlo.shape(x)[1]
    rows = hlo.dynamic_slice(x, [tile.start, hlo.scalar(0, torch.int32)], [size, width])
    return hlo.select(hlo.broadcast_in_dim(tile.inside, [size, width], [0]), rows, hlo.full_like(rows, 0))


def _padded(x: Value) -> Value:
    """Room for the last tile to reach beyond the last row."""
    return hlo.pad(x, 0, [0, 0], [min(TILE, hlo.shape(x)[0]), 0])


def grouped_rows(x: Value, matrices: Value, ends: Value, contract: int, out: torch.dtype) -> Value:
    """``x[r] @ matrices[group of r]``: [T, N]; rows behind the last group are 0.

    ``contract`` is the axis of ``matrices`` [G, ., .] that meets ``x``'s columns.
    """
    rows, width = hlo.shape(x)[0], hlo.shape(matrices)[3 - contract]
    if 0 in (rows, width, *hlo.shape(matrices)):
        return hlo.full(0, out, [rows, width])
    kind = dtypes.opmath(hlo.dtype(x))

    def step(tile: Tile, x: Value, matrices: Value, y: Value) -> list[Value]:
        zero = hlo.scalar(0, torch.int32)
        matrix = hlo.dynamic_slice(matrices, [tile.group, zero, zero], [1, *hlo.shape(matrices)[1:]])
        matrix = hlo.reshape(matrix, hlo.shape(matrices)[1:])
        part = hlo.dot_general(_rows(x, tile), matrix, ((1,), (contract - 1,)), out=kind)
        # rows of the next group are 0 in ``part``, and what lies behind a tile is not written yet
        old = hlo.dynamic_slice(y, [tile.start, zero], hlo.shape(part))
        return [x, matrices, hlo.dynamic_update_slice(y, stablehlo.add(old, part), [tile.start, zero])]

    start = hlo.full(0, kind, [rows + min(TILE, rows), width])
    result = walk_tiles(ends, rows, [_padded(x), matrices, start], step)[2]
    return hlo.convert(hlo.slice_axis(result, 0, 0, rows), out)


def grouped_outer(x: Value, y: Value, ends: Value, out: torch.dtype) -> Value:
    """``x[rows of g].T @ y[rows of g]`` for every group: [G, K, N], of x [T, K] and y [T, N]."""
    groups, sizes = hlo.shape(ends)[0], [hlo.shape(x)[1], hlo.shape(y)[1]]
    if 0 in (hlo.shape(x)[0], groups, *sizes):
        return hlo.full(0, out, [groups, *sizes])
    kind = dtypes.opmath(hlo.dtype(x))

    def step(tile: Tile, x: Value, y: Value, total: Value) -> list[Value]:
        zero = hlo.scalar(0, torch.int32)
        part = hlo.dot_general(_rows(x, tile), _rows(y, tile), ((0,), (0,)), out=kind)
        at = [tile.group, zero, zero]
        old = hlo.dynamic_slice(total, at, [1, *sizes])
        return [x, y, hlo.dynamic_update_slice(total, stablehlo.add(old, hlo.unsqueeze(part, 0)), at)]

    start = hlo.full(0, kind, [groups, *sizes])
    return hlo.convert(walk_tiles(ends, hlo.shape(x)[0], [_padded(x), _padded(y), start], step)[2], out)


@lowers(aten._grouped_mm.default)
def grouped_mm(
    ctx: LoweringContext,
    x: Value,
    mat2: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: Any = None,
) -> Value:
    out = ctx.out.dtype
    if offs is None:
        kind = dtypes.opmath(hlo.dtype(x))
        return hlo.convert(hlo.dot_general(x, mat2, ((2,), (1,)), ((0,), (0,)), out=kind), out)
    if hlo.rank(mat2) == 3:
        return grouped_rows(x, mat2, offs, 1, out)
    if hlo.rank(x) == 2:
        return grouped_outer(hlo.transpose(x, [1, 0]), mat2, offs, out)
    return hlo.transpose(grouped_rows(hlo.transpose(mat2, [1, 0]), x, offs, 2, out), [1, 0])


@lowers("transformers::grouped_mm_fallback")
def transformers_grouped_mm(ctx: LoweringContext, input: Value, weight: Value, offs: Value) -> Value:
    return grouped_rows(input, weight, hlo.convert(offs, torch.int32), 1, ctx.out.dtype)


@lowers("transformers::grouped_mm_fallback_backward")
def transformers_grouped_mm_backward(
    ctx: LoweringContext, input: Value, weight: Value, offs: Value, grad_output: Value
) -> tuple[Value, Value]:
    ends = hlo.convert(offs, torch.int32)
    of_input = grouped_rows(grad_output, weight, ends, 2, ctx.outs[0].dtype)
    return of_input, grouped_outer(input, grad_output, ends, ctx.outs[1].dtype)
