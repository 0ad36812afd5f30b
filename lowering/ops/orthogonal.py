"""Orthogonal polynomials whose degree is data: a recurrence for all elements, or a closed form where torch has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.polynomials import times
from tpu_compile.lowering.registry import elementwise

aten = torch.ops.aten

Step = Callable[[Value, Value, Value, Value], Value]
"""(x, k, p_k, p_(k-1)) -> p_(k+1); ``k`` is a 0-dim value of ``x``'s dtype."""


def recurrence(x: Value, degree: Value, first: Value, step: Step) -> Value:
    """Run ``step`` from p_0 = 1 and p_1 = ``first`` up to the largest degree; each element stops at its own."""
    one, kind = hlo.full_like(x, 1), hlo.dtype(x)
    last = hlo.reduce(degree, range(hlo.rank(degree)), "maximum")

    def unfinished(k: Value, p: Value, older: Value) -> Value:
        return hlo.compare(k, last, "LT")

    def advance(k: Value, p: Value, older: Value) -> list[Value]:
        count = hlo.convert(k, kind)
        active = hlo.compare(hlo.broadcast(k, hlo.shape(x)), degree, "LT")
        following = hlo.select(active, step(x, count, p, older), p)
        return [stablehlo.add(k, hlo.scalar(1, torch.int64)), following, hlo.select(active, p, older)]

    constant = hlo.compare(degree, hlo.full_like(degree, 0), "LE")
    start = [hlo.scalar(1, torch.int64), first, one]
    value = hlo.while_(start, unfinished, advance)[1]
    value = hlo.select(constant, one, value)
    return hlo.select(hlo.compare(degree, hlo.full_like(degree, 0), "LT"), hlo.full_like(x, 0), value)


def degrees(n: Value) -> Value:
    """``n`` as whole numbers; infinite and NaN degrees count as negative."""
    finite = stablehlo.is_finite(n)
    return hlo.convert(hlo.select(finite, n, hlo.full_like(n, -1)), torch.int64)


def _spread(k: Value, x: Value) -> Value:
    return hlo.broadcast(k, hlo.shape(x))


# ---- the four Chebyshev kinds, plain and shifted


@dataclass(frozen=True)
class Kind:
    """p_1 is ``slope`` · x + ``offset``; ``angle(t, n)`` the closed form at x = cos t, used beyond degree ``small``."""

    slope: int
    offset: int
    angle: Callable[[Value, Value], Value]
    at_one: Callable[[Value], Value]
    at_minus_one: Callable[[Value], Value]
    small: int


def _plus(x: Value, number: float) -> Value:
    return stablehlo.add(x, hlo.full_like(x, number))


def _ratio(numerator: Any, denominator: Any, shift: float, part: float) -> Callable[[Value, Value], Value]:
    def closed(t: Value, n: Value) -> Value:
        above = numerator(stablehlo.multiply(_plus(n, shift), t))
        return stablehlo.divide(above, denominator(times(t, part)))

    return closed


def _one(n: Value) -> Value:
    return hlo.full_like(n, 1)


def _next(n: Value) -> Value:
    return _plus(n, 1)


def _odd_number(n: Value) -> Value:
    return _plus(stablehlo.add(n, n), 1)


KINDS = {
    "t": Kind(1, 0, lambda t, n: stablehlo.cosine(stablehlo.multiply(n, t)), _one, _one, 6),
    "u": Kind(2, 0, _ratio(stablehlo.sine, stablehlo.sine, 1, 1), _next, _next, 8),
    "v": Kind(2, -1, _ratio(stablehlo.cosine, stablehlo.cosine, 0.5, 0.5), _one, _odd_number, 8),
    "w": Kind(2, 1, _ratio(stablehlo.sine, stablehlo.sine, 0.5, 0.5), _odd_number, _one, 8),
}
SHIFTED_SMALL = {"t": 6, "u": 6, "v": 6, "w": 4}


def _chebyshev(x: Value, n: Value, kind: Kind, small: int) -> Value:
    degree = degrees(n)
    twice = stablehlo.add(x, x)
    first = _plus(x if kind.slope == 1 else twice, kind.offset)
    inside = hlo.compare(stablehlo.abs(x), hlo.full_like(x, 1), "LT")
    closed = stablehlo.and_(inside, hlo.compare(degree, hlo.full_like(degree, small), "GT"))
    looped = hlo.select(closed, hlo.full_like(degree, 0), degree)
    value = recurrence(x, looped, first, lambda x, k, p, q: stablehlo.subtract(stablehlo.multiply(twice, p), q))
    order = hlo.convert(degree, hlo.dtype(x))
    value = hlo.select(closed, kind.angle(chlo.acos(hlo.select(inside, x, hlo.full_like(x, 0))), order), value)
    return _at_ends(x, degree, value, kind.at_one(order), kind.at_minus_one(order))


