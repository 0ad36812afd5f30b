"""Graphs with one dtype in place of another, or an op in place of another: the changed program of a suggestion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

aten = torch.ops.aten
Swap = Callable[[Node, tuple[Any, ...], dict[str, Any]], tuple[Any, tuple[Any, ...], dict[str, Any]]]
"""(node, its arguments) -> the op and arguments to put in its place."""


def retyped(graph_module: GraphModule, old: torch.dtype, new: torch.dtype) -> GraphModule:
    """The graph with ``new`` wherever ``old`` stands. Where an op insists on ``old`` it is given that."""

    def swap(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def other(value: Any) -> Any:
            return new if value is old else value

        return node.target, tree_map(other, args), tree_map(other, kwargs)

    return _rebuilt(graph_module, swap, old, new)


def replaced(graph_module: GraphModule, ops: Mapping[Any, Mapping[str, Any]]) -> GraphModule:
    """The graph with other keyword arguments for some ops."""

    def swap(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return node.target, args, {**kwargs, **ops.get(node.target, {})}

    return _rebuilt(graph_module, swap, None, None)


def _rebuilt(graph_module: GraphModule, swap: Swap, old: torch.dtype | None, new: torch.dtype | None) -> GraphModule:
    return _Rebuild(graph_module, swap, old, new).run()


class _Rebuild:
    """A copy of a graph, node by node, each computed anew on fake tensors."""

    def __init__(self, source: GraphModule, swap: Swap, old: torch.dtype | None, new: torch.dtype | None) -> None:
        self.source, self.swap, self.old, self.new = source, swap, old, new
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.mode = _mode(source)

    def run(self) -> GraphModule:
        with self.mode, torch.no_grad():
            for node in self.source.graph.nodes:
                self.env[node] = self._visit(node)
        return GraphModule(attributes(self.source), self.graph)

    def _visit(self, node: Node) -> Node:
        if node.op == "placeholder":
            copy = self.graph.node_copy(node)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dtype is self.old and self.new is not None:
                copy.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=self.new, device=value.device)
            return copy
        if node.op in ("get_attr", "output"):
            return self.graph.node_copy(node, self.env.__getitem__)
        return self._call(node)

    def _call(self, node: Node) -> Node:
        args: Any = torch.fx.map_arg(node.args, self.env.__getitem__)
        kwargs: Any = torch.fx.map_arg(node.kwargs, self.env.__getitem__)
        target, args, kwargs = self.swap(node, args, kwargs)
        if self._unchanged(node, target, args, kwargs):
            return self.graph.node_copy(node, self.env.__getitem__)
        try:
            value = self._computed(target, args, kwargs)
        except (RuntimeError, TypeError, IndexError):
            if self.old is None:
                raise
            args, kwargs = torch.fx.map_arg(args, self._cast), torch.fx.map_arg(kwargs, self._cast)
            value = self._computed(target, args, kwargs)
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {**node.meta, "val": value}
        return made

    def _unchanged(self, node: Node, target: Any, args: Any, kwargs: Any) -> bool:
        """Whether a node is what it was: nothing that it reads has changed, and nothing about it."""
        now: list[Node] = []
        before: list[Node] = []
        torch.fx.map_arg((args, kwargs), now.append)
        torch.fx.map_arg((node.args, node.kwargs), before.append)
        same = all(_dtype(a) is _dtype(b) for a, b in zip(now, before, strict=True))
        mapped = torch.fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        return same and target is node.target and mapped == (args, kwargs)

    def _computed(self, target: Any, args: Any, kwargs: Any) -> Any:
        def value(node: Node) -> Any:
            return getattr(self.source, str(node.target)) if node.op == "get_attr" else node.meta["val"]

        return target(*torch.fx.map_arg(args, value), **torch.fx.map_arg(kwargs, value))

    def _cast(self, node: Node) -> Node:
        """The node in the old dtype again, for an op that takes no other."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype is not self.new:
            return node
        made = self.graph.call_function(aten._to_copy.default, (node,), {"dtype": self.old})
        made.meta = {**node.meta, "val": value.to(self.old)}
        return made


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _mode(graph_module: GraphModule) -> FakeTensorMode:
    for node in graph_module.graph.nodes:
        found = getattr(node.meta.get("val"), "fake_mode", None)
        if isinstance(found, FakeTensorMode):
            return found
    return FakeTensorMode()


def attributes(graph_module: GraphModule) -> dict[str, Any]:
    names = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
    return {name: getattr(graph_module, name) for name in names}


def written_in_place(graph_module: GraphModule, pairs: Mapping[str, str]) -> GraphModule:
    """The graph with results written into arguments, and these handed back: ``pairs`` maps placeholder names to the
    names of result nodes."""
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in graph_module.graph.nodes:
        if node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    by_name = {node.name: node for node in env}
    for argument, result in pairs.items():
        target, source = env[by_name[argument]], env[by_name[result]]
        written = graph.call_function(aten.copy_.default, (target, source))
        written.meta["val"] = target.meta["val"]
        env[by_name[result]] = written
    graph.node_copy(graph_module.graph.output_node(), env.__getitem__)
    return GraphModule(attributes(graph_module), graph)
