"""Activation checkpointing that XLA does not undo: what a backward computes again stays where the backward needs it.

XLA would merge a recomputation with the forward's own computation, where both are one program, or move it to the front
of a backward, and every activation would live as long as before. So whatever the recomputation of a region reads passes
an optimization barrier together with the gradient that arrives there: it cannot begin before that gradient is known.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from tpu_compile.lowering.random import rng_key

aten = torch.ops.aten

_library = torch.library.Library("tpu_compile", "FRAGMENT")
_library.define("barrier(Tensor[] xs) -> Tensor[]")
barrier = torch.ops.tpu_compile.barrier.default

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_FREE = frozenset(
    {
        *(aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int),
        *(aten.detach.default, aten.alias.default, aten.full.default, aten.scalar_tensor.default, aten.arange.default),
        *(aten._unsafe_view.default, aten.reshape.default, aten.arange.start, aten.arange.start_step),
    }
)
"""Ops that hold no memory worth speaking of: there is nothing to gain by computing them late."""


def asks_for_recomputation(joint: GraphModule) -> bool:
    """Whether ``torch.utils.checkpoint`` marked a node of the graph."""
    return any(node.meta.get("recompute") in _AGAIN for node in joint.graph.nodes)


def recompute_late(backward: GraphModule, parameters: Collection[str] = ()) -> None:
    """Put barriers into a backward, in place: what does not depend on a gradient is computed when a gradient first
    meets it.

    Args:
        parameters: names of arguments that stay in memory anyhow; they are held back only where there is nothing else.
    """
    graph = backward.graph
    gradients = _on_gradients(graph)
    done: set[Node] = set()
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "output" or (node in gradients and node.op == "call_function"):
            again = _recomputed_for(node, gradients, done)
            for each in again:
                node.prepend(each)
            arriving = [i for i in node.all_input_nodes if i in gradients and _is_tensor(i)]
            if node.op != "output" and arriving and any(n.target not in _FREE for n in again):
                _delay(graph, again, node, arriving[-1], parameters)
            done.update(again)
    graph.lint()
    backward.recompile()


def _on_gradients(graph: torch.fx.Graph) -> set[Node]:
    """The nodes that depend on a gradient that the backward was given."""
    found: set[Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and "tangents" in str(node.target)
        if given or (node.op == "call_function" and any(i in found for i in node.all_input_nodes)):
            found.add(node)
    return found


def _recomputed_for(node: Node, gradients: set[Node], done: set[Node]) -> list[Node]:
    """What ``node`` needs that is computed again and was not needed before, in the graph's order."""
    found: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop()
        if each.op == "call_function" and each not in gradients and each not in done and each not in found:
            found.add(each)
            waiting += each.all_input_nodes
    return [n for n in node.graph.nodes if n in found] if found else []


def _delay(graph: torch.fx.Graph, again: list[Node], user: Node, gradient: Node, parameters: Collection[str]) -> None:
    """Put ``again``, which stands in front of ``user``, behind a barrier that waits for ``gradient``."""
    inside = set(again)
    read = dict.fromkeys(i for n in again for i in n.all_input_nodes if i not in inside and _is_tensor(i))
    read = {n: None for n in read if n.name not in parameters} or read
    if not read:
        return
    held = [*read, gradient]
    with graph.inserting_before(again[0]):
        fence = graph.call_function(barrier, (held,))
        fence.meta = {"val": [n.meta["val"] for n in held], "stack_trace": user.stack_trace}
        behind = dict(zip(held, _items(graph, fence, held), strict=True))
    for node in again:
        for old in read:
            node.replace_input_with(old, behind[old])
    user.replace_input_with(gradient, behind[gradient])


def _items(graph: torch.fx.Graph, fence: Node, held: list[Node]) -> Iterator[Node]:
    for index, node in enumerate(held):
        item = graph.call_function(operator.getitem, (fence, index))
        item.meta = {"val": node.meta["val"]}
        yield item


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and node.target is not rng_key


def _fake(xs: Any) -> Any:
    return [x.clone() for x in xs]


torch.library.register_fake("tpu_compile::barrier", _fake, lib=_library)
