"""The regularized incomplete gamma functions: a series, a continued fraction, and an expansion for large parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.polynomials import polynomial, times
from tpu_compile.lowering.registry import elementwise

aten = torch.ops.aten

_LARGE = {torch.float32: 500.0, torch.float64: 1e4}
"""From this parameter on, three of Temme's terms are exact, while series and fractions want ever more steps."""

_STEPS = 2000
"""torch's own bound; below ``_LARGE`` everything has converged by then."""

# fmt: off
_TEMME = (
    (-3.3333333333333333e-1, 8.3333333333333333e-2, -1.4814814814814815e-2, 1.1574074074074074e-3, 3.527336860670194e-4,
     -1.7875514403292181e-4, 3.9192631785224378e-5, -2.1854485106799922e-6, -1.85406221071516e-6, 8.296711340953086e-7,
     -1.7665952736826079e-7, 6.7078535434014986e-9),
    (-1.8518518518518519e-3, -3.4722222222222222e-3, 2.6455026455026455e-3, -9.9022633744855967e-4,
     2.0576131687242798e-4, -4.0187757201646091e-7, -1.8098550334489978e-5, 7.6491609160811101e-6),
    (4.1335978835978836e-3, -2.6813271604938272e-3, 7.7160493827160494e-4, 2.0093878600823045e-6),
)
# fmt: on
"""Coefficients of powers of eta, lowest first, for each power of 1/a (DLMF 8.12.3; from SciPy, as in torch)."""

_STIRLING = tuple(
    bernoulli / (2 * k * (2 * k - 1))
    for k, bernoulli in enumerate((1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510), 1)
)


