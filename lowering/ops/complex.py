"""Complex numbers: parts, polar form, and functions whose branch cuts and signed zeros are C's (and torch's)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.bitwise import is_negative, join_parts, split_parts, with_sign
from tpu_compile.lowering.registry import elementwise, lowers, operand

aten = torch.ops.aten


def parts(x: Value) -> tuple[Value, Value]:
    """(real, imaginary)."""
    return stablehlo.real(x), stablehlo.imag(x)


# ---- making and taking apart


@lowers(aten.complex.default)
def complex_(ctx: LoweringContext, real: Value, imag: Value) -> Value:
    return _from_parts(ctx, real, imag)


@lowers(aten.polar.default)
def polar(ctx: LoweringContext, abs: Value, angle: Value) -> Value:
    kind = dtypes.real(ctx.out.dtype)
    radius, turn = (operand(v, kind, ctx.out.shape) for v in (abs, angle))
    return stablehlo.complex(
        stablehlo.multiply(radius, stablehlo.cosine(turn)), stablehlo.multiply(radius, stablehlo.sine(turn))
    )


def _from_parts(ctx: LoweringContext, real: Value, imag: Value) -> Value:
    kind = dtypes.opmath(dtypes.real(ctx.out.dtype))  # a complex32 is carried as complex64
    return stablehlo.complex(*(operand(v, kind, ctx.out.shape) for v in (real, imag)))


@lowers(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(ctx: LoweringContext, x: Value) -> Value:
    return join_parts(hlo.convert(x, dtypes.opmath(hlo.dtype(x))))


@lowers(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(ctx: LoweringContext, x: Value) -> Value:
    return hlo.convert(split_parts(x), ctx.out.dtype)  # float16 of a complex32


@elementwise(
    *(aten.conj_physical.default, aten._conj_physical.default, aten._conj.default, aten._conj_copy.default),
    opmath=False,
)
def conj_physical(ctx: LoweringContext, x: Value) -> Value:
    return conjugate(x)


def conjugate(x: Value) -> Value:
    """``x`` with its imaginary part negated; real values as they are."""
    if not hlo.dtype(x).is_complex:
        return x
    real, imag = parts(x)
    return stablehlo.complex(real, stablehlo.negate(imag))


@lowers(aten.angle.default)
def angle(ctx: LoweringContext, x: Value) -> Value:
    """Of a real number: pi below 0, else 0; NaN stays."""
    if hlo.dtype(x).is_complex:
        real, imag = parts(x)
        return stablehlo.atan2(imag, real)
    x = hlo.convert(x, ctx.out.dtype)
    zero = hlo.full_like(x, 0)
    turned = hlo.select(hlo.compare(x, zero, "LT"), hlo.full_like(x, math.pi), zero)
    return hlo.select(hlo.is_nan(x), x, turned)


def magnitude(x: Value) -> Value:
    """``|x|`` of a complex value, without overflow on the way; infinite if either part is, NaN beside it or not."""
    return hypotenuse(*parts(x))


def hypotenuse(a: Value, b: Value) -> Value:
    """``sqrt(a² + b²)`` of real values, scaled by the larger."""
    a, b = stablehlo.abs(a), stablehlo.abs(b)
    large, small = stablehlo.maximum(a, b), stablehlo.minimum(a, b)
    zero, one, inf = (hlo.full_like(a, v) for v in (0, 1, math.inf))
    ratio = stablehlo.divide(small, hlo.select(hlo.compare(large, zero, "EQ"), one, large))
    length = stablehlo.multiply(large, stablehlo.sqrt(stablehlo.add(one, stablehlo.multiply(ratio, ratio))))
    infinite = stablehlo.or_(hlo.compare(a, inf, "EQ"), hlo.compare(b, inf, "EQ"))
    return hlo.select(infinite, inf, length)


@elementwise(aten.hypot.default)
def hypot(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return hypotenuse(x, other)


# ---- functions; XLA's own are right inside, but lose the sign of a zero part on a branch cut, and digits near 0


def complex_sqrt(x: Value) -> Value:
    """The root with real part ≥ 0, on the side of the cut that the sign of the imaginary part says."""
    real, imag = parts(stablehlo.sqrt(x))
    return stablehlo.complex(real, with_sign(imag, stablehlo.imag(x)))


def complex_rsqrt(x: Value) -> Value:
    return stablehlo.divide(hlo.full_like(x, 1), complex_sqrt(x))


def complex_log(x: Value) -> Value:
    """log|x| + i·angle; of an infinite part the logarithm is infinite, NaN beside it or not."""
    real, imag = parts(stablehlo.log(x))
    inf = hlo.full_like(real, math.inf)
    infinite = stablehlo.or_(*(hlo.compare(stablehlo.abs(p), inf, "EQ") for p in parts(x)))
    return stablehlo.complex(hlo.select(infinite, inf, real), imag)


def complex_logistic(x: Value) -> Value:
    one = hlo.full_like(x, 1)
    return stablehlo.divide(one, stablehlo.add(one, stablehlo.exponential(stablehlo.negate(x))))


def logistic(x: Value) -> Value:
    """The sigmoid, real or complex."""
    return complex_logistic(x) if hlo.dtype(x).is_complex else stablehlo.logistic(x)


def complex_sinh(x: Value) -> Value:
    """sinh a · cos b + i · cosh a · sin b."""
    a, b = parts(x)
    return stablehlo.complex(
        absorbing_product(chlo.sinh(a), stablehlo.cosine(b)), absorbing_product(chlo.cosh(a), stablehlo.sine(b))
    )


def complex_cosh(x: Value) -> Value:
    """cosh a · cos b + i · sinh a · sin b."""
    a, b = parts(x)
    return stablehlo.complex(
        absorbing_product(chlo.cosh(a), stablehlo.cosine(b)), absorbing_product(chlo.sinh(a), stablehlo.sine(b))
    )


def complex_sine(x: Value) -> Value:
    """sin a · cosh b + i · cos a · sinh b."""
    a, b = parts(x)
    return stablehlo.complex(
        absorbing_product(stablehlo.sine(a), chlo.cosh(b)), absorbing_product(stablehlo.cosine(a), chlo.sinh(b))
    )


def complex_cosine(x: Value) -> Value:
    """cos a · cosh b - i · sin a · sinh b."""
    a, b = parts(x)
    imag = absorbing_product(stablehlo.sine(a), chlo.sinh(b))
    return stablehlo.complex(absorbing_product(stablehlo.cosine(a), chlo.cosh(b)), stablehlo.negate(imag))


def absorbing_product(a: Value, b: Value) -> Value:
    """``a * b``, where a zero factor wins over an infinite or NaN one, as C's complex functions have it."""
    zero, one = hlo.full_like(a, 0), hlo.full_like(a, 1)
    a_zero, b_zero = hlo.compare(a, zero, "EQ"), hlo.compare(b, zero, "EQ")
    unit_a = hlo.select(stablehlo.and_(b_zero, stablehlo.not_(a_zero)), with_sign(one, a), a)
    return stablehlo.multiply(unit_a, hlo.select(a_zero, with_sign(one, b), b))


