"""Pointwise arithmetic, comparison, bit and rounding ops. Most unary ops are a line of a table."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import elementwise, lowers

aten = torch.ops.aten

# ---- unary tables: overload -> builder

ROUNDED = {
    aten.neg.default: stablehlo.negate,
    aten.bitwise_not.default: stablehlo.not_,
    aten.sqrt.default: stablehlo.sqrt,
    aten.positive.default: lambda x: x,
}
"""One correctly rounded operation: the 16-bit floats need no detour through float32."""

FUNCTIONS = {
    aten.exp.default: stablehlo.exponential,
    aten.expm1.default: stablehlo.exponential_minus_one,
    aten.log.default: stablehlo.log,
    aten.log1p.default: stablehlo.log_plus_one,
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
    aten.digamma.default: chlo.digamma,
}


def unary(build: Any) -> Any:
    """A rule that is one builder of one operand."""

    def rule(ctx: LoweringContext, x: Value) -> Value:
        return build(x)

    return rule


def binary(build: Any) -> Any:
    """A rule that is one builder of two operands."""

    def rule(ctx: LoweringContext, x: Value, other: Value) -> Value:
        return build(x, other)

    return rule


for _op, _build in ROUNDED.items():
    elementwise(_op, opmath=False)(unary(_build))
for _op, _build in FUNCTIONS.items():
    elementwise(_op)(unary(_build))


# ---- arithmetic


def scaled(x: Value, alpha: Any) -> Value:
    """``alpha * x``."""
    return x if alpha == 1 else stablehlo.multiply(x, hlo.full_like(x, alpha))


@elementwise(aten.add.Tensor, aten.add.Scalar)
def add(ctx: LoweringContext, x: Value, other: Value, alpha: Any = 1) -> Value:
    return stablehlo.add(x, scaled(other, alpha))


@elementwise(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: LoweringContext, x: Value, other: Value, alpha: Any = 1) -> Value:
    return stablehlo.subtract(x, scaled(other, alpha))


@elementwise(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: LoweringContext, x: Value, other: Value, alpha: Any = 1) -> Value:
    return stablehlo.subtract(other, scaled(x, alpha))


@elementwise(aten.mul.Tensor, aten.mul.Scalar, opmath=False)
def mul(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.multiply(x, other)


@elementwise(aten.div.Tensor, aten.div.Scalar, opmath=False)
def div(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.divide(x, other)


@elementwise(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: LoweringContext, x: Value, other: Value, *, rounding_mode: str | None) -> Value:
    if rounding_mode == "floor":
        return floor_quotient(x, other)
    quotient = stablehlo.divide(x, other)
    return quotient if rounding_mode is None or not floating(x) else trunc_value(quotient)


@elementwise(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return floor_quotient(x, other)


def floating(x: Value) -> bool:
    return hlo.dtype(x).is_floating_point


def floor_quotient(x: Value, y: Value) -> Value:
    """Python's ``//``. For floats it comes from the exact remainder, so that 1.0 // 0.1 is 9."""
    zero = hlo.full_like(x, 0)
    remainder = stablehlo.remainder(x, y)
    differs = stablehlo.and_(hlo.compare(remainder, zero, "NE"), opposite_signs(remainder, y))
    one = hlo.full_like(x, 1)
    if not floating(x):
        quotient = stablehlo.divide(x, y)
        return hlo.select(differs, stablehlo.subtract(quotient, one), quotient)
    quotient = stablehlo.divide(stablehlo.subtract(x, remainder), y)
    quotient = hlo.select(differs, stablehlo.subtract(quotient, one), quotient)
    whole = stablehlo.floor(quotient)
    half = hlo.full_like(x, 0.5)
    whole = hlo.select(hlo.compare(stablehlo.subtract(quotient, whole), half, "GT"), stablehlo.add(whole, one), whole)
    plain = stablehlo.divide(x, y)
    signed_zero = stablehlo.multiply(zero, plain)
    whole = hlo.select(hlo.compare(quotient, zero, "EQ"), signed_zero, whole)
    return hlo.select(hlo.compare(y, zero, "EQ"), plain, whole)


def opposite_signs(a: Value, b: Value) -> Value:
    """Where one is negative and the other is not."""
    zero = hlo.full_like(a, 0)
    return hlo.compare(hlo.compare(a, zero, "LT"), hlo.compare(b, zero, "LT"), "NE")


