"""Gamma and its relatives, the error function's inverses and scaled forms, zeta."""

from __future__ import annotations

import math

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import cephes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.bitwise import with_sign
from tpu_compile.lowering.polynomials import negate_where, rational, times
from tpu_compile.lowering.registry import elementwise

aten = torch.ops.aten


# ---- gamma


@elementwise(aten.digamma.default)
def digamma(ctx: LoweringContext, x: Value) -> Value:
    return polygamma_0(x)


def polygamma_0(x: Value) -> Value:
    """chlo's digamma, but for the signed infinity at 0."""
    zero, inf = hlo.full_like(x, 0), hlo.full_like(x, math.inf)
    return hlo.select(hlo.compare(x, zero, "EQ"), with_sign(inf, stablehlo.negate(x)), chlo.digamma(x))


@elementwise(aten.polygamma.default)
def polygamma(ctx: LoweringContext, n: int, x: Value) -> Value:
    """(-1)^(n+1) · n! · zeta(n + 1, x)."""
    if n == 0:
        return polygamma_0(x)
    if n == 1:
        return _trigamma(x)
    derivative = times(_zeta(hlo.full_like(x, n + 1), x), math.exp(math.lgamma(n + 1)))
    return derivative if n % 2 else stablehlo.negate(derivative)


def _trigamma(x: Value) -> Value:
    """Left of 1/2 by reflection: π² / sin²(πx) - trigamma(1 - x)."""
    one = hlo.full_like(x, 1)
    left = hlo.compare(x, hlo.full_like(x, 0.5), "LT")
    right = _zeta(hlo.full_like(x, 2), hlo.select(left, stablehlo.subtract(one, x), x))
    ratio = stablehlo.divide(hlo.full_like(x, math.pi), stablehlo.sine(times(x, math.pi)))
    return hlo.select(left, stablehlo.subtract(stablehlo.multiply(ratio, ratio), right), right)


@elementwise(aten.special_zeta.default, aten.special_zeta.other_scalar, aten.special_zeta.self_scalar)
def zeta(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return _zeta(x, other)


_TERMS = 10
"""Terms of zeta's sum before the Euler-Maclaurin formula takes over: it wants an argument of about 10."""

_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798, -174611 / 330)


def _zeta(x: Value, q: Value) -> Value:
    """Hurwitz' zeta: inf at its poles, NaN where the sum diverges or is complex."""
    zero, one = hlo.full_like(q, 0), hlo.full_like(q, 1)
    nan, inf = hlo.full_like(q, math.nan), hlo.full_like(q, math.inf)
    below = hlo.compare(q, zero, "LE")
    value = hlo.select(stablehlo.and_(below, stablehlo.not_(_is_whole(x))), nan, _hurwitz_sum(x, q))
    value = hlo.select(stablehlo.and_(below, _is_whole(q)), inf, value)
    value = hlo.select(hlo.compare(x, one, "LT"), nan, value)
    return hlo.select(hlo.compare(x, one, "EQ"), inf, value)


def _is_whole(x: Value) -> Value:
    return hlo.compare(x, stablehlo.floor(x), "EQ")


def _hurwitz_sum(x: Value, q: Value) -> Value:
    exponent, one = stablehlo.negate(x), hlo.full_like(x, 1)
    a, total = _climb(q, exponent)
    for _ in range(_TERMS):
        total = stablehlo.add(total, stablehlo.power(a, exponent))
        a = stablehlo.add(a, one)
    last = stablehlo.power(a, exponent)
    integral = stablehlo.divide(stablehlo.power(a, stablehlo.subtract(one, x)), stablehlo.subtract(x, one))
    total = stablehlo.add(stablehlo.add(total, integral), times(last, 0.5))
    term = stablehlo.multiply(last, stablehlo.divide(x, a))
    for k, bernoulli in enumerate(_BERNOULLI, 1):
        total = stablehlo.add(total, times(term, bernoulli / math.factorial(2 * k)))
        for offset in (2 * k - 1, 2 * k):
            term = stablehlo.multiply(term, stablehlo.divide(stablehlo.add(x, hlo.full_like(x, offset)), a))
    return total


def _climb(q: Value, exponent: Value) -> tuple[Value, Value]:
    """(first argument ≥ 0, sum of the terms before it): only fractions below 0 have any."""

    def below(a: Value) -> Value:
        fraction = stablehlo.not_(_is_whole(a))
        return stablehlo.and_(fraction, hlo.compare(a, hlo.full_like(a, 0), "LT"))

    def unfinished(a: Value, total: Value) -> Value:
        return hlo.reduce(below(a), range(hlo.rank(a)), "or")

    def step(a: Value, total: Value) -> list[Value]:
        more = stablehlo.add(total, stablehlo.power(a, exponent))
        following = stablehlo.add(a, hlo.full_like(a, 1))
        return [hlo.select(below(a), following, a), hlo.select(below(a), more, total)]

    a, total = hlo.while_([q, hlo.full_like(q, 0)], unfinished, step)
    return a, total


