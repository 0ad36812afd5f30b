"""Matrix products. Axes are contracted where they stand: a transpose before a product is the dot's business, not a copy."""

from __future__ import annotations

from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def product(a: Value, b: Value, contract: Any, batch: Any = ((), ())) -> Value:
    """A dot in the operands' dtype. Integers and bool multiply exactly; the 16-bit floats accumulate in float32."""
    return hlo.dot_general(a, b, contract, batch)


@lowers(aten.mm.default)
def mm(ctx: LoweringContext, x: Value, mat2: Value) -> Value:
    return product(x, mat2, ((1,), (0,)))


@lowers(aten.bmm.default)
def bmm(ctx: LoweringContext, x: Value, mat2: Value) -> Value:
    return product(x, mat2, ((2,), (1,)), ((0,), (0,)))


@lowers(aten.mv.default)
def mv(ctx: LoweringContext, x: Value, vec: Value) -> Value:
    return product(x, vec, ((1,), (0,)))


@lowers(aten.dot.default)
def dot(ctx: LoweringContext, x: Value, tensor: Value) -> Value:
    return product(x, tensor, ((0,), (0,)))


@lowers(aten.addmm.default)
def addmm(ctx: LoweringContext, x: Value, mat1: Value, mat2: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _add_product(ctx, x, mat1, mat2, ((1,), (0,)), ((), ()), beta, alpha)


@lowers(aten.addmv.default)
def addmv(ctx: LoweringContext, x: Value, mat: Value, vec: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _add_product(ctx, x, mat, vec, ((1,), (0,)), ((), ()), beta, alpha)


@lowers(aten.baddbmm.default)
def baddbmm(ctx: LoweringContext, x: Value, batch1: Value, batch2: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _add_product(ctx, x, batch1, batch2, ((2,), (1,)), ((0,), (0,)), beta, alpha)


def _add_product(
    ctx: LoweringContext, x: Value, a: Value, b: Value, contract: Any, batch: Any, beta: Any, alpha: Any
) -> Value:
    """``beta * x + alpha * (a @ b)``, rounded once; with beta 0 ``x`` is not read, NaN or not."""
    out = ctx.out
    kind = dtypes.opmath(out.dtype)
    result = hlo.dot_general(a, b, contract, batch, out=kind)
    if alpha != 1:
        result = stablehlo.multiply(result, hlo.full_like(result, alpha))
    if beta != 0:
        term = hlo.convert(x, kind)
        if beta != 1:
            term = stablehlo.multiply(term, hlo.full_like(term, beta))
        result = stablehlo.add(result, hlo.broadcast(term, out.shape))
    return hlo.convert(result, out.dtype)
