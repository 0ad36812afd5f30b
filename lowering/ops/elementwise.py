"""Pointwise arithmetic, comparison, bit and rounding ops. Most unary ops are a line of a table."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.complex import COMPLEX, magnitude
from tpu_compile.lowering.ops.division import trunc_value
from tpu_compile.lowering.registry import elementwise, lowers, operand

aten = torch.ops.aten

# ---- unary tables: overload -> builder

ROUNDED = {
    **dict.fromkeys((aten.neg.default, aten._neg_view.default, aten._neg_view_copy.default), stablehlo.negate),
    aten.positive.default: lambda x: x,
}
"""One correctly rounded operation: the 16-bit floats need no detour through float32."""

FUNCTIONS = {
    aten.exp.default: stablehlo.exponential,
    aten.expm1.default: stablehlo.exponential_minus_one,
    aten.log.default: stablehlo.log,
    aten.log1p.default: stablehlo.log_plus_one,
    aten.sqrt.default: stablehlo.sqrt,
    aten.rsqrt.default: stablehlo.rsqrt,
    aten.sin.default: stablehlo.sine,
    aten.cos.default: stablehlo.cosine,
    aten.tan.default: chlo.tan,
    aten.tanh.default: stablehlo.tanh,
    aten.sinh.default: chlo.sinh,
    aten.cosh.default: chlo.cosh,
    aten.asin.default: chlo.asin,
    aten.acos.default: chlo.acos,
    aten.atan.default: chlo.atan,
    aten.asinh.default: chlo.asinh,
    aten.acosh.default: chlo.acosh,
    aten.atanh.default: chlo.atanh,
    aten.sigmoid.default: stablehlo.logistic,
    aten.erf.default: chlo.erf,
    aten.erfc.default: chlo.erfc,
    aten.erfinv.default: chlo.erf_inv,
    aten.lgamma.default: chlo.lgamma,
}


def unary(build: Any) -> Any:
    """A rule that is one builder of one operand, or that builder's complex counterpart."""

    def rule(ctx: LoweringContext, x: Value) -> Value:
        return COMPLEX.get(build, build)(x) if hlo.dtype(x).is_complex else build(x)

    return rule


for _op, _build in ROUNDED.items():
    elementwise(_op, opmath=False)(unary(_build))
for _op, _build in FUNCTIONS.items():
    elementwise(_op)(unary(_build))


# ---- arithmetic


def scaled(ctx: LoweringContext, x: Value, alpha: Any) -> Value:
    """``alpha * x``, with ``alpha`` in the result's dtype."""
    kept, kind = ctx.out.dtype, hlo.dtype(x)
    return x if alpha == 1 else stablehlo.multiply(x, operand(alpha, kind, hlo.shape(x), kept))


@elementwise(aten.add.Tensor, aten.add.Scalar)
def add(ctx: LoweringContext, x: Value, other: Value, alpha: Any = 1) -> Value:
    return stablehlo.add(x, scaled(ctx, other, alpha))


@elementwise(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: LoweringContext, x: Value, other: Value, alpha: Any = 1) -> Value:
    return stablehlo.subtract(x, scaled(ctx, other, alpha))


@elementwise(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: LoweringContext, x: Value, other: Value, alpha: Any = 1) -> Value:
    return stablehlo.subtract(other, scaled(ctx, x, alpha))


