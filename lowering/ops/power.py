"""Powers, roots, exponentials and logarithms of other bases, and scaling by powers of two."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.bitwise import split_exponent
from tpu_compile.lowering.ops.complex import complex_log, complex_sqrt, scaled_parts
from tpu_compile.lowering.registry import elementwise, lowers, operand

aten = torch.ops.aten


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: LoweringContext, x: Value, exponent: Any) -> Value:
    """Small exponents are products and roots, as in torch: exact, and much cheaper."""
    out = ctx.out
    if dtypes.is_integer(out.dtype):
        return integer_power(hlo.convert(x, out.dtype), int(exponent))
    kind = dtypes.opmath(out.dtype)
    base = hlo.convert(x, kind)
    known = None if out.dtype == torch.float16 and exponent in ROOTS else _known_power(base, exponent)
    if known is None:
        known = power(base, operand(exponent, kind, out.shape, out.dtype))
    return hlo.convert(known, out.dtype)


ROOTS = (0.5, -0.5)
"""Roots of -inf: NaN, but in float16, where torch's own kernel asks ``pow``, infinity."""


def _known_power(x: Value, exponent: Any) -> Value | None:
    one = hlo.full_like(x, 1)
    if exponent == 0:
        return one
    if exponent in (1, 2, 3):
        return integer_power(x, int(exponent.real))
    if exponent in (-1, -2):
        return stablehlo.divide(one, integer_power(x, -int(exponent.real)))
    if exponent in ROOTS:
        root = complex_sqrt(x) if hlo.dtype(x).is_complex else stablehlo.sqrt(x)
        return root if exponent == 0.5 else stablehlo.divide(one, root)
    return None


def integer_power(x: Value, exponent: int) -> Value:
    """``x ** exponent`` by squaring; integers wrap, and to a negative power are 0 but for 1 and -1."""
    if exponent < 0:
        return _reciprocal_power(x, hlo.full_like(x, exponent))
    result = None
    while exponent:
        if exponent & 1:
            result = x if result is None else stablehlo.multiply(result, x)
        exponent >>= 1
        x = stablehlo.multiply(x, x) if exponent else x
    return hlo.full_like(x, 1) if result is None else result


