"""Several traced calls as one graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from tpu_compile.device.programs import Plan
from tpu_compile.lowering.program import dense_order
from tpu_compile.lowering.random import rng_key

aten = torch.ops.aten


Wire = int
"""Where an input comes from: ``n`` is buffer n from outside, ``~n`` is output n, numbered from plan to plan."""


@dataclass(frozen=True)
class Fused:
    """A graph over ``externals``: its inputs, as places among the buffers from outside."""

    graph: GraphModule
    name: str
    externals: tuple[int, ...]


def fuse(
    plans: Sequence[Plan],
    wires: Sequence[Wire],
    live: Sequence[int],
    replaced: Sequence[tuple[int, int]],
) -> Fused:
    """One graph of several plans.

    Args:
        wires: where the inputs of the plans' programs come from, one plan after another.
        live: the outputs that somebody needs: the graph's results, in this order.
        replaced: (external, result) where a result takes an external's place, and may take its memory.
    """
    graph = Graph()
    attributes: dict[str, Any] = {}
    by_plan = list(_by_plan(plans, wires))
    externals: dict[int, Node] = _placeholders(graph, by_plan)
    made: list[Node] = []
    stored: dict[int, Node] = {}
    used = {~wire for wire in wires if wire < 0}
    drawn = 0
    for plan, inputs in by_plan:
        given = [externals[w] if w >= 0 else stored[~w] for w in inputs]
        outputs = _inline(graph, attributes, plan, dict(zip(plan.program.arguments, given, strict=True)), drawn)
        for place, node in enumerate(outputs):
            if len(made) in used:
                stored[len(made)] = _stored(graph, node) if place < plan.traced.new else node
            made.append(node)
        drawn += plan.traced.draws
    results = [made[number] for number in live]
    for external, place in replaced:
        if external in externals and results[place] is not externals[external]:
            results[place] = _copied(graph, externals[external], results[place])
    graph.output(_distinct(graph, results))
    module = GraphModule(attributes, graph)
    names = dict.fromkeys(plan.name for plan in plans)
    return Fused(module, f"fused_{len(plans)}_{next(iter(names))}", tuple(externals))


def _by_plan(plans: Sequence[Plan], wires: Sequence[Wire]) -> Iterator[tuple[Plan, Sequence[Wire]]]:
    start = 0
    for plan in plans:
        count = len(plan.program.arguments)
        yield plan, wires[start : start + count]
        start += count


def _placeholders(graph: Graph, by_plan: Sequence[tuple[Plan, Sequence[Wire]]]) -> dict[int, Node]:
    """A placeholder for each external, in the order of their numbers."""
    specs: dict[int, Any] = {}
    for plan, inputs in by_plan:
        placeholders = [n for n in plan.traced.graph.graph.nodes if n.op == "placeholder"]
        for position, wire in zip(plan.program.arguments, inputs, strict=True):
            if wire >= 0:
                specs.setdefault(wire, placeholders[position].meta["val"])
    nodes = {}
    for number in sorted(specs):
        nodes[number] = graph.placeholder(f"external_{number}")
        nodes[number].meta["val"] = specs[number]
    return nodes


def _inline(graph: Graph, attributes: dict[str, Any], plan: Plan, inputs: dict[int, Node], drawn: int) -> list[Node]:
    """Copy a plan's nodes; returns those of its outputs. Its writes are values like any other here."""
    environment: dict[Node, Any] = {}
    position = 0
    for node in plan.traced.graph.graph.nodes:
        if node.op == "placeholder":
            environment[node] = inputs.get(position)
            position += 1
        elif node.op == "output":
            return [environment[item] for item in node.args[0]]
        elif node.target is aten.copy_.default:
            environment[node] = environment[node.args[1]]
        elif node.op == "get_attr":
            environment[node] = _attribute(graph, attributes, plan, node)
        else:
            copy = environment[node] = graph.node_copy(node, environment.__getitem__)
            if node.target is rng_key:
                copy.args = (node.args[0] + drawn,)
    raise AssertionError("a graph without output")


def _stored(graph: Graph, node: Node) -> Node:
    """A new tensor as its cell holds it, axes in the order of memory: what the plans that use it expect."""
    value = node.meta["val"]
    order = dense_order(tuple(value.shape), tuple(value.stride()))
    if order is None or order == tuple(range(value.dim())):
        return node
    permuted = graph.call_function(aten.permute.default, (node, list(order)))
    permuted.meta["val"] = value.permute(order)
    return permuted


def _attribute(graph: Graph, attributes: dict[str, Any], plan: Plan, node: Node) -> Node:
    name = f"{node.target}_{len(attributes)}".replace(".", "_")
    attributes[name] = getattr(plan.traced.graph, str(node.target))
    copy = graph.get_attr(name)
    copy.meta = dict(node.meta)
    return copy


def _copied(graph: Graph, target: Node, value: Node) -> Node:
    copied = graph.call_function(aten.copy_.default, (target, value))
    copied.meta["val"] = target.meta["val"]
    return copied


def _distinct(graph: Graph, results: Sequence[Node]) -> list[Node]:
    """No result is an input as it is: a buffer belongs to one cell."""
    return [_clone(graph, node) if node.op == "placeholder" else node for node in results]


def _clone(graph: Graph, node: Node) -> Node:
    clone = graph.call_function(aten.clone.default, (node,))
    clone.meta["val"] = node.meta["val"]
    return clone