@elementwise(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(ctx: LoweringContext, x: Value, other: Value) -> Value:
    result = stablehlo.remainder(x, other)
    nonzero = hlo.compare(result, hlo.full_like(result, 0), "NE")
    return hlo.select(stablehlo.and_(nonzero, opposite_signs(result, other)), stablehlo.add(result, other), result)


@elementwise(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.remainder(x, other)


@elementwise(aten.reciprocal.default)
def reciprocal(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.divide(hlo.full_like(x, 1), x)


@elementwise(aten.addcmul.default)
def addcmul(ctx: LoweringContext, x: Value, tensor1: Value, tensor2: Value, *, value: Value | None = None) -> Value:
    product = stablehlo.multiply(tensor1, tensor2)
    return stablehlo.add(x, product if value is None else stablehlo.multiply(value, product))


@elementwise(aten.addcdiv.default)
def addcdiv(ctx: LoweringContext, x: Value, tensor1: Value, tensor2: Value, *, value: Value | None = None) -> Value:
    scaled1 = tensor1 if value is None else stablehlo.multiply(value, tensor1)
    return stablehlo.add(x, stablehlo.divide(scaled1, tensor2))


@elementwise(aten.lerp.Tensor, aten.lerp.Scalar)
def lerp(ctx: LoweringContext, x: Value, end: Value, weight: Value) -> Value:
    """Written from the nearer end, as torch does, so that weight 1 gives exactly ``end``."""
    span = stablehlo.subtract(end, x)
    low = stablehlo.add(x, stablehlo.multiply(weight, span))
    high = stablehlo.subtract(end, stablehlo.multiply(span, stablehlo.subtract(hlo.full_like(x, 1), weight)))
    size = stablehlo.abs(weight)
    return hlo.select(hlo.compare(size, hlo.full_like(size, 0.5), "LT"), low, high)


# ---- powers


@lowers(aten.abs.default)
def abs_(ctx: LoweringContext, x: Value) -> Value:
    unsigned = hlo.dtype(x) in (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    return x if unsigned else stablehlo.abs(x)


@elementwise(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: LoweringContext, x: Value, exponent: Any) -> Value:
    return power(x, exponent)


@elementwise(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(ctx: LoweringContext, x: Value, exponent: Value) -> Value:
    return power(x, exponent)


def power(x: Value, exponent: Value) -> Value:
    """``x ** exponent``; integers to a negative power are 0, but for 1 and -1."""
    if floating(x) or hlo.dtype(x).is_complex:
        return stablehlo.power(x, exponent)
    if hlo.dtype(x) == torch.bool:
        return stablehlo.or_(x, stablehlo.not_(exponent))
    return stablehlo.power(x, exponent)


@elementwise(aten.square.default, opmath=False)
def square(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.multiply(x, x)


# ---- rounding


def trunc_value(x: Value) -> Value:
    """Towards 0."""
    return hlo.select(hlo.compare(x, hlo.full_like(x, 0), "LT"), stablehlo.ceil(x), stablehlo.floor(x))


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
    if hlo.dtype(x) == torch.bool:
        return x
    if dtypes.is_integer(hlo.dtype(x)) and not hlo.dtype(x).is_signed:
        return hlo.convert(hlo.convert(x, torch.bool), hlo.dtype(x))
    if floating(x):
        return hlo.select(hlo.is_nan(x), hlo.full_like(x, 0), stablehlo.sign(x))
    return stablehlo.sign(x)


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
    _packet = getattr(aten, f"bitwise_{_name}")
    elementwise(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor, opmath=False)(binary(_build))


@elementwise(aten.logical_not.default, compute="operands", opmath=False)
def logical_not(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.not_(hlo.convert(x, torch.bool))


@elementwise(aten.maximum.default, opmath=False)
def maximum(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.maximum(x, other)


@elementwise(aten.minimum.default, opmath=False)
def minimum(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.minimum(x, other)


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
    fill = hlo.convert(value, out.dtype) if isinstance(value, Value) else hlo.scalar(value, out.dtype)
    return hlo.select(hlo.broadcast(mask, out.shape), hlo.broadcast(fill, out.shape), hlo.broadcast(x, out.shape))