@elementwise(aten.igamma.default)
def igamma(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return _incomplete(x, other, lower=True)


@elementwise(aten.igammac.default)
def igammac(ctx: LoweringContext, x: Value, other: Value) -> Value:
    return _incomplete(x, other, lower=False)


def _incomplete(a: Value, x: Value, lower: bool) -> Value:
    """P(a, x) if ``lower``, else Q(a, x) = 1 - P."""
    one, zero = hlo.full_like(x, 1), hlo.full_like(x, 0)
    large = hlo.compare(a, hlo.full_like(a, _LARGE[hlo.dtype(a)]), "GT")
    right = stablehlo.and_(hlo.compare(x, one, "GT"), hlo.compare(x, a, "GT"))
    moderate = stablehlo.and_(hlo.compare(a, zero, "GT"), stablehlo.not_(large))
    phi = _phi(stablehlo.divide(stablehlo.subtract(x, a), a))
    factor = _factor(a, x, phi)
    p = stablehlo.multiply(factor, _series(a, x, stablehlo.and_(moderate, stablehlo.not_(right))))
    q = stablehlo.multiply(factor, _fraction(a, x, stablehlo.and_(moderate, right)))
    if lower:
        value = hlo.select(right, stablehlo.subtract(one, q), p)
    else:
        value = hlo.select(right, q, hlo.select(_small(a, x), _small_complement(a, x), stablehlo.subtract(one, p)))
    value = hlo.select(large, _temme(a, x, phi, lower), value)
    return _at_the_ends(a, x, value, lower)


def _at_the_ends(a: Value, x: Value, value: Value, lower: bool) -> Value:
    """Arguments of 0 and infinity, and NaN below 0."""
    zero, inf, nan = (hlo.full_like(x, v) for v in (0, math.inf, math.nan))
    below, above = (hlo.full_like(x, v) for v in ((0, 1) if lower else (1, 0)))

    def where(argument: Value, bound: Value, known: Value, otherwise: Value, direction: str = "EQ") -> Value:
        return hlo.select(hlo.compare(argument, bound, direction), known, otherwise)

    value = where(x, inf, above, value)
    value = where(a, inf, where(x, inf, nan, below), value)
    value = where(x, zero, below, value)
    value = where(a, zero, where(x, zero, above, nan, "GT"), value)
    return where(a, zero, nan, where(x, zero, nan, value, "LT"), "LT")


# ---- the common factor: x^a e^-x / gamma(a)


def _phi(mu: Value) -> Value:
    """``mu - log(1 + mu)``, by the series of the hyperbolic arc tangent where the difference would cancel."""
    r = stablehlo.divide(mu, stablehlo.add(mu, hlo.full_like(mu, 2)))
    y = stablehlo.multiply(r, r)
    terms = 16 if hlo.dtype(mu) == torch.float64 else 8
    series = stablehlo.multiply(y, polynomial(y, [1 / (2 * k + 1) for k in range(terms, 0, -1)]))
    near = stablehlo.multiply(r, stablehlo.subtract(mu, times(series, 2)))
    small = hlo.compare(stablehlo.abs(mu), hlo.full_like(mu, 0.5), "LT")
    return hlo.select(small, near, stablehlo.subtract(mu, stablehlo.log_plus_one(mu)))


def _factor(a: Value, x: Value, phi: Value) -> Value:
    """By Stirling's formula from 10 on, where the parts of the plain one are large and cancel."""
    inverse = stablehlo.divide(hlo.full_like(a, 1), a)
    correction = stablehlo.multiply(inverse, polynomial(stablehlo.multiply(inverse, inverse), _STIRLING[::-1]))
    exponent = stablehlo.negate(stablehlo.add(stablehlo.multiply(a, phi), correction))
    scale = stablehlo.sqrt(times(a, 1 / (2 * math.pi)))
    stirling = stablehlo.multiply(scale, stablehlo.exponential(exponent))
    exponent = stablehlo.subtract(stablehlo.multiply(a, stablehlo.log(x)), stablehlo.add(x, chlo.lgamma(a)))
    small = hlo.compare(a, hlo.full_like(a, 10), "LT")
    return hlo.select(small, stablehlo.exponential(exponent), stirling)


# ---- small and middling parameters


def _iterate(
    active: Value, start: list[Value], step: Callable[[Value, list[Value]], tuple[list[Value], Value]]
) -> list[Value]:
    """Run ``step(k, state) -> (state, finished)`` on each active element until it has finished."""

    def unfinished(k: Value, left: Value, *state: Value) -> Value:
        any_left = hlo.reduce(left, range(hlo.rank(left)), "or")
        return stablehlo.and_(any_left, hlo.compare(k, hlo.scalar(_STEPS, torch.int32), "LT"))

    def advance(k: Value, left: Value, *state: Value) -> list[Value]:
        count = hlo.broadcast(hlo.convert(k, hlo.dtype(state[0])), hlo.shape(left))
        following, finished = step(count, list(state))
        kept = [hlo.select(left, new, old) for new, old in zip(following, state, strict=True)]
        return [
            stablehlo.add(k, hlo.scalar(1, torch.int32)),
            stablehlo.and_(left, stablehlo.not_(finished)),
            *kept,
        ]

    return hlo.while_([hlo.scalar(1, torch.int32), active, *start], unfinished, advance)[2:]


def _negligible(change: Value, whole: Value) -> Value:
    eps = float(torch.finfo(hlo.dtype(whole)).eps)
    return hlo.compare(stablehlo.abs(change), times(stablehlo.abs(whole), eps), "LE")


def _series(a: Value, x: Value, active: Value) -> Value:
    """``1/a · (1 + x/(a+1) + x²/((a+1)(a+2)) + …)``."""

    def step(k: Value, state: list[Value]) -> tuple[list[Value], Value]:
        term, total = state
        term = stablehlo.multiply(term, stablehlo.divide(x, stablehlo.add(a, k)))
        total = stablehlo.add(total, term)
        return [term, total], _negligible(term, total)

    one = hlo.full_like(x, 1)
    return stablehlo.divide(_iterate(active, [one, one], step)[1], a)


def _fraction(a: Value, x: Value, active: Value) -> Value:
    """``1/(x+1-a - 1(1-a)/(x+3-a - 2(2-a)/(x+5-a - …)))``, by Lentz's rule."""
    one = hlo.full_like(x, 1)
    first = stablehlo.subtract(stablehlo.add(x, one), a)
    tiny = hlo.full_like(x, float(torch.finfo(hlo.dtype(x)).tiny) * 16)
    inverse = stablehlo.divide(one, first)

    def away_from_zero(v: Value) -> Value:
        return hlo.select(hlo.compare(stablehlo.abs(v), tiny, "LT"), tiny, v)

    def step(k: Value, state: list[Value]) -> tuple[list[Value], Value]:
        c, d, value = state
        numerator = stablehlo.multiply(k, stablehlo.subtract(a, k))
        denominator = stablehlo.add(first, stablehlo.add(k, k))
        d = stablehlo.divide(one, away_from_zero(stablehlo.add(stablehlo.multiply(numerator, d), denominator)))
        c = away_from_zero(stablehlo.add(denominator, stablehlo.divide(numerator, c)))
        change = stablehlo.multiply(c, d)
        return [c, d, stablehlo.multiply(value, change)], _negligible(stablehlo.subtract(change, one), one)

    start = stablehlo.divide(one, tiny)
    return _iterate(active, [start, inverse, inverse], step)[2]


def _small(a: Value, x: Value) -> Value:
    """Where Q is better summed by itself than as 1 - P: torch's own bounds."""
    half, one = hlo.full_like(x, 0.5), hlo.full_like(x, 1.1)
    logarithmic = stablehlo.divide(hlo.full_like(x, -0.4), stablehlo.log(x))
    low = stablehlo.and_(hlo.compare(x, half, "LE"), hlo.compare(logarithmic, a, "GE"))
    middle = stablehlo.and_(hlo.compare(x, half, "GT"), hlo.compare(times(x, 1.1), a, "GE"))
    return stablehlo.and_(hlo.compare(x, one, "LE"), stablehlo.or_(low, middle))


def _small_complement(a: Value, x: Value) -> Value:
    """Q of small arguments: ``-expm1(a log x - lgamma(1+a)) - x^a/gamma(a) · Σ (-x)^n / (n! (a+n))``."""
    total, terms = None, 24 if hlo.dtype(x) == torch.float64 else 12
    power = hlo.full_like(x, 1)
    for n in range(1, terms):
        power = stablehlo.multiply(power, times(x, -1 / n))
        term = stablehlo.divide(power, stablehlo.add(a, hlo.full_like(a, n)))
        total = term if total is None else stablehlo.add(total, term)
    exponent = stablehlo.multiply(a, stablehlo.log(x))
    one = hlo.full_like(x, 1)
    whole = stablehlo.exponential_minus_one(stablehlo.subtract(exponent, chlo.lgamma(stablehlo.add(a, one))))
    scale = stablehlo.exponential(stablehlo.subtract(exponent, chlo.lgamma(a)))
    return stablehlo.negate(stablehlo.add(whole, stablehlo.multiply(scale, total)))


# ---- large parameters


def _temme(a: Value, x: Value, phi: Value, lower: bool) -> Value:
    """Half an error function of the distance from the mean, and a correction that decays with the same Gaussian."""
    eta = stablehlo.sqrt(stablehlo.add(phi, phi))
    eta = hlo.select(hlo.compare(x, a, "LT"), stablehlo.negate(eta), eta)
    one = hlo.full_like(eta, 1)
    bounded = stablehlo.minimum(stablehlo.maximum(eta, stablehlo.negate(one)), one)
    inverse = stablehlo.divide(one, a)
    correction = hlo.full_like(a, 0)
    for row in reversed(_TEMME):
        correction = stablehlo.add(stablehlo.multiply(correction, inverse), polynomial(bounded, row[::-1]))
    gaussian = stablehlo.exponential(stablehlo.negate(stablehlo.multiply(a, phi)))
    correction = stablehlo.multiply(correction, stablehlo.divide(gaussian, stablehlo.sqrt(times(a, 2 * math.pi))))
    distance = stablehlo.multiply(eta, stablehlo.sqrt(times(a, 0.5)))
    if lower:
        return stablehlo.subtract(times(chlo.erfc(stablehlo.negate(distance)), 0.5), correction)
    return stablehlo.add(times(chlo.erfc(distance), 0.5), correction)