@elementwise(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(ctx: LoweringContext, x: Value, exponent: Value) -> Value:
    return power(x, exponent)


def power(x: Value, exponent: Value) -> Value:
    """``x ** exponent``, elementwise, in one dtype."""
    kind = hlo.dtype(x)
    if kind.is_complex:
        return _complex_power(x, exponent)
    if kind.is_floating_point:
        return stablehlo.power(x, exponent)
    result = _squaring(x, exponent)
    if not kind.is_signed:
        return result
    negative = hlo.compare(exponent, hlo.full_like(exponent, 0), "LT")
    return hlo.select(negative, _reciprocal_power(x, exponent), result)


def _reciprocal_power(x: Value, exponent: Value) -> Value:
    """Integers to a negative power: ±1 for ±1, else 0."""
    one = hlo.full_like(x, 1)
    odd = hlo.compare(stablehlo.and_(exponent, one), one, "EQ")
    minus = hlo.full_like(x, -1)
    of_minus = hlo.select(hlo.compare(x, minus, "EQ"), hlo.select(odd, minus, one), hlo.full_like(x, 0))
    return hlo.select(hlo.compare(x, one, "EQ"), one, of_minus)


def _squaring(x: Value, exponent: Value) -> Value:
    """Integer powers, modulo 2**width, for exponents of any size: StableHLO's own looks at six bits of the exponent."""

    def unfinished(result: Value, base: Value, left: Value) -> Value:
        return hlo.reduce(hlo.compare(left, hlo.full_like(left, 0), "GT"), range(hlo.rank(left)), "or")

    def step(result: Value, base: Value, left: Value) -> list[Value]:
        one = hlo.full_like(left, 1)
        odd = hlo.compare(stablehlo.and_(left, one), one, "EQ")
        result = hlo.select(odd, stablehlo.multiply(result, base), result)
        return [result, stablehlo.multiply(base, base), stablehlo.shift_right_logical(left, one)]

    left = stablehlo.maximum(exponent, hlo.full_like(exponent, 0))
    return hlo.while_([hlo.full_like(x, 1), x, left], unfinished, step)[0]


def _complex_power(x: Value, exponent: Value) -> Value:
    """``exp(exponent * log(x))``; a base of 0 gives what its limit gives, and torch's NaN where there is none."""
    general = stablehlo.exponential(stablehlo.multiply(exponent, complex_log(x)))
    direction = stablehlo.real(exponent)
    zero, nan, inf = (hlo.full_like(direction, v) for v in (0, math.nan, math.inf))
    magnitude = hlo.select(hlo.compare(direction, zero, "GT"), zero, nan)
    magnitude = hlo.select(hlo.compare(direction, zero, "LT"), inf, magnitude)
    at_zero = stablehlo.complex(magnitude, hlo.select(hlo.compare(direction, zero, "GT"), zero, nan))
    return hlo.select(hlo.compare(x, hlo.full_like(x, 0), "EQ"), at_zero, general)


@elementwise(aten.square.default, opmath=False)
def square(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.multiply(x, x)


# ---- base 2 and base 10


@elementwise(aten.exp2.default)
def exp2(ctx: LoweringContext, x: Value) -> Value:
    if hlo.dtype(x).is_complex:
        return stablehlo.exponential(scaled_parts(x, math.log(2)))
    return stablehlo.power(hlo.full_like(x, 2), x)


@elementwise(aten.log2.default)
def log2(ctx: LoweringContext, x: Value) -> Value:
    return _logarithm(x, 2)


@elementwise(aten.log10.default)
def log10(ctx: LoweringContext, x: Value) -> Value:
    return _logarithm(x, 10)


def _logarithm(x: Value, base: int) -> Value:
    """From the exponent and the mantissa apart, so that whole powers of the base give whole numbers."""
    if hlo.dtype(x).is_complex:
        return scaled_parts(complex_log(x), 1 / math.log(base))
    of_two, of_e = (1.0, math.log2(math.e)) if base == 2 else (math.log10(2), math.log10(math.e))
    kind, scale = hlo.dtype(x), hlo.full_like(x, of_e)
    mantissa, exponent = split_exponent(x)
    small = hlo.compare(mantissa, hlo.full_like(x, math.sqrt(0.5)), "LT")
    mantissa = hlo.select(small, stablehlo.add(mantissa, mantissa), mantissa)
    whole = hlo.convert(stablehlo.subtract(exponent, hlo.convert(small, hlo.dtype(exponent))), kind)
    high = _short(of_two, kind)
    rest = stablehlo.multiply(whole, hlo.full_like(x, of_two - high))
    rest = stablehlo.add(stablehlo.multiply(stablehlo.log(mantissa), scale), rest)
    exact = stablehlo.add(stablehlo.multiply(whole, hlo.full_like(x, high)), rest)
    inside = stablehlo.and_(stablehlo.is_finite(x), hlo.compare(x, hlo.full_like(x, 0), "GT"))
    return hlo.select(inside, exact, stablehlo.log(x))


def _short(value: float, kind: torch.dtype) -> float:
    """``value`` with so few bits that its product with any exponent is exact."""
    bits = 24 - 8 if kind == torch.float32 else 53 - 11
    scale = 2.0 ** (bits - math.frexp(value)[1])
    return math.floor(value * scale) / scale


@lowers(aten.ldexp.Tensor)
def ldexp(ctx: LoweringContext, x: Value, other: Value) -> Value:
    """``x * 2 ** other``; the power has ``other``'s dtype (float32 for integers) before the product, as in torch."""
    out = ctx.out
    given = hlo.dtype(other)
    kept = given if given.is_floating_point or given.is_complex else torch.get_default_dtype()
    kind = dtypes.opmath(kept)
    exponent = hlo.convert(other, kind)
    scale = hlo.convert(power(hlo.full_like(exponent, 2), exponent), kept)
    final = dtypes.opmath(out.dtype)
    product = stablehlo.multiply(operand(x, final, out.shape), operand(scale, final, out.shape))
    return hlo.convert(product, out.dtype)