def scaled_parts(x: Value, factor: float) -> Value:
    """``x`` times a real number: as a complex product, an infinite part would make the other one NaN."""
    return stablehlo.complex(*(stablehlo.multiply(part, hlo.full_like(part, factor)) for part in parts(x)))


def _odd(function: Callable[[Value], Value]) -> Callable[[Value], Value]:
    """A function with f(-x) = -f(x) and f(conj x) = conj f(x), from its first quadrant: each part keeps its sign."""

    def signed(x: Value) -> Value:
        a, b = parts(x)
        real, imag = parts(function(_first_quadrant(x)))
        return stablehlo.complex(with_sign(real, a), with_sign(imag, b))

    return signed


def _first_quadrant(x: Value) -> Value:
    return stablehlo.complex(*(stablehlo.abs(part) for part in parts(x)))


def complex_acos(x: Value) -> Value:
    a, b = parts(x)
    real, imag = parts(chlo.acos(_first_quadrant(x)))
    real = hlo.select(is_negative(a), stablehlo.subtract(hlo.full_like(real, math.pi), real), real)
    return stablehlo.complex(real, with_sign(imag, stablehlo.negate(b)))


def complex_acosh(x: Value) -> Value:
    """±i times the arc cosine, the sign being the one that makes the real part positive."""
    real, imag = parts(complex_acos(x))
    return stablehlo.complex(stablehlo.abs(imag), with_sign(real, stablehlo.imag(x)))


COMPLEX: dict[Any, Callable[[Value], Value]] = {
    stablehlo.sqrt: complex_sqrt,
    stablehlo.rsqrt: complex_rsqrt,
    stablehlo.log: complex_log,
    stablehlo.logistic: complex_logistic,
    stablehlo.sine: complex_sine,
    stablehlo.cosine: complex_cosine,
    chlo.sinh: complex_sinh,
    chlo.cosh: complex_cosh,
    chlo.acos: complex_acos,
    chlo.acosh: complex_acosh,
    **{function: _odd(function) for function in (chlo.asin, chlo.asinh, chlo.atan, chlo.atanh)},
}
"""Builders of real functions to their complex counterparts; those not listed are right for both."""
