"""Loss, gradients and the optimizer's step put together: one graph for a whole training step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from tpu_compile.training.joint import Joint
from tpu_compile.training.update import Update

aten = torch.ops.aten
scan = torch.ops.higher_order.scan


@dataclass(frozen=True)
class Batches:
    """Gradient accumulation: how many parts, and for each argument of the model that is a part of the batch the whole
    of it."""

    count: int
    whole: Mapping[int, torch.Tensor]


def whole_step(joint: Joint, update: Update, trained: Sequence[int], batches: Batches | None) -> GraphModule:
    """One graph: its placeholders are the model's arguments, then those of ``update`` but for parameters and gradients;
    its result is the loss. ``trained``: which arguments are the parameters of ``update``."""
    return _Builder(joint, update, trained, batches).build()


class _Builder:
    def __init__(self, joint: Joint, update: Update, trained: Sequence[int], batches: Batches | None) -> None:
        self.joint, self.update, self.trained, self.batches = joint, update, trained, batches
        self.graph = Graph()
        self.modules: dict[str, Any] = {}

    def build(self) -> GraphModule:
        arguments = [self._argument(i, node) for i, node in enumerate(self.joint.placeholders[:-1])]
        given = self.update.graph.graph.find_nodes(op="placeholder")[2 * len(self.trained) :]
        ours = [self._placeholder(f"optimizer_{i}", node.meta["val"]) for i, node in enumerate(given)]
        for node, name in zip(ours, self._names(), strict=True):
            node.meta["argument"] = name
        seed = self._seed(ours[-3] if self.update.scaled else None)
        if self.batches is None:
            loss, gradients = self._inline(arguments, seed)
        else:
            loss, gradients = self._accumulate(arguments, seed)
        self._apply(arguments, gradients, ours)
        self.graph.output((loss,))
        return GraphModule(self.modules, self.graph)

    def _argument(self, index: int, node: Node) -> Node:
        value = node.meta["val"]
        if self.batches and index in self.batches.whole:
            like = self.batches.whole[index]
            with value.fake_mode:
                value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=value.device)
        copy = self._placeholder(str(node.target), value)
        copy.meta["argument"] = self.joint.names[index]
        return copy

    def _placeholder(self, name: str, value: Any) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def _names(self) -> list[str]:
        """What the optimizer's arguments are, for people."""
        names = [self.joint.names[index] for index in self.trained]
        kept = [f"{slot.key} of {names[slot.param]}" for slot in self.update.slots if not slot.counter]
        return [*kept, *(["loss scale", "loss scale growth"] if self.update.scaled else []), "hyperparameters"]

    def _call(self, value: torch.Tensor | Any, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def _seed(self, scale: Node | None) -> Node:
        """The gradient of the loss: 1, or GradScaler's scale; divided by the number of parts."""
        like = self.joint.placeholders[-1].meta["val"]
        parts = self.batches.count if self.batches else 1
        with like.fake_mode:
            value = torch.empty_like(like)
        if scale is None:
            return self._call(
                value, aten.full.default, list(like.shape), 1 / parts, dtype=like.dtype, device=like.device
            )
        shaped = self._call(scale.meta["val"], aten.div.Tensor, scale, parts)
        cast = self._call(value, aten._to_copy.default, shaped, dtype=like.dtype)
        return self._call(value, aten.expand.default, cast, list(like.shape))

    def _copy_nodes(
        self, graph: Graph, copies: dict[Node, Node], nodes: Any, modules: dict[str, Any], source: Any
    ) -> None:
        for node in nodes:
            if node.op == "get_attr":
                name = f"{node.target}_{len(modules)}"
                modules[name] = getattr(source, str(node.target))
                copies[node] = graph.get_attr(name)
                copies[node].meta = dict(node.meta)
            elif node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)

    def _inline(self, arguments: list[Node], seed: Node) -> tuple[Node, list[Node]]:
        """Loss and the trained parameters' gradients, with what the model writes."""
        copies = dict(zip(self.joint.placeholders, [*arguments, seed], strict=True))
        self._copy_nodes(self.graph, copies, self.joint.graph.graph.nodes, self.modules, self.joint.graph)
        gradients = [self.joint.gradients[i] for i in self.trained]
        return copies[self.joint.loss], [copies[g] for g in gradients if g is not None]

    def _accumulate(self, arguments: list[Node], seed: Node) -> tuple[Node, list[Node]]:
        """The same for parts of the batch, one after another in a loop; the loss and the gradients are their means."""
        assert self.batches is not None
        body, written = self._body(arguments)
        parts = [self._parts(arguments[i]) for i in self.batches.whole]
        wanted = [g for g in (self.joint.gradients[i] for i in self.trained) if g is not None]
        start = [self._zeros(node.meta["val"]) for node in (self.joint.loss, *wanted)]
        start += [arguments[i] for i in written]
        others = [a for i, a in enumerate(arguments) if i not in self.batches.whole and i not in written]
        self.modules["accumulate"] = body
        attribute = self.graph.get_attr("accumulate")
        values = tuple(n.meta["val"] for n in start)
        loop = self._call(values, scan, attribute, start, parts, (*others, seed))
        results = [self._call(v, operator.getitem, loop, i) for i, v in enumerate(values)]
        for index, new in zip(written, results[1 + len(wanted) :], strict=True):
            self._call(values[0], aten.copy_.default, arguments[index], new).meta["val"] = arguments[index].meta["val"]
        mean = self._call(values[0], aten.div.Tensor, results[0], self.batches.count)
        return mean, results[1 : 1 + len(wanted)]

    def _zeros(self, like: Any) -> Node:
        with like.fake_mode:
            value = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._call(value, aten.full.default, list(like.shape), 0, dtype=like.dtype, device=like.device)

    def _parts(self, batch: Node) -> Node:
        assert self.batches is not None
        value = batch.meta["val"]
        shape = [self.batches.count, value.shape[0] // self.batches.count, *value.shape[1:]]
        with value.fake_mode:
            return self._call(value.new_empty(shape), aten.reshape.default, batch, shape)

    def _body(self, arguments: list[Node]) -> tuple[GraphModule, list[int]]:
        """(the loop's body, which arguments it writes to): (sums, written, parts, others, seed) -> (sums, written)."""
        assert self.batches is not None
        placeholders = self.joint.placeholders
        nodes = list(self.joint.graph.graph.nodes)
        writes = {placeholders.index(n.args[0]): n.args[1] for n in nodes if n.target is aten.copy_.default}
        written, wanted = sorted(writes), [self.joint.gradients[i] for i in self.trained]
        graph, modules = Graph(), dict[str, Any]()
        sums = [graph.placeholder(f"sum_{i}") for i in range(1 + len([g for g in wanted if g is not None]))]
        order = [*written, *self.batches.whole]
        order += [i for i in range(len(placeholders)) if i not in order]
        copies: dict[Node, Node] = {}
        for i in order:
            copies[placeholders[i]] = graph.node_copy(placeholders[i])
        reading = [n for n in nodes if n.target is not aten.copy_.default]
        self._copy_nodes(graph, copies, reading, modules, self.joint.graph)
        results = []
        for total, node in zip(sums, [self.joint.loss, *(g for g in wanted if g is not None)], strict=True):
            total.meta["val"] = node.meta["val"]
            results.append(graph.call_function(aten.add.Tensor, (total, copies[node])))
            results[-1].meta = {"val": node.meta["val"], "stack_trace": node.stack_trace}
        graph.output([*results, *(copies[writes[i]] for i in written)])
        return GraphModule(modules, graph), written

    def _apply(self, arguments: list[Node], gradients: list[Node], ours: list[Node]) -> None:
        """The optimizer's step, and its results written where they belong."""
        inner = self.update.graph.graph
        params = [arguments[i] for i in self.trained]
        copies = dict(zip(inner.find_nodes(op="placeholder"), [*params, *gradients, *ours], strict=True))
        self._copy_nodes(self.graph, copies, inner.nodes, self.modules, self.update.graph)
        results: Any = inner.output_node().args[0]
        for target, result in zip([*params, *ours[:-1]], results, strict=True):
            if copies[result] is not target:
                self._call(target.meta["val"], aten.copy_.default, target, copies[result])
