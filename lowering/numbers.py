"""Numbers that a program learns only while it runs: ``item()`` of a tensor stays a 0-dim value inside the program.

That holds as long as the number's uses stay inside: arithmetic on it, and ops whose rules take a value where their
schema has a number. The caller gets it as a Python number. A number that decides a shape is a gap.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo
from torch.fx import Node

from tpu_compile.lowering import hlo
from tpu_compile.lowering.hlo import Value

aten = torch.ops.aten

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
KINDS = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}

_COMPARISONS = {
    operator.lt: "LT",
    operator.le: "LE",
    operator.gt: "GT",
    operator.ge: "GE",
    operator.eq: "EQ",
    operator.ne: "NE",
}
_ARITHMETIC: dict[Any, Callable[..., Value]] = {
    operator.add: stablehlo.add,
    operator.sub: stablehlo.subtract,
    operator.mul: stablehlo.multiply,
    operator.neg: stablehlo.negate,
    operator.and_: stablehlo.and_,
    operator.or_: stablehlo.or_,
    torch.sym_max: stablehlo.maximum,
    torch.sym_min: stablehlo.minimum,
    torch.sym_not: stablehlo.not_,
    torch.sym_float: lambda x: hlo.convert(x, torch.float64),
    **{op: (lambda a, b, _d=direction: hlo.compare(a, b, _d)) for op, direction in _COMPARISONS.items()},
}
_TAKERS: dict[Any, tuple[int, ...]] = {
    aten.slice.Tensor: (2, 3),
    aten.select.int: (2,),
    aten.full.default: (1,),
    aten.full_like.default: (1,),
    aten.fill.Scalar: (1,),
    aten.scalar_tensor.default: (0,),
    **{
        getattr(packet, name): (1,)
        for packet in (aten.add, aten.sub, aten.mul, aten.div)
        for name in ("Tensor", "Scalar")
    },
}
"""Ops whose rules take a value at these argument positions."""


def stays_inside(node: Node) -> bool:
    """Whether a program can make what depends on a learned number: ``item()`` whose every use takes a value, or a piece
    of known size from places that only the running program knows."""
    if node.target in (aten.slice.Tensor, aten.select.int, aten.index.Tensor):
        return not any(_is_learned(size) for size in node.meta["val"].shape)
    if node.target is torch.ops.higher_order.while_loop:
        return not any(map(_is_learned, _sizes(node.meta["val"]))) and all(
            _used_inside(item) for item in node.users if isinstance(item.meta["val"], SYMBOLIC)
        )
    return node.target is aten._local_scalar_dense.default and _used_inside(node)


def _sizes(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield from value.shape


def _is_learned(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and any(str(s).startswith("u") for s in size.node.expr.free_symbols)


def _used_inside(node: Node) -> bool:
    return all(_may_use(user, node) for user in node.users)


def _may_use(user: Node, number: Node) -> bool:
    if user.op != "call_function":
        return user.op == "output"  # handed to the caller as a Python number
    if isinstance(user.meta.get("val"), SYMBOLIC):
        return (user.target in _ARITHMETIC or user.target is torch.sym_ite) and _used_inside(user)
    if isinstance(user.meta.get("val"), torch.Tensor):
        places = _TAKERS.get(user.target, ())
        return [i for i, a in enumerate(user.args) if number in _nodes(a)] == [
            i for i in places if i < len(user.args) and user.args[i] is number
        ]
    return user.meta.get("val") is None  # an assertion


def _nodes(argument: Any) -> list[Node]:
    if isinstance(argument, Node):
        return [argument]
    return [n for a in argument for n in _nodes(a)] if isinstance(argument, (list, tuple)) else []


def compute(target: Any, arguments: Sequence[Any]) -> Value:
    """Python's arithmetic on numbers of which at least one is a value: in int64, or float64 if one is a float."""
    if target is torch.sym_ite:
        predicate, a, b = arguments
        return hlo.select(_value(predicate, torch.bool), *_alike([a, b]))
    return _ARITHMETIC[target](*_alike(arguments))


def _alike(arguments: Sequence[Any]) -> list[Value]:
    kinds = [hlo.dtype(a) if hlo.is_value(a) else _KIND_OF[type(a)] for a in arguments]
    kind = max(kinds, key=[torch.bool, torch.int64, torch.float64].index)
    return [_value(a, kind) for a in arguments]


_KIND_OF = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _value(number: Any, kind: torch.dtype) -> Value:
    return hlo.convert(number, kind) if hlo.is_value(number) else hlo.scalar(number, kind)
