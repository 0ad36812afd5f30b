"""A part of a graph as a graph of its own."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from tpu_compile.lowering.fx import GraphWalk


def extract(module: Any, nodes: Sequence[Node], wanted: Sequence[Node]) -> tuple[GraphModule, list[Node]]:
    """``nodes`` (in graph order) as a graph that returns ``wanted``; what they read from outside becomes its arguments.

    A wanted node with several results returns all of them.

    Returns:
        The graph, and the nodes of the old one whose values are its arguments.
    """
    graph, copies, borders = Graph(), {}, _borders(nodes)
    for node in borders:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        for attribute in (i for i in node.all_input_nodes if i.op == "get_attr" and i not in copies):
            copies[attribute] = graph.node_copy(attribute, copies.__getitem__)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(result for node in wanted for result in _results(graph, copies[node])))
    return GraphModule(module, graph), borders


def _borders(nodes: Sequence[Node]) -> list[Node]:
    inside = set(nodes)
    read = (i for node in nodes for i in node.all_input_nodes if i not in inside and i.op != "get_attr")
    return list(dict.fromkeys(read))


def _results(graph: Graph, node: Node) -> list[Node | None]:
    """A node's tensors: itself, or one ``getitem`` for each of its results (None where it has none)."""
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)):
        return [node]
    return [
        _item(graph, node, index, part) if isinstance(part, torch.Tensor) else None for index, part in enumerate(value)
    ]


def _item(graph: Graph, node: Node, index: int, value: Any) -> Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = value
    return item


def bound(module: GraphModule, bindings: Mapping[Any, int]) -> GraphModule:
    """A graph with numbers in place of its symbolic sizes; the same graph if it has none."""
    if not bindings:
        return module
    walk = GraphWalk(module, bindings)
    graph = Graph()
    copies: dict[Node, Node] = {}
    with FakeTensorMode():
        for node in module.graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].args, copies[node].kwargs = tree_map(walk.number, (copies[node].args, copies[node].kwargs))
            if "val" in node.meta:
                copies[node].meta["val"] = tree_map(lambda value: _concrete(walk, value), node.meta["val"])
    return GraphModule(module, graph)


def _concrete(walk: GraphWalk, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return walk.number(value)
    spec = walk.spec(value, strided=True)
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=value.device)
