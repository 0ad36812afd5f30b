"""Tensors made from nothing: constants, ranges, and the like-of-another family."""

from __future__ import annotations

from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.division import rounder
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def _constant(value: Any) -> Any:
    def rule(ctx: LoweringContext, *_: Any, **__: Any) -> Value:
        return hlo.full(value, ctx.out.dtype, ctx.out.shape)

    return rule


lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.zero.default,
    aten._efficientzerotensor.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
)(_constant(0))
lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)(_constant(1))


@lowers(aten.full.default)
def full(ctx: LoweringContext, size: Any, fill_value: Any, **_: Any) -> Value:
    return _fill(ctx, fill_value)


@lowers(aten.full_like.default)
def full_like(ctx: LoweringContext, x: Value, fill_value: Any, **_: Any) -> Value:
    return _fill(ctx, fill_value)


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def fill(ctx: LoweringContext, x: Value, value: Any) -> Value:
    return _fill(ctx, value)


@lowers(aten.new_full.default)
def new_full(ctx: LoweringContext, x: Value, size: Any, fill_value: Any, **_: Any) -> Value:
    return _fill(ctx, fill_value)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(ctx: LoweringContext, s: Any, **_: Any) -> Value:
    return _fill(ctx, s)


def _fill(ctx: LoweringContext, value: Any) -> Value:
    if hlo.is_value(value):
        return hlo.broadcast(hlo.convert(value, ctx.out.dtype), ctx.out.shape)
    return hlo.full(value, ctx.out.dtype, ctx.out.shape)


@lowers(aten.arange.default)
def arange(ctx: LoweringContext, end: Any, **_: Any) -> Value:
    return _range(ctx, 0, 1)


@lowers(aten.arange.start)
def arange_start(ctx: LoweringContext, start: Any, end: Any, **_: Any) -> Value:
    return _range(ctx, start, 1)


@lowers(aten.arange.start_step)
def arange_start_step(ctx: LoweringContext, start: Any, end: Any, step: Any = 1, **_: Any) -> Value:
    return _range(ctx, start, step)


@lowers(torch.ops.prims.iota.default)
def iota(ctx: LoweringContext, length: int, *, start: Any, step: Any, **_: Any) -> Value:
    return _range(ctx, start, step)


def _range(ctx: LoweringContext, start: Any, step: Any) -> Value:
    """``start + i * step``; in float32 for float32, where torch's CPU kernel has float64, which a TPU emulates."""
    out = ctx.out
    kind = dtypes.opmath(out.dtype)
    counts = hlo.iota(out.shape, 0, kind)
    if step != 1:
        counts = stablehlo.multiply(counts, hlo.full_like(counts, step))
    if start != 0:
        counts = stablehlo.add(counts, hlo.full_like(counts, start))
    return hlo.convert(counts, out.dtype)


