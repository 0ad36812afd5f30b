"""Tensors made from nothing: constants, ranges, and the like-of-another family."""

from __future__ import annotations

from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
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
    """Counted from both ends, as torch does, so that the last element is exactly ``end``. The ends are rounded to the
    result's dtype first; whole numbers are interpolated in float64."""
    out = ctx.out
    start, end = (torch.tensor(v).to(out.dtype).item() for v in (start, end))
    if steps == 1:
        return hlo.full(start, out.dtype, out.shape)
    kind = torch.float64 if dtypes.is_integer(out.dtype) else dtypes.opmath(out.dtype)
    counts = hlo.convert(hlo.iota(out.shape, 0, dtypes.real(kind)), kind)
    step = (end - start) / max(steps - 1, 1)
    up = stablehlo.add(hlo.full_like(counts, start), stablehlo.multiply(counts, hlo.full_like(counts, step)))
    back = stablehlo.subtract(hlo.full_like(counts, steps - 1), counts)
    down = stablehlo.subtract(hlo.full_like(counts, end), stablehlo.multiply(back, hlo.full_like(counts, step)))
    first_half = hlo.compare(hlo.iota(out.shape, 0), hlo.full(steps // 2, torch.int32, out.shape), "LT")
    return hlo.convert(hlo.select(first_half, up, down), out.dtype)


@lowers(aten.eye.default)
def eye(ctx: LoweringContext, n: int, **_: Any) -> Value:
    return _eye(ctx)


@lowers(aten.eye.m)
def eye_m(ctx: LoweringContext, n: int, m: int, **_: Any) -> Value:
    return _eye(ctx)


def _eye(ctx: LoweringContext) -> Value:
    rows, columns = hlo.iota(ctx.out.shape, 0), hlo.iota(ctx.out.shape, 1)
    return hlo.convert(hlo.compare(rows, columns, "EQ"), ctx.out.dtype)
