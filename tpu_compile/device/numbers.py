"""Python numbers of a call as inputs of its program: a learning rate that changes recompiles nothing.

The call is traced twice with different stand-ins for its numbers. Where the two graphs differ in exactly those, in
places where a rule takes a value too, an input takes their place. If they differ in anything else, the trace has
computed with a number, and it has to be a constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tpu_compile.device.schemas import LIFTED, base_name

aten = torch.ops.aten

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_DOUBLE = frozenset({torch.float64, torch.complex128, torch.int64})


@dataclass(frozen=True)
class Numbers:
    """An input made of a call's numbers: their places, as a vector, or 0-dim if there is one only."""

    places: tuple[int, ...]
    dtype: torch.dtype


def stand_ins(numbers: Sequence[float | int], version: int) -> list[float | int]:
    """Distinct numbers of the same types that no graph holds by chance; another ``version`` gives others."""
    chosen: list[float | int] = []
    for place, number in enumerate(numbers):
        if type(number) is int:
            chosen.append(71 + 2 * sum(type(n) is int for n in chosen) + version)
        else:
            chosen.append(0.25 + (2 * place + version + 0.5) / 2**20)
    return chosen


def lift(
    first: GraphModule, second: GraphModule, values: Sequence[float | int], others: Sequence[float | int]
) -> list[Numbers] | None:
    """Replace the stand-ins ``values`` in ``first`` by inputs; None, and ``first`` unchanged, if that is not possible.

    ``second`` is the trace made with ``others``. The inputs come after the graph's own, floats before integers.
    """
    found: list[tuple[Node, Any, int]] = []
    nodes = list(zip(first.graph.nodes, second.graph.nodes, strict=False))
    if len(first.graph.nodes) != len(second.graph.nodes):
        return None
    known = dict(nodes)
    for node, other in nodes:
        if node.op != other.op or node.target != other.target or len(node.args) != len(other.args):
            return None
        for where, a, b in _pairs(node, other):
            place = _stand_in(a, b, values, others)
            if place is not None and _takes_value(node, where):
                found.append((node, where, place))
            elif not _same(a, b, known):
                return None
    return _replace(first, found, values) if found else None


def _pairs(node: Node, other: Node) -> Iterator[tuple[Any, Any, Any]]:
    for i, (a, b) in enumerate(zip(node.args, other.args, strict=True)):
        yield i, a, b
    for name in {**node.kwargs, **other.kwargs}:
        yield name, node.kwargs.get(name), other.kwargs.get(name)


def _stand_in(a: Any, b: Any, values: Sequence[float | int], others: Sequence[float | int]) -> int | None:
    if type(a) not in (int, float) or a == b:
        return None
    return next((i for i, (v, o) in enumerate(zip(values, others, strict=True)) if v == a and o == b), None)


def _same(a: Any, b: Any, known: dict[Node, Node]) -> bool:
    if isinstance(a, Node):
        return known.get(a) is b
    if isinstance(a, (list, tuple)):
        return (
            isinstance(b, (list, tuple))
            and len(a) == len(b)
            and all(_same(x, y, known) for x, y in zip(a, b, strict=True))
        )
    return type(a) is type(b) and bool(a == b)


def _takes_value(node: Node, where: Any) -> bool:
    """Whether the rule of a node takes a value in place of this number."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    base = base_name(node.target)
    name = node.target._schema.arguments[where].name if isinstance(where, int) else where
    if name not in LIFTED.get(base, ()):
        return False
    # Among 0-dim operands a value counts in the promotion as a number would not.
    return base not in _COMPARISONS or all(n.meta["val"].dim() for n in node.all_input_nodes)


def _replace(module: GraphModule, found: list[tuple[Node, Any, int]], values: Sequence[float | int]) -> list[Numbers]:
    graph = module.graph
    double = any(_dtype(n) in (torch.float64, torch.complex128) for n in graph.nodes)
    inputs: list[Numbers] = []
    made: dict[int, Node] = {}
    for kind, dtype in ((float, torch.float64 if double else torch.float32), (int, torch.int64)):
        places = tuple(sorted({place for _, _, place in found if type(values[place]) is kind}))
        if places:
            inputs.append(Numbers(places, dtype))
            made.update(_input(graph, inputs[-1], _fake_like(graph)))
    for node, where, place in found:
        if isinstance(where, int):
            node.update_arg(where, made[place])
        else:
            node.update_kwarg(where, made[place])
    module.recompile()
    return inputs


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _fake_like(graph: torch.fx.Graph) -> Any:
    """The FakeTensorMode of a graph's tensors."""
    return next(n.meta["val"].fake_mode for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))


def _input(graph: torch.fx.Graph, numbers: Numbers, mode: Any) -> dict[int, Node]:
    """Add the placeholder for ``numbers``, and a 0-dim value for each of them."""
    last = [n for n in graph.nodes if n.op == "placeholder"]
    count = len(numbers.places)
    after = graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes)))
    with after, mode:
        node = graph.placeholder(f"numbers_{numbers.dtype}".replace(".", "_"))
        node.meta["val"] = torch.empty(() if count == 1 else (count,), dtype=numbers.dtype, device="cpu")
    if count == 1:
        return {numbers.places[0]: node}
    made = {}
    at = node
    for i, place in enumerate(numbers.places):
        with graph.inserting_after(at), mode:
            at = made[place] = graph.call_function(aten.select.int, (node, 0, i))
            at.meta["val"] = torch.empty((), dtype=numbers.dtype, device="cpu")
    return made
