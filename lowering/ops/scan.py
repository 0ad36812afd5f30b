"""Cumulative ops. A reduce_window over the whole past: XLA rewrites it into a tree of small scans on every platform."""

from __future__ import annotations

from typing import Any

import torch

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.shape import axis
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def _cumulative(ctx: LoweringContext, x: Value, dim: int, combiner: str) -> Value:
    x = hlo.convert(hlo.convert(x, ctx.out.dtype), dtypes.opmath(ctx.out.dtype))
    if hlo.rank(x):
        x = hlo.running(x, axis(dim, hlo.rank(x)), combiner)
    return hlo.convert(x, ctx.out.dtype)


@lowers(aten.cumsum.default)
def cumsum(ctx: LoweringContext, x: Value, dim: int, *, dtype: Any = None) -> Value:
    return _cumulative(ctx, x, dim, "add")


@lowers(aten.cumprod.default)
def cumprod(ctx: LoweringContext, x: Value, dim: int, *, dtype: Any = None) -> Value:
    return _cumulative(ctx, x, dim, "multiply")
