"""Attention heads that fill a part of a tile: padded with zeros, or, for a model that is yet to be trained, fewer and
wider."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from tpu_compile.lowering.gaps import where
from tpu_compile.targets.analysis import Analysis
from tpu_compile.targets.changes import WORTH, Change, resized
from tpu_compile.targets.retype import attributes
from tpu_compile.targets.workload import Load, Made

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
"""What inference and training trace ``scaled_dot_product_attention`` to, from shapes on the host."""
_LANES = 128
"""Of a tile."""
_OF_HEADS, _WIDTHS = ("head", "d_kv", "key_value_proj"), ("dim", "size", "d_kv", "proj")
"""In the names of attributes about heads, and of those that say how wide one is; the others say how many there are."""


def odd_heads(load: Load, found: Analysis, _: Sequence[str]) -> Iterator[Change]:
    """Heads whose width is no multiple of a tile's lanes."""
    nodes = list(load.graph.graph.find_nodes(op="call_function", target=_ATTENTION))
    for width in dict.fromkeys(_width(node) for node in nodes):
        alike = [node for node in nodes if _width(node) == width]
        share = _share(found, alike)
        if share < WORTH or width % _LANES == 0:
            continue
        lines = [f"{line.file}:{line.line}" for node in alike if (line := where(node))]
        change = _wider if _trains(load) and _may_be_wider(alike[0]) else _padded
        yield change(alike, share, next(iter(lines), ""))


def _width(node: Node) -> int:
    return int(_operand(node, 0).shape[-1])


def _operand(node: Node, index: int) -> torch.Tensor:
    given: Any = node.args[index]
    value: torch.Tensor = given.meta["val"]
    return value


def _share(found: Analysis, nodes: Sequence[Node]) -> float:
    lines = {f"{line.file}:{line.line}" for node in nodes if (line := where(node))}
    return sum(found.share(step.seconds) for step in found.schedule.steps if step.products and step.where in lines)


def _trains(load: Load) -> bool:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return bool(load.graph.graph.find_nodes(op="call_function", target=backward))


def _may_be_wider(node: Node) -> bool:
    width, counts = _width(node), _heads(node)
    return _LANES % width == 0 and all(count % (_LANES // width) == 0 for count in counts)


# ---- the same function, padded


def _padded(nodes: Sequence[Node], share: float, line: str) -> Change:
    width = _width(nodes[0])
    full = -(-width // _LANES) * _LANES
    return Change(
        "heads",
        f"heads of {width} fill {width / full:.0%} of tiles of {_LANES}, in {len(nodes)} attentions",
        line,
        f"q, k, v = (F.pad(t, (0, {full - width})) for t in (q, k, v)), and F.scaled_dot_product_attention(q, k, v, "
        f"scale={width}**-0.5)[..., :{width}]; or {full} rows a head in the projections, the new ones zero",
        share,
        graph=lambda traced: padded(traced.graph_module, width, full),
    )


def padded(graph_module: GraphModule, width: int, full: int) -> GraphModule:
    """The graph with heads of ``full`` columns in its attentions in place of ``width``; the new ones are zeros."""
    graph, env = Graph(), dict[Node, Node]()
    for node in graph_module.graph.nodes:
        made: Any = graph.node_copy(node, env.__getitem__)
        if node.target is _ATTENTION and _width(node) == width:
            with graph.inserting_before(made):
                wide = [_call(graph, node, aten.constant_pad_nd.default, t, [0, full - width]) for t in made.args[:3]]
            made.args = (*wide, *made.args[3:])
            made.kwargs = {**made.kwargs, "scale": made.kwargs.get("scale") or width**-0.5}
            made.meta = {**node.meta, "val": (_widened(node.meta["val"][0], full), node.meta["val"][1])}
        elif node.target is getitem and node.args[1] == 0 and _is_padded(made.args[0], full):
            made.meta = {**node.meta, "val": made.args[0].meta["val"][0]}
            made = _call(graph, node, aten.slice.Tensor, made, -1, 0, width)
        env[node] = made
    return GraphModule(attributes(graph_module), graph)


def _is_padded(node: Any, full: int) -> bool:
    return node.target is _ATTENTION and node.meta["val"][0].shape[-1] == full


def _widened(value: torch.Tensor, full: int) -> torch.Tensor:
    return value.new_empty((*value.shape[:-1], full))


def _call(graph: Graph, like: Node, target: Any, *arguments: Any) -> Node:
    made = graph.call_function(target, arguments)
    made.meta = {**like.meta, "val": target(*torch.fx.map_arg(arguments, lambda node: node.meta["val"]))}
    return made


# ---- another model of the same size


def _wider(nodes: Sequence[Node], share: float, line: str) -> Change:
    width, (heads, groups), times = _width(nodes[0]), _heads(nodes[0]), _LANES // _width(nodes[0])
    return Change(
        "heads",
        f"{heads} heads of {width} fill {width / _LANES:.0%} of tiles of {_LANES}, in {len(nodes)} attentions",
        line,
        f"{heads // times} heads of {width * times} in place of {heads} of {width}: as many parameters and flops, "
        "fewer scores; another model, for one that is trained from here on",
        share,
        made=partial(with_wider, heads={heads, groups}, width=width, times=times),
    )


def _heads(node: Node) -> tuple[int, int]:
    """How many, of queries and of keys."""
    return int(_operand(node, 0).shape[1]), int(_operand(node, 1).shape[1])


def with_wider(made: Made, heads: set[int], width: int, times: int) -> Made:
    """The model with ``times`` fewer heads of as many columns together: what its modules and its configuration say, and
    tensors that are as long as a head (norms), or half as long (frequencies of rotary positions)."""
    lengths = {width: width * times, width // 2: width // 2 * times}
    grown = resized(lambda t: [lengths.get(t.shape[0], t.shape[0])] if t.dim() == 1 else t.shape)
    holders: dict[int, dict[str, Any]] = {}
    for module in made.model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: grown(value) for name, value in held.items()})
        for holder in (module, getattr(module, "config", None)):
            if holder is not None:
                holders[id(holder)] = vars(holder)
    for holder in holders.values():
        holder.update({name: _other(name, value, heads, width, times) for name, value in holder.items()})
    return made


def _other(name: str, value: Any, heads: set[int], width: int, times: int) -> Any:
    """What an attribute says of wider heads."""
    if value == (width,):  # the shape of a norm
        return (width * times,)
    if type(value) is not int or not any(word in name for word in _OF_HEADS):
        return value
    if any(word in name for word in _WIDTHS):
        return value * times if value == width else value
    return value // times if value in heads else value