@lowers(aten.linspace.default)
def linspace(ctx: LoweringContext, start: Any, end: Any, steps: int, **_: Any) -> Value:
    """Counted from both ends, as torch does, so that the last element is exactly ``end``.

    Ends, step, counts and products all have the result's dtype, 16 bits included; integers are spaced in float64.
    """
    out = ctx.out
    start, end = (_as(v, out.dtype) for v in (start, end))
    if steps == 1:
        return hlo.full(start, out.dtype, out.shape)
    kept = torch.float64 if dtypes.is_integer(out.dtype) else out.dtype
    kind, rounded = dtypes.opmath(kept), rounder(kept)
    step = _as(_as(end - start, kept) / max(steps - 1, 1), kept)

    def walk(origin: Any, counts: Value, build: Any) -> Value:
        travelled = rounded(stablehlo.multiply(rounded(counts), hlo.full_like(counts, step)))
        return build(hlo.full_like(counts, origin), travelled)

    counts = hlo.convert(hlo.iota(out.shape, 0, dtypes.real(kind)), kind)
    back = stablehlo.subtract(hlo.full_like(counts, steps - 1), counts)
    first_half = hlo.compare(hlo.iota(out.shape, 0), hlo.full(steps // 2, torch.int32, out.shape), "LT")
    halves = walk(start, counts, stablehlo.add), walk(end, back, stablehlo.subtract)
    return hlo.convert(hlo.select(first_half, *halves), out.dtype)


def _as(value: Any, kind: torch.dtype) -> Any:
    """A Python number rounded to a dtype."""
    return int(value) if dtypes.is_integer(kind) else torch.tensor(value, dtype=kind, device="cpu").item()


@lowers(aten.eye.default)
def eye(ctx: LoweringContext, n: int, **_: Any) -> Value:
    return _eye(ctx)


@lowers(aten.eye.m)
def eye_m(ctx: LoweringContext, n: int, m: int, **_: Any) -> Value:
    return _eye(ctx)


def _eye(ctx: LoweringContext) -> Value:
    rows, columns = hlo.iota(ctx.out.shape, 0), hlo.iota(ctx.out.shape, 1)
    return hlo.convert(hlo.compare(rows, columns, "EQ"), ctx.out.dtype)


# ---- positions of a triangle, row by row


@lowers(aten.tril_indices.default)
def tril_indices(ctx: LoweringContext, row: int, col: int, offset: int = 0, **_: Any) -> Value:
    """A trapezoid whose rows grow by one, then full rows."""
    kind = _index_dtype(ctx)
    skipped = max(0, -offset)
    first = max(1, 1 + offset)
    growing = max(0, min(row - skipped, col - first + 1)) if first <= col else 0
    size = growing * first + growing * (growing - 1) // 2
    counts = hlo.iota(ctx.out.shape[1:], 0, kind)
    rows, columns = _trapezoid(counts, first)
    rows = stablehlo.add(rows, hlo.full_like(rows, skipped))
    beyond = _rectangle(stablehlo.subtract(counts, hlo.full_like(counts, size)), col, skipped + growing)
    inside = hlo.compare(counts, hlo.full_like(counts, size), "LT")
    return _pairs(ctx, [hlo.select(inside, a, b) for a, b in zip((rows, columns), beyond, strict=True)])


@lowers(aten.triu_indices.default)
def triu_indices(ctx: LoweringContext, row: int, col: int, offset: int = 0, **_: Any) -> Value:
    """Full rows, then a trapezoid whose rows shrink by one: seen from its end, one whose rows grow."""
    kind = _index_dtype(ctx)
    full_rows = min(max(0, -offset), row)
    longest = max(0, col - max(0, offset))
    shrinking = min(row - full_rows, longest)
    counts = hlo.iota(ctx.out.shape[1:], 0, kind)
    from_end = stablehlo.subtract(hlo.full_like(counts, ctx.out.shape[1] - 1), counts)
    rows, columns = _trapezoid(from_end, max(1, longest - shrinking + 1))
    rows = stablehlo.subtract(hlo.full_like(rows, full_rows + shrinking - 1), rows)
    columns = stablehlo.subtract(hlo.full_like(columns, col - 1), columns)
    before = _rectangle(counts, col, 0)
    inside = hlo.compare(counts, hlo.full_like(counts, full_rows * col), "LT")
    return _pairs(ctx, [hlo.select(inside, a, b) for a, b in zip(before, (rows, columns), strict=True)])


def _index_dtype(ctx: LoweringContext) -> torch.dtype:
    return torch.int32 if ctx.out.shape[1] < 2**30 else torch.int64


def _pairs(ctx: LoweringContext, axes: list[Value]) -> Value:
    return hlo.concatenate([hlo.convert(hlo.unsqueeze(a, 0), ctx.out.dtype) for a in axes], 0)


def _rectangle(counts: Value, width: int, first_row: int) -> tuple[Value, Value]:
    wide = hlo.full_like(counts, max(width, 1))
    rows = stablehlo.add(stablehlo.divide(counts, wide), hlo.full_like(counts, first_row))
    return rows, stablehlo.remainder(counts, wide)


def _trapezoid(counts: Value, first: int) -> tuple[Value, Value]:
    """(row, column) of each place in rows of ``first``, ``first + 1``, … places: row r starts at r·first + r(r-1)/2.

    The quadratic is solved in float32, which may be off by one row; integers put it right.
    """
    n = hlo.convert(counts, torch.float32)
    slope = 2 * first - 1
    root = stablehlo.sqrt(stablehlo.add(hlo.full_like(n, slope * slope), stablehlo.multiply(n, hlo.full_like(n, 8))))
    guess = stablehlo.divide(stablehlo.multiply(n, hlo.full_like(n, 4)), stablehlo.add(root, hlo.full_like(n, slope)))
    rows = hlo.convert(guess, hlo.dtype(counts))
    one = hlo.full_like(rows, 1)

    def start(row: Value) -> Value:
        before = stablehlo.divide(stablehlo.multiply(row, stablehlo.subtract(row, one)), hlo.full_like(row, 2))
        return stablehlo.add(stablehlo.multiply(row, hlo.full_like(row, first)), before)

    rows = hlo.select(hlo.compare(start(rows), counts, "GT"), stablehlo.subtract(rows, one), rows)
    following = stablehlo.add(rows, one)
    rows = hlo.select(hlo.compare(start(following), counts, "LE"), following, rows)
    return rows, stablehlo.subtract(counts, start(rows))
