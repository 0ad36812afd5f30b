"""Bessel and Airy functions, by the approximations of torch's CPU kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import cephes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.polynomials import chebyshev, negate_where, polynomial, rational, times
from tpu_compile.lowering.registry import elementwise

aten = torch.ops.aten


def _select_at_most(x: Value, bound: float, inside: Value, outside: Value) -> Value:
    return hlo.select(hlo.compare(x, hlo.full_like(x, bound), "LE"), inside, outside)


def _reciprocal(x: Value, numerator: float) -> Value:
    return stablehlo.divide(hlo.full_like(x, numerator), x)


# ---- modified, first kind: Chebyshev series on [0, 8] and beyond


def _scaled_first_kind(x: Value, inner: Sequence[float], outer: Sequence[float]) -> Value:
    """I(|x|) / exp|x|, but for the factor |x| of order one."""
    size = stablehlo.abs(x)
    near = chebyshev(stablehlo.subtract(times(size, 0.5), hlo.full_like(x, 2)), inner)
    far = chebyshev(stablehlo.subtract(_reciprocal(size, 32), hlo.full_like(x, 2)), outer)
    return _select_at_most(size, 8, near, stablehlo.divide(far, stablehlo.sqrt(size)))


def scaled_i0(x: Value) -> Value:
    return _scaled_first_kind(x, cephes.I0_A, cephes.I0_B)


def scaled_i1(x: Value) -> Value:
    size = stablehlo.abs(x)
    series = _scaled_first_kind(x, cephes.I1_A, cephes.I1_B)
    value = _select_at_most(size, 8, stablehlo.multiply(series, size), series)
    return negate_where(hlo.compare(x, hlo.full_like(x, 0), "LT"), value)


def grown(x: Value, scaled: Value) -> Value:
    """``scaled * exp|x|``."""
    return stablehlo.multiply(scaled, stablehlo.exponential(stablehlo.abs(x)))


@elementwise(aten.special_i0e.default)
def i0e(ctx: LoweringContext, x: Value) -> Value:
    return scaled_i0(x)


@elementwise(aten.i0.default, aten.special_modified_bessel_i0.default)
def i0(ctx: LoweringContext, x: Value) -> Value:
    return grown(x, scaled_i0(x))


@elementwise(aten.special_i1e.default)
def i1e(ctx: LoweringContext, x: Value) -> Value:
    return scaled_i1(x)


@elementwise(aten.special_i1.default, aten.special_modified_bessel_i1.default)
def i1(ctx: LoweringContext, x: Value) -> Value:
    return grown(x, scaled_i1(x))


# ---- modified, second kind: inf at 0, NaN below


def _second_kind(x: Value, near: Value, outer: Sequence[float], scaled: bool) -> Value:
    """``near`` up to 2, a series in 8/x beyond; both times exp(x) if ``scaled``."""
    far = chebyshev(stablehlo.subtract(_reciprocal(x, 8), hlo.full_like(x, 2)), outer)
    far = stablehlo.divide(far, stablehlo.sqrt(x))
    if scaled:
        near = stablehlo.multiply(near, stablehlo.exponential(x))
    else:
        far = stablehlo.multiply(far, stablehlo.exponential(stablehlo.negate(x)))
    return _pole_at_zero(x, _select_at_most(x, 2, near, far), math.inf)


def _pole_at_zero(x: Value, value: Value, at_zero: float) -> Value:
    zero = hlo.full_like(x, 0)
    value = hlo.select(hlo.compare(x, zero, "LT"), hlo.full_like(x, math.nan), value)
    return hlo.select(hlo.compare(x, zero, "EQ"), hlo.full_like(x, at_zero), value)


def _second_kind_argument(x: Value) -> Value:
    return stablehlo.subtract(stablehlo.multiply(x, x), hlo.full_like(x, 2))


def _k0(x: Value, scaled: bool) -> Value:
    logarithm = stablehlo.subtract(stablehlo.log(x), hlo.full_like(x, math.log(2)))
    series = chebyshev(_second_kind_argument(x), cephes.K0_A)
    near = stablehlo.subtract(series, stablehlo.multiply(logarithm, grown(x, scaled_i0(x))))
    return _second_kind(x, near, cephes.K0_B, scaled)


def _k1(x: Value, scaled: bool) -> Value:
    logarithm = stablehlo.subtract(stablehlo.log(x), hlo.full_like(x, math.log(2)))
    series = stablehlo.divide(chebyshev(_second_kind_argument(x), cephes.K1_A), x)
    near = stablehlo.add(stablehlo.multiply(logarithm, grown(x, scaled_i1(x))), series)
    return _second_kind(x, near, cephes.K1_B, scaled)


@elementwise(aten.special_modified_bessel_k0.default)
def k0(ctx: LoweringContext, x: Value) -> Value:
    return _k0(x, False)


@elementwise(aten.special_scaled_modified_bessel_k0.default)
def scaled_k0(ctx: LoweringContext, x: Value) -> Value:
    return _k0(x, True)


@elementwise(aten.special_modified_bessel_k1.default)
def k1(ctx: LoweringContext, x: Value) -> Value:
    return _k1(x, False)


@elementwise(aten.special_scaled_modified_bessel_k1.default)
def scaled_k1(ctx: LoweringContext, x: Value) -> Value:
    return _k1(x, True)


# ---- first and second kind: rational up to 5, an amplitude and a phase beyond

_Pair = tuple[Sequence[float], Sequence[float]]
_ORDER_0: tuple[_Pair, _Pair] = ((cephes.J0_PP, cephes.J0_PQ), (cephes.J0_QP, cephes.J0_QQ))
_ORDER_1: tuple[_Pair, _Pair] = ((cephes.J1_PP, cephes.J1_PQ), (cephes.J1_QP, cephes.J1_QQ))
_J0_ROOTS = (5.78318596294678452118, 3.04712623436620863991e01)
_J1_ROOTS = (1.46819706421238932572e01, 4.92184563216946036703e01)


def _waves(x: Value, order: int) -> tuple[Value, Value]:
    """(J, Y) far from 0: √(2/πx) times a rotation by x - (order/2 + 1/4)π."""
    inverse = _reciprocal(x, 5)
    square = stablehlo.multiply(inverse, inverse)
    (pp, pq), (qp, qq) = _ORDER_1 if order else _ORDER_0
    p, q = rational(square, pp, pq), stablehlo.multiply(inverse, rational(square, qp, qq))
    phase = stablehlo.subtract(x, hlo.full_like(x, (0.5 * order + 0.25) * math.pi))
    cosine, sine = stablehlo.cosine(phase), stablehlo.sine(phase)
    amplitude = stablehlo.divide(hlo.full_like(x, math.sqrt(2 / math.pi)), stablehlo.sqrt(x))
    first = stablehlo.subtract(stablehlo.multiply(p, cosine), stablehlo.multiply(q, sine))
    second = stablehlo.add(stablehlo.multiply(p, sine), stablehlo.multiply(q, cosine))
    return stablehlo.multiply(first, amplitude), stablehlo.multiply(second, amplitude)


def _without_roots(square: Value, roots: Sequence[float]) -> Value:
    factors = [stablehlo.subtract(square, hlo.full_like(square, root)) for root in roots]
    return stablehlo.multiply(*factors)


def _near_j0(x: Value) -> Value:
    square = stablehlo.multiply(x, x)
    value = stablehlo.multiply(_without_roots(square, _J0_ROOTS), rational(square, cephes.J0_RP, cephes.J0_RQ))
    tiny = stablehlo.subtract(hlo.full_like(x, 1), times(square, 0.25))
    return _select_at_most(x, 1e-5, tiny, value)


def _near_j1(x: Value) -> Value:
    square = stablehlo.multiply(x, x)
    value = stablehlo.multiply(rational(square, cephes.J1_RP, cephes.J1_RQ), x)
    return stablehlo.multiply(value, _without_roots(square, _J1_ROOTS))


def _logarithmic(x: Value, first: Value) -> Value:
    return times(stablehlo.multiply(first, stablehlo.log(x)), 2 / math.pi)


@elementwise(aten.special_bessel_j0.default)
def j0(ctx: LoweringContext, x: Value) -> Value:
    x = stablehlo.abs(x)
    return _select_at_most(x, 5, _near_j0(x), _waves(x, 0)[0])


@elementwise(aten.special_bessel_j1.default)
def j1(ctx: LoweringContext, x: Value) -> Value:
    size = stablehlo.abs(x)
    value = _select_at_most(size, 5, _near_j1(size), _waves(size, 1)[0])
    return negate_where(hlo.compare(x, hlo.full_like(x, 0), "LT"), value)


@elementwise(aten.special_bessel_y0.default)
def y0(ctx: LoweringContext, x: Value) -> Value:
    square = stablehlo.multiply(x, x)
    near = stablehlo.add(rational(square, cephes.Y0_YP, cephes.Y0_YQ), _logarithmic(x, _near_j0(x)))
    return _pole_at_zero(x, _select_at_most(x, 5, near, _waves(x, 0)[1]), -math.inf)


@elementwise(aten.special_bessel_y1.default)
def y1(ctx: LoweringContext, x: Value) -> Value:
    series = stablehlo.multiply(x, rational(stablehlo.multiply(x, x), cephes.Y1_YP, cephes.Y1_YQ))
    singular = stablehlo.subtract(_logarithmic(x, _near_j1(x)), _reciprocal(x, 2 / math.pi))
    near = stablehlo.add(series, singular)
    return _pole_at_zero(x, _select_at_most(x, 5, near, _waves(x, 1)[1]), -math.inf)


@elementwise(aten.special_spherical_bessel_j0.default)
def spherical_j0(ctx: LoweringContext, x: Value) -> Value:
    """sin(x) / x; its Taylor series near 0."""
    series = polynomial(stablehlo.multiply(x, x), [(-1) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1)])
    size = stablehlo.abs(x)
    near = hlo.compare(size, hlo.full_like(x, 0.5), "LT")
    value = hlo.select(near, series, stablehlo.divide(stablehlo.sine(x), x))
    return hlo.select(hlo.compare(size, hlo.full_like(x, math.inf), "EQ"), hlo.full_like(x, 0), value)


# ---- Airy


def _series(leading: float, factor: Callable[[int], float], terms: int = 16) -> list[float]:
    """Coefficients of ``leading * Σ z^k / Π factor(i)``, highest first."""
    values = [leading]
    for k in range(1, terms):
        values.append(values[-1] / factor(k))
    return values[::-1]


_AI_AT_0, _AI_SLOPE = 0.355028053887817239260, -0.258819403792806798405
_AIRY_F = _series(_AI_AT_0, lambda k: (3 * k - 1) * 3 * k)
_AIRY_G = _series(_AI_SLOPE, lambda k: 3 * k * (3 * k + 1))
_AMPLITUDE = 1 / math.sqrt(math.pi)


def _airy_near(x: Value) -> Value:
    cube = stablehlo.multiply(stablehlo.multiply(x, x), x)
    return stablehlo.add(polynomial(cube, _AIRY_F), stablehlo.multiply(x, polynomial(cube, _AIRY_G)))


def _airy_falling(root: Value, zeta: Value) -> Value:
    """Right of 2.09; ``root`` is √x, ``zeta`` is 2/3 x^(3/2)."""
    ratio = times(rational(_reciprocal(zeta, 1), cephes.AIRY_AN, cephes.AIRY_AD), 0.5 * _AMPLITUDE)
    return stablehlo.divide(ratio, stablehlo.multiply(stablehlo.sqrt(root), stablehlo.exponential(zeta)))


def _airy_waves(root: Value, zeta: Value) -> Value:
    """Left of -2.09; ``root`` is √-x, ``zeta`` is 2/3 (-x)^(3/2)."""
    z = _reciprocal(zeta, 1)
    square = stablehlo.multiply(z, z)
    even = stablehlo.multiply(square, rational(square, cephes.AIRY_AFN, cephes.AIRY_AFD))
    odd = stablehlo.multiply(z, rational(square, cephes.AIRY_AGN, cephes.AIRY_AGD))
    phase = stablehlo.add(zeta, hlo.full_like(z, math.pi / 4))
    even = stablehlo.multiply(stablehlo.sine(phase), stablehlo.add(hlo.full_like(z, 1), even))
    wave = stablehlo.subtract(even, stablehlo.multiply(stablehlo.cosine(phase), odd))
    return stablehlo.divide(times(wave, _AMPLITUDE), stablehlo.sqrt(root))


@elementwise(aten.special_airy_ai.default)
def airy_ai(ctx: LoweringContext, x: Value) -> Value:
    size = stablehlo.abs(x)
    root = stablehlo.sqrt(size)
    zeta = times(stablehlo.multiply(size, root), 2 / 3)
    right = hlo.compare(x, hlo.full_like(x, 2.09), "GE")
    left = hlo.compare(x, hlo.full_like(x, -2.09), "LT")
    value = hlo.select(right, _airy_falling(root, zeta), _airy_near(x))
    value = hlo.select(hlo.compare(x, hlo.full_like(x, 103.892), "GT"), hlo.full_like(x, 0), value)
    value = hlo.select(left, _airy_waves(root, zeta), value)
    return hlo.select(hlo.compare(size, hlo.full_like(x, math.inf), "EQ"), hlo.full_like(x, math.nan), value)