# ---- the normal distribution


@elementwise(aten.special_erfcx.default)
def erfcx(ctx: LoweringContext, x: Value) -> Value:
    return scaled_erfc(x)


_CONTINUED = 4.0
"""Beyond it the continued fraction of erfcx converges to float64's precision within its levels."""


def scaled_erfc(x: Value) -> Value:
    """exp(x²) · erfc(x): as it stands up to 4, by its continued fraction beyond; reflected below 0."""
    size = stablehlo.abs(x)
    inside = hlo.compare(size, hlo.full_like(x, _CONTINUED), "LE")
    bounded = hlo.select(inside, size, hlo.full_like(x, _CONTINUED))
    near = stablehlo.multiply(_exponential_of_square(bounded), chlo.erfc(bounded))
    value = hlo.select(inside, near, _erfcx_fraction(size))
    finite = stablehlo.maximum(x, hlo.full_like(x, -28))
    reflected = stablehlo.subtract(times(_exponential_of_square(finite), 2), value)
    return hlo.select(hlo.compare(x, hlo.full_like(x, 0), "LT"), reflected, value)


def _exponential_of_square(x: Value) -> Value:
    """exp(x²), the square split so that its rounding is not magnified."""
    coarse = stablehlo.round_nearest_even(times(x, 64))
    coarse = times(coarse, 1 / 64)
    rest = stablehlo.multiply(stablehlo.subtract(x, coarse), stablehlo.add(x, coarse))
    return stablehlo.multiply(stablehlo.exponential(stablehlo.multiply(coarse, coarse)), stablehlo.exponential(rest))


def _erfcx_fraction(x: Value) -> Value:
    """1/√π / (x + ½/(x + 1/(x + 1½/(x + …)))), from the innermost level."""
    levels = 12 if hlo.dtype(x) == torch.float32 else 40
    value = x
    for k in range(levels, 0, -1):
        value = stablehlo.add(x, stablehlo.divide(hlo.full_like(x, k / 2), value))
    return stablehlo.divide(hlo.full_like(x, 1 / math.sqrt(math.pi)), value)


@elementwise(aten.special_log_ndtr.default)
def log_ndtr(ctx: LoweringContext, x: Value) -> Value:
    t = times(x, math.sqrt(0.5))
    half = times(scaled_erfc(stablehlo.negate(t)), 0.5)
    left = stablehlo.subtract(stablehlo.log(half), stablehlo.multiply(t, t))
    right = stablehlo.log_plus_one(times(chlo.erfc(t), -0.5))
    return hlo.select(hlo.compare(x, hlo.full_like(x, -1), "LT"), left, right)


_TAIL = math.exp(-2)


@elementwise(aten.special_ndtri.default)
def ndtri(ctx: LoweringContext, x: Value) -> Value:
    """The quantile: rational in the middle, in √(-2 log p) towards either end."""
    one, zero, inf = (hlo.full_like(x, v) for v in (1, 0, math.inf))
    upper = hlo.compare(x, hlo.full_like(x, 1 - _TAIL), "GT")
    p = hlo.select(upper, stablehlo.subtract(one, x), x)
    middle = hlo.compare(p, hlo.full_like(x, _TAIL), "GT")
    value = hlo.select(middle, _ndtri_middle(p), negate_where(stablehlo.not_(upper), _ndtri_tail(p)))
    value = hlo.select(hlo.compare(x, zero, "EQ"), stablehlo.negate(inf), value)
    return hlo.select(hlo.compare(x, one, "EQ"), inf, value)


def _ndtri_middle(p: Value) -> Value:
    y = stablehlo.subtract(p, hlo.full_like(p, 0.5))
    square = stablehlo.multiply(y, y)
    ratio = stablehlo.multiply(square, rational(square, cephes.NDTRI_P0, cephes.NDTRI_Q0))
    return times(stablehlo.add(y, stablehlo.multiply(y, ratio)), math.sqrt(2 * math.pi))


def _ndtri_tail(p: Value) -> Value:
    x = stablehlo.sqrt(times(stablehlo.log(p), -2))
    z = stablehlo.divide(hlo.full_like(x, 1), x)
    near, far = rational(z, cephes.NDTRI_P1, cephes.NDTRI_Q1), rational(z, cephes.NDTRI_P2, cephes.NDTRI_Q2)
    correction = stablehlo.multiply(z, hlo.select(hlo.compare(x, hlo.full_like(x, 8), "LT"), near, far))
    first = stablehlo.subtract(x, stablehlo.divide(stablehlo.log(x), x))
    return stablehlo.subtract(first, correction)
