"""Polynomials, rational functions and Chebyshev series of a value, evaluated in its own dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import hlo
from tpu_compile.lowering.hlo import Value


def times(x: Value, factor: float) -> Value:
    """``factor * x``."""
    return stablehlo.multiply(x, hlo.full_like(x, factor))


def negate_where(predicate: Value, x: Value) -> Value:
    """``-x`` where the predicate holds, else ``x``."""
    return hlo.select(predicate, stablehlo.negate(x), x)


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """Horner's rule; the highest order comes first."""
    result = hlo.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        result = stablehlo.add(stablehlo.multiply(result, x), hlo.full_like(x, c))
    return result


def rational(x: Value, numerator: Sequence[float], denominator: Sequence[float]) -> Value:
    """The quotient of two polynomials."""
    return stablehlo.divide(polynomial(x, numerator), polynomial(x, denominator))


def chebyshev(x: Value, coefficients: Sequence[float]) -> Value:
    """Clenshaw's rule for Σ' c_n T_n(x/2), highest order first; orders below ``x``'s precision are left out."""
    least = torch.finfo(hlo.dtype(x)).eps / 16 * max(map(abs, coefficients))
    kept = next(i for i, c in enumerate(coefficients) if abs(c) >= least)
    older = previous = hlo.full_like(x, 0)
    result = hlo.full_like(x, coefficients[kept])
    for c in coefficients[kept + 1 :]:
        older, previous = previous, result
        result = stablehlo.subtract(stablehlo.multiply(x, previous), older)
        result = stablehlo.add(result, hlo.full_like(x, c))
    return times(stablehlo.subtract(result, older), 0.5)