@elementwise(aten.mul.Tensor, aten.mul.Scalar, opmath=False, wide=("other",))
def mul(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.multiply(x, other)


def floating(x: Value) -> bool:
    return hlo.dtype(x).is_floating_point


@elementwise(aten.atan2.default)
def atan2(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.atan2(x, other)


@elementwise(aten.addcmul.default, wide=("value",))
def addcmul(ctx: LoweringContext, x: Value, tensor1: Value, tensor2: Value, *, value: Value | None = None) -> Value:
    first = tensor1 if value is None else stablehlo.multiply(value, tensor1)
    return stablehlo.add(x, stablehlo.multiply(first, tensor2))


@elementwise(aten.addcdiv.default, wide=("value",))
def addcdiv(ctx: LoweringContext, x: Value, tensor1: Value, tensor2: Value, *, value: Value | None = None) -> Value:
    first = tensor1 if value is None else stablehlo.multiply(value, tensor1)
    return stablehlo.add(x, stablehlo.divide(first, tensor2))


@elementwise(aten.lerp.Tensor, aten.lerp.Scalar, wide=("weight",))
def lerp(ctx: LoweringContext, x: Value, end: Value, weight: Value) -> Value:
    """Written from the nearer end, as torch does, so that weight 1 gives exactly ``end``."""
    span = stablehlo.subtract(end, x)
    low = stablehlo.add(x, stablehlo.multiply(weight, span))
    high = stablehlo.subtract(end, stablehlo.multiply(span, stablehlo.subtract(hlo.full_like(x, 1), weight)))
    size = stablehlo.abs(weight)
    return hlo.select(hlo.compare(size, hlo.full_like(size, 0.5), "LT"), low, high)


@lowers(aten.abs.default)
def abs_(ctx: LoweringContext, x: Value) -> Value:
    if hlo.dtype(x).is_complex:
        return hlo.convert(magnitude(x), ctx.out.dtype)
    return stablehlo.abs(x) if hlo.dtype(x).is_signed else x


# ---- rounding


@elementwise(aten.floor.default, opmath=False)
def floor(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.floor(x) if floating(x) else x


@elementwise(aten.ceil.default, opmath=False)
def ceil(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.ceil(x) if floating(x) else x


@elementwise(aten.trunc.default, opmath=False)
def trunc(ctx: LoweringContext, x: Value) -> Value:
    return trunc_value(x) if floating(x) else x


@elementwise(aten.round.default, opmath=False)
def round_(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.round_nearest_even(x) if floating(x) else x


@elementwise(aten.round.decimals)
def round_decimals(ctx: LoweringContext, x: Value, *, decimals: int) -> Value:
    if not floating(x):
        return x
    scale = hlo.full_like(x, 10.0 ** abs(decimals))
    up, down = (stablehlo.multiply, stablehlo.divide) if decimals >= 0 else (stablehlo.divide, stablehlo.multiply)
    return down(stablehlo.round_nearest_even(up(x, scale)), scale)


@elementwise(aten.sign.default, opmath=False)
def sign(ctx: LoweringContext, x: Value) -> Value:
    return signs(x)


@elementwise(aten.sgn.default)
def sgn(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.sign(x) if hlo.dtype(x).is_complex else signs(x)


def signs(x: Value) -> Value:
    """1, 0 or -1; 0 for NaN, and +0 for -0, as torch has it."""
    kind, zero = hlo.dtype(x), hlo.full_like(x, 0)
    if kind == torch.bool:
        return x
    positive = hlo.convert(hlo.compare(x, zero, "GT"), kind)
    return stablehlo.subtract(positive, hlo.convert(hlo.compare(x, zero, "LT"), kind))


# ---- comparison

COMPARISONS = {"eq": "EQ", "ne": "NE", "lt": "LT", "le": "LE", "gt": "GT", "ge": "GE"}


def _compare(direction: str) -> Any:
    def rule(ctx: LoweringContext, x: Value, other: Value) -> Value:
        return hlo.compare(x, other, direction)

    return rule


for _name, _direction in COMPARISONS.items():
    _packet = getattr(aten, _name)
    elementwise(_packet.Tensor, _packet.Scalar, compute="operands", opmath=False)(_compare(_direction))


@elementwise(aten.isnan.default, compute="operands", opmath=False)
def isnan(ctx: LoweringContext, x: Value) -> Value:
    return hlo.is_nan(x)


@elementwise(aten.isinf.default, compute="operands", opmath=False)
def isinf(ctx: LoweringContext, x: Value) -> Value:
    if hlo.dtype(x).is_complex:
        parts = stablehlo.real(x), stablehlo.imag(x)
        return stablehlo.or_(*(hlo.compare(stablehlo.abs(p), hlo.full_like(p, math.inf), "EQ") for p in parts))
    if not floating(x):
        return hlo.full(False, torch.bool, hlo.shape(x))
    return hlo.compare(stablehlo.abs(x), hlo.full_like(x, math.inf), "EQ")


def _logical(build: Any) -> Any:
    def rule(ctx: LoweringContext, x: Value, other: Value) -> Value:
        return build(hlo.convert(x, torch.bool), hlo.convert(other, torch.bool))

    return rule


for _name, _build in {"and": stablehlo.and_, "or": stablehlo.or_, "xor": stablehlo.xor}.items():
    elementwise(getattr(aten, f"logical_{_name}").default, compute="operands", opmath=False)(_logical(_build))


@elementwise(aten.logical_not.default, compute="operands", opmath=False)
def logical_not(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.not_(hlo.convert(x, torch.bool))


@lowers("prims::fma")
def fma(ctx: LoweringContext, a: Any, b: Any, c: Any) -> Value:
    """Dynamo writes an in-place addcmul so. Product and sum are rounded apart, as torch's CPU kernel does."""
    kind, shape = dtypes.opmath(ctx.out.dtype), ctx.out.shape
    x, y, z = (operand(v, kind, shape) for v in (a, b, c))
    return hlo.convert(stablehlo.add(stablehlo.multiply(x, y), z), ctx.out.dtype)


@elementwise(aten.maximum.default, opmath=False)
def maximum(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.maximum(x, other)


@elementwise(aten.minimum.default, opmath=False)
def minimum(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.minimum(x, other)


@elementwise(aten.fmax.default, opmath=False)
def fmax(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return _without_nan(x, other, stablehlo.maximum)


@elementwise(aten.fmin.default, opmath=False)
def fmin(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return _without_nan(x, other, stablehlo.minimum)


def _without_nan(x: Value, other: Value, build: Any) -> Value:
    """The extreme of two; a NaN loses to a number."""
    if not floating(x):
        return build(x, other)
    return hlo.select(hlo.is_nan(x), other, hlo.select(hlo.is_nan(other), x, build(x, other)))


@elementwise(aten.clamp.default, aten.clamp.Tensor, opmath=False)
def clamp(ctx: LoweringContext, x: Value, min: Value | None = None, max: Value | None = None) -> Value:
    if min is not None:
        x = stablehlo.maximum(x, min)
    return x if max is None else stablehlo.minimum(x, max)


@elementwise(aten.clamp_min.default, aten.clamp_min.Tensor, opmath=False)
def clamp_min(ctx: LoweringContext, x: Value, min: Value) -> Value:
    return stablehlo.maximum(x, min)


@elementwise(aten.clamp_max.default, aten.clamp_max.Tensor, opmath=False)
def clamp_max(ctx: LoweringContext, x: Value, max: Value) -> Value:
    return stablehlo.minimum(x, max)


# ---- choice


@lowers(aten.where.self)
def where(ctx: LoweringContext, condition: Value, x: Value, other: Value) -> Value:
    out = ctx.out
    ready = (hlo.broadcast(hlo.convert(v, out.dtype), out.shape) for v in (x, other))
    return hlo.select(hlo.broadcast(hlo.convert(condition, torch.bool), out.shape), *ready)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: LoweringContext, x: Value, mask: Value, value: Any) -> Value:
    out = ctx.out
    fill = hlo.convert(value, out.dtype) if hlo.is_value(value) else hlo.scalar(value, out.dtype)
    return hlo.select(hlo.broadcast(mask, out.shape), hlo.broadcast(fill, out.shape), hlo.broadcast(x, out.shape))
