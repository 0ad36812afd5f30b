"""Results that are views, in graphs with symbolic sizes: made on the host, by the view ops, from what they view.

AOTAutograd reads such a result's sizes, strides and storage offset and views its owner (an argument, or another result)
there. With fixed sizes it replays the views by itself and any tensor will do; with symbolic ones it believes what we
return.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


class Replayed:
    """A compiled graph without its view results, and the tail that makes them from its arguments and results."""

    def __init__(self, compiled: Any, tail: GraphModule) -> None:
        self._boxed_call = True
        self.compiled, self.tail = compiled, tail

    def __call__(self, arguments: list[Any]) -> list[Any]:
        given = list(arguments)
        arguments.clear()
        return list(self.tail(*given, *self.compiled(list(given))))


def take(graph_module: GraphModule) -> GraphModule | None:
    """Take the symbolic view results out of a graph, and put in what they are made from.

    Returns the tail that makes them: it takes the graph's arguments (after they have been written) and then its new
    results, and gives the old results. None if there are no such views.
    """
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    items = output.args[0]
    if not isinstance(items, (tuple, list)):
        return None
    written = {n.args[1]: n.args[0] for n in graph.find_nodes(op="call_function", target=aten.copy_.default)}
    chains = {item: chain for item in items if (chain := _chain(item, {*items, *written}))}
    if not chains:
        return None
    placeholders = list(graph.find_nodes(op="placeholder"))
    inside = {node for chain in chains.values() for node in chain}
    results = [item for item in items if item not in chains]
    results += [n for n in _needed(inside) if n not in placeholders and n not in results and n not in written]
    tail = _tail(graph_module, placeholders, results, items, inside, written)
    output.args = (tuple(results),)
    graph.eliminate_dead_code()
    graph_module.recompile()
    return tail


def _tail(
    graph_module: GraphModule,
    placeholders: list[Node],
    results: list[Any],
    items: Sequence[Any],
    inside: set[Node],
    written: dict[Node, Node],
) -> GraphModule:
    graph, copies = Graph(), {}
    for node in placeholders:
        copies[node] = graph.placeholder(node.name)
    copies.update({contents: copies[argument] for contents, argument in written.items()})
    for index, node in enumerate(results):
        place = graph.placeholder(f"result_{index}")
        if isinstance(node, Node):
            copies[node] = place
    for node in graph_module.graph.nodes:
        if node in inside and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[item] if isinstance(item, Node) else item for item in items))
    return GraphModule(graph_module, graph)


def _needed(inside: set[Node]) -> list[Node]:
    """What the taken nodes read from the rest of the graph."""
    read = dict.fromkeys(i for node in inside for i in node.all_input_nodes)
    return [node for node in read if node not in inside]


def _chain(item: Any, owners: set[Any]) -> list[Node] | None:
    """The nodes that make a symbolic view from its owner: an argument, another result, or what is written into an
    argument. None if it is no such view, or is made from more than numbers."""
    value = item.meta.get("val") if isinstance(item, Node) else None
    if not isinstance(value, torch.Tensor) or item.op != "call_function" or not _symbolic(value):
        return None
    nodes: list[Node] = []
    node = item
    while node.op != "placeholder" and (node is item or node not in owners):
        view = node.args[0] if node.target is operator.getitem else node
        base = view.args[0] if isinstance(view, Node) and view.args else None
        if not isinstance(view, Node) or not isinstance(base, Node) or not _same_memory(node, base):
            return None
        others = [other for other in view.all_input_nodes if other is not base]
        if not all(isinstance(other.meta.get("val"), _NUMBERS) for other in others):
            return None
        nodes += [node, view, *(n for other in others for n in _numbers(other))]
        node = base
    return None if _overwritten(node) else nodes


def _numbers(node: Node) -> Iterator[Node]:
    """A number's node, and the numbers it is computed from. Those of the arguments need no computing."""
    if node.op != "placeholder":
        yield node
        if node.target is not aten._local_scalar_dense.default and node.target is not aten.sym_size.int:
            for other in node.all_input_nodes:
                yield from _numbers(other)


def _symbolic(value: torch.Tensor) -> bool:
    return not all(type(s) is int for s in (*value.shape, *value.stride(), value.storage_offset()))


def _same_memory(node: Node, base: Node) -> bool:
    ours, theirs = node.meta.get("val"), base.meta.get("val")
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    return bool(ours.untyped_storage()._cdata == theirs.untyped_storage()._cdata)


def _overwritten(owner: Node) -> bool:
    """An argument that the graph writes into holds something else by the time the tail runs."""
    return any(user.target is aten.copy_.default and user.args[0] is owner for user in owner.users)
