"""Losses that torch's decomposition computes otherwise than its kernels do."""

from __future__ import annotations

import math

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.division import rounder
from tpu_compile.lowering.registry import lowers, operand

aten = torch.ops.aten

_NONE, _MEAN = 0, 1


@lowers(aten.soft_margin_loss.default)
def soft_margin_loss(ctx: LoweringContext, x: Value, target: Value, reduction: int = _MEAN) -> Value:
    """``log1p(exp(-target * x))``, each step rounded to the data's dtype: a float16 exp overflows, as in torch."""
    kept = torch.promote_types(hlo.dtype(x), hlo.dtype(target))
    rounded, kind = rounder(kept), dtypes.opmath(kept)
    sizes = torch.broadcast_shapes(hlo.shape(x), hlo.shape(target))
    x, target = operand(x, kind, sizes), operand(target, kind, sizes)
    margin = rounded(stablehlo.negate(stablehlo.multiply(x, target)))
    return reduced(ctx, rounded(stablehlo.log_plus_one(rounded(stablehlo.exponential(margin)))), reduction)


def reduced(ctx: LoweringContext, losses: Value, reduction: int) -> Value:
    """All losses, their mean (NaN of none), or their sum, in the promised dtype."""
    if reduction == _NONE:
        return hlo.convert(losses, ctx.out.dtype)
    total = hlo.reduce(losses, range(hlo.rank(losses)), "add")
    if reduction == _MEAN:
        count = math.prod(hlo.shape(losses))
        total = stablehlo.divide(total, hlo.full_like(total, count)) if count else hlo.full_like(total, math.nan)
    return hlo.convert(total, ctx.out.dtype)
