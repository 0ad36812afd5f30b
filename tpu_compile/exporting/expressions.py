"""Sizes that depend on the call, as JSON: a number, a symbol's name, or ``[operator, operand, ...]``."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import sympy
import torch

from tpu_compile.errors import ExportError

Expression = Any
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _exact(value: Fraction) -> int | Fraction:
    return int(value) if value.denominator == 1 else value


def _power(base: Any, exponent: Any) -> Any:
    if not 0 <= exponent <= 64:
        return _exact(Fraction(base) ** int(exponent)) if -64 <= exponent < 0 else float(base) ** float(exponent)
    return base**exponent


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda *xs: _exact(Fraction(sum(map(Fraction, xs)))),
    "Mul": lambda *xs: _exact(math.prod(map(Fraction, xs), start=Fraction(1))),
    "Pow": _power,
    "PowByNatural": _power,
    "Rational": lambda p, q: _exact(Fraction(p, q)),
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda base, divisor, modulus: base // divisor % modulus,
    "Min": min,
    "Max": max,
    "Abs": abs,
    "floor": math.floor,
    "FloorToInt": math.floor,
    "ceiling": math.ceil,
    "CeilToInt": math.ceil,
    "TruncToInt": math.trunc,
    "RoundToInt": round,
    "ToFloat": float,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "OpaqueUnaryFn_sqrt": math.sqrt,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": lambda *xs: all(xs),
    "Or": lambda *xs: any(xs),
    "Not": operator.not_,
}
"""sympy's and torch's functions by class name. Numbers stay exact until a function makes a float of them."""


def dump(value: Any, names: Mapping[str, str]) -> Expression:
    """A Python number, a symbolic one or a sympy expression. ``names``: what to call symbols, where not as torch does.

    Raises:
        ExportError: a function that has no entry above, or a number that only the running program knows.
    """
    expression = value.node.expr if isinstance(value, _SYMBOLIC) else value
    if isinstance(expression, (bool, int)):
        return expression
    if isinstance(expression, float):
        return ["float", expression.hex()]
    return _dump(expression, names)


def _dump(e: Any, names: Mapping[str, str]) -> Expression:
    if isinstance(e, sympy.Symbol):
        if e.name.startswith(("u", "zuf")):
            raise ExportError(
                f"the size {e.name} depends on data. A file with dynamic sizes takes them from its arguments' shapes: "
                "export without dynamic_shapes, or use torch.where or masks of a fixed shape."
            )
        return names.get(e.name, e.name)
    if isinstance(e, sympy.Integer):
        return int(e)
    if isinstance(e, sympy.Rational):
        return ["Rational", int(e.p), int(e.q)]
    if isinstance(e, sympy.Float):
        return ["float", float(e).hex()]
    if isinstance(e, (sympy.logic.boolalg.BooleanTrue, sympy.logic.boolalg.BooleanFalse)):
        return bool(e)
    if type(e).__name__ not in _OPERATORS:
        raise ExportError(f"a size is {e}, and {type(e).__name__} cannot be written to a file")
    return [type(e).__name__, *(_dump(a, names) for a in e.args)]


def value(expression: Expression, bindings: Mapping[str, int]) -> Any:
    """The number, with the symbols' values put in.

    Raises:
        ValueError, KeyError, TypeError: it is no expression, or not one of these symbols.
    """
    if isinstance(expression, (bool, int)):
        return expression
    if isinstance(expression, str):
        return bindings[expression]
    name, *operands = expression
    if name == "float":
        return float.fromhex(operands[0])
    return _OPERATORS[name](*(value(operand, bindings) for operand in operands))


def size(expression: Expression, bindings: Mapping[str, int]) -> int:
    """``value``, which must be an integer."""
    found = value(expression, bindings)
    if isinstance(found, Fraction) or int(found) != found:
        raise ValueError(f"the size {text(expression)} is {found}")
    return int(found)


def text(expression: Expression) -> str:
    """For people."""
    if not isinstance(expression, list):
        return str(expression)
    name, *operands = expression
    if name == "float":
        return str(float.fromhex(operands[0]))
    infix = {"Add": " + ", "Mul": "*", "FloorDiv": "//", "Mod": " % "}.get(name)
    shown = [f"({text(o)})" if infix and isinstance(o, list) else text(o) for o in operands]
    return infix.join(shown) if infix else f"{name}({', '.join(shown)})"