def _at_ends(x: Value, degree: Value, value: Value, at_one: Value, at_minus_one: Value) -> Value:
    """Exact values at ±1; the sign at -1 alternates with the degree."""
    odd = hlo.compare(stablehlo.and_(degree, hlo.full_like(degree, 1)), hlo.full_like(degree, 1), "EQ")
    signed = hlo.select(odd, stablehlo.negate(at_minus_one), at_minus_one)
    natural = hlo.compare(degree, hlo.full_like(degree, 0), "GE")
    for end, known in ((1, at_one), (-1, signed)):
        there = stablehlo.and_(natural, hlo.compare(x, hlo.full_like(x, end), "EQ"))
        value = hlo.select(there, known, value)
    return value


def _chebyshev_rule(name: str, shifted: bool) -> Any:
    kind = KINDS[name]

    def rule(ctx: LoweringContext, x: Value, n: Value) -> Value:
        if not shifted:
            return _chebyshev(x, n, kind, kind.small)
        return _chebyshev(_plus(stablehlo.add(x, x), -1), n, kind, SHIFTED_SMALL[name])

    return rule


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, f"special_{name}")
    return [packet.default, packet.x_scalar, packet.n_scalar]


for _name in KINDS:
    elementwise(*_overloads(f"chebyshev_polynomial_{_name}"))(_chebyshev_rule(_name, False))
    elementwise(*_overloads(f"shifted_chebyshev_polynomial_{_name}"))(_chebyshev_rule(_name, True))


# ---- Hermite, Laguerre, Legendre

_HERMITE_LIMIT = {torch.float32: 128, torch.float64: 512}
"""torch's largest degrees; beyond them the result is NaN."""


def _limited(x: Value, degree: Value, value: Value) -> Value:
    beyond = hlo.compare(degree, hlo.full_like(degree, _HERMITE_LIMIT[hlo.dtype(x)]), "GT")
    return hlo.select(beyond, hlo.full_like(x, math.nan), value)


def _hermite(x: Value, n: Value, factor: int) -> Value:
    """p_(k+1) = factor · (x p_k - k p_(k-1))."""
    degree = degrees(n)
    scaled = times(x, factor)

    def step(x: Value, k: Value, p: Value, older: Value) -> Value:
        weight = _spread(times(k, factor), x)
        return stablehlo.subtract(stablehlo.multiply(scaled, p), stablehlo.multiply(weight, older))

    looped = stablehlo.minimum(degree, hlo.full_like(degree, _HERMITE_LIMIT[hlo.dtype(x)]))
    return _limited(x, degree, recurrence(x, looped, scaled, step))


@elementwise(*_overloads("hermite_polynomial_h"))
def hermite_h(ctx: LoweringContext, x: Value, n: Value) -> Value:
    return _hermite(x, n, 2)


@elementwise(*_overloads("hermite_polynomial_he"))
def hermite_he(ctx: LoweringContext, x: Value, n: Value) -> Value:
    return _hermite(x, n, 1)


@elementwise(*_overloads("laguerre_polynomial_l"))
def laguerre(ctx: LoweringContext, x: Value, n: Value) -> Value:
    """(k + 1) p_(k+1) = (2k + 1 - x) p_k - k p_(k-1)."""
    first = stablehlo.subtract(hlo.full_like(x, 1), x)

    def step(x: Value, k: Value, p: Value, older: Value) -> Value:
        slope = stablehlo.add(_spread(stablehlo.add(k, k), x), first)
        above = stablehlo.subtract(stablehlo.multiply(slope, p), stablehlo.multiply(_spread(k, x), older))
        return stablehlo.divide(above, _spread(_plus(k, 1), x))

    return recurrence(x, degrees(n), first, step)


@elementwise(*_overloads("legendre_polynomial_p"))
def legendre(ctx: LoweringContext, x: Value, n: Value) -> Value:
    """(k + 1) p_(k+1) = (2k + 1) x p_k - k p_(k-1)."""
    degree = degrees(n)

    def step(x: Value, k: Value, p: Value, older: Value) -> Value:
        slope = stablehlo.multiply(_spread(_odd_number(k), x), x)
        above = stablehlo.subtract(stablehlo.multiply(slope, p), stablehlo.multiply(_spread(k, x), older))
        return stablehlo.divide(above, _spread(_plus(k, 1), x))

    one = hlo.full_like(x, 1)
    return _at_ends(x, degree, recurrence(x, degree, x, step), one, one)
