"""Quotients and remainders with torch's rounding, in every dtype, and gcd and lcm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import elementwise, lowers, operand

aten = torch.ops.aten


# A size divided under dynamic=True arrives as true_divide: torch puts it in after its decompositions have run.
@elementwise(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, wide=("other",))
def div(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.divide(x, other)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: LoweringContext, x: Value, other: Any, *, rounding_mode: str | None) -> Value:
    x, y, rounded = _operands(ctx, x, other)
    if rounding_mode == "floor":
        result = floor_quotient(x, y, rounded)
    elif rounding_mode == "trunc":
        result = trunc_value(rounded(true_quotient(x, y))) if _floating(x) else stablehlo.divide(x, y)
    else:
        result = stablehlo.divide(x, y)
    return hlo.convert(result, ctx.out.dtype)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ctx: LoweringContext, x: Value, other: Any) -> Value:
    return hlo.convert(floor_quotient(*_operands(ctx, x, other)), ctx.out.dtype)


Rounding = Callable[[Value], Value]


def _operands(ctx: LoweringContext, x: Any, other: Any) -> tuple[Value, Value, Rounding]:
    """(dividend, divisor, what torch does to each intermediate result): by a scalar it computes in float32 throughout,
    by a tensor it rounds every step to 16 bits."""
    out = ctx.out
    kind = dtypes.opmath(out.dtype)
    scalar = not hlo.is_value(other) or hlo.rank(other) == 0
    dividend = operand(x, kind, out.shape, out.dtype)
    divisor = operand(other, kind, out.shape, kind if scalar else out.dtype)
    return dividend, divisor, rounder(kind if scalar else out.dtype)


@elementwise(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(ctx: LoweringContext, x: Value, other: Value) -> Value:
    result = stablehlo.remainder(x, other)
    nonzero = hlo.compare(result, hlo.full_like(result, 0), "NE")
    return hlo.select(stablehlo.and_(nonzero, _opposite_signs(result, other)), stablehlo.add(result, other), result)


@elementwise(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return stablehlo.remainder(x, other)


@elementwise(aten.reciprocal.default)
def reciprocal(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.divide(hlo.full_like(x, 1), x)


def true_quotient(x: Value, y: Value) -> Value:
    """``x / y`` rounded once. XLA turns a division by a broadcast value into a product with its reciprocal, which is
    off by an ulp: enough to lose a whole number before truncation. A divisor that depends on ``x`` stays a division."""
    return stablehlo.divide(x, hlo.select(hlo.is_nan(x), x, y))


def trunc_value(x: Value) -> Value:
    """Towards 0."""
    return hlo.select(hlo.compare(x, hlo.full_like(x, 0), "LT"), stablehlo.ceil(x), stablehlo.floor(x))


def floor_quotient(x: Value, y: Value, rounded: Rounding) -> Value:
    """Python's ``//``. For floats it comes from the exact remainder, so that 1.0 // 0.1 is 9."""
    return _float_floor_quotient(x, y, rounded) if _floating(x) else _integer_floor_quotient(x, y)


def _integer_floor_quotient(x: Value, y: Value) -> Value:
    remainder, quotient = stablehlo.remainder(x, y), stablehlo.divide(x, y)
    if not hlo.dtype(x).is_signed:
        return quotient
    inexact = hlo.compare(remainder, hlo.full_like(x, 0), "NE")
    below = stablehlo.subtract(quotient, hlo.full_like(x, 1))
    return hlo.select(stablehlo.and_(inexact, _opposite_signs(remainder, y)), below, quotient)


def _float_floor_quotient(x: Value, y: Value, rounded: Rounding) -> Value:
    zero, one, half = (hlo.full_like(x, v) for v in (0, 1, 0.5))
    remainder = rounded(stablehlo.remainder(x, y))
    inexact = stablehlo.and_(hlo.compare(remainder, zero, "NE"), _opposite_signs(remainder, y))
    quotient = rounded(true_quotient(rounded(stablehlo.subtract(x, remainder)), y))
    quotient = hlo.select(inexact, rounded(stablehlo.subtract(quotient, one)), quotient)
    whole = stablehlo.floor(quotient)
    short = hlo.compare(stablehlo.subtract(quotient, whole), half, "GT")
    whole = hlo.select(short, rounded(stablehlo.add(whole, one)), whole)
    plain = true_quotient(x, y)
    whole = hlo.select(hlo.compare(quotient, zero, "EQ"), stablehlo.multiply(zero, plain), whole)
    return hlo.select(hlo.compare(y, zero, "EQ"), plain, whole)


def rounder(kept: torch.dtype) -> Rounding:
    """Rounds a float32 value to 16 bits and back, if ``kept`` is a 16-bit float."""
    if dtypes.opmath(kept) == kept:
        return lambda value: value
    return lambda value: hlo.convert(hlo.convert(value, kept), dtypes.opmath(kept))


def _floating(x: Value) -> bool:
    return hlo.dtype(x).is_floating_point


def _opposite_signs(a: Value, b: Value) -> Value:
    """Where one is negative and the other is not."""
    zero = hlo.full_like(a, 0)
    return hlo.compare(hlo.compare(a, zero, "LT"), hlo.compare(b, zero, "LT"), "NE")


# ---- common divisors


@elementwise(aten.gcd.default)
def gcd(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return greatest_common_divisor(x, other)


@elementwise(aten.lcm.default)
def lcm(ctx: LoweringContext, x: Value, other: Value) -> Value:
    """Narrow integers are multiplied as C's int, then cut: the magnitude is taken before the result wraps."""
    divisor = greatest_common_divisor(x, other)
    kind = torch.int32 if hlo.dtype(x).itemsize < 4 else hlo.dtype(x)
    x, other, divisor = (hlo.convert(v, kind) for v in (x, other, divisor))
    zero = hlo.full_like(x, 0)
    safe = hlo.select(hlo.compare(divisor, zero, "EQ"), hlo.full_like(x, 1), divisor)
    return _magnitude(stablehlo.multiply(stablehlo.divide(x, safe), other))


def _magnitude(x: Value) -> Value:
    return stablehlo.abs(x) if hlo.dtype(x).is_signed else x


def greatest_common_divisor(x: Value, y: Value) -> Value:
    """Euclid's algorithm on all elements at once, until the last one is done."""

    def unfinished(a: Value, b: Value) -> Value:
        nonzero = hlo.compare(a, hlo.full_like(a, 0), "NE")
        return hlo.reduce(nonzero, range(hlo.rank(a)), "or")

    def step(a: Value, b: Value) -> list[Value]:
        zero = hlo.compare(a, hlo.full_like(a, 0), "EQ")
        rest = stablehlo.remainder(b, hlo.select(zero, hlo.full_like(a, 1), a))
        return [hlo.select(zero, a, rest), hlo.select(zero, b, a)]

    return hlo.while_([_magnitude(x), _magnitude(y)], unfinished, step)[1]
