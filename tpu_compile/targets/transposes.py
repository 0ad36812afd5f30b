"""Transposes that a program makes because of the order in which its arguments come in or its results go out, and the
program without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from tpu_compile import stages
from tpu_compile.lowering.gaps import where
from tpu_compile.targets.analysis import Analysis
from tpu_compile.targets.changes import WORTH, Change
from tpu_compile.targets.hlo import Computation, Instruction, Shape
from tpu_compile.targets.retype import attributes
from tpu_compile.targets.workload import Load

aten = torch.ops.aten
_SAME = frozenset("copy bitcast copy-start copy-done get-tuple-element".split())
"""What leaves the elements as they are."""


@dataclass(frozen=True)
class Transpose:
    """A copy into or out of the order in which the program computes.

    Attributes:
        side: whether ``index`` counts the program's inputs or its outputs.
        order: axes, outermost in memory first, as the program wants them.
    """

    side: Literal["argument", "result"]
    index: int
    order: tuple[int, ...]
    share: float


def transposes(load: Load, found: Analysis, names: Sequence[str]) -> Iterator[Change]:
    """A change for each argument and result that is transposed, and whose transpose takes its time.

    Args:
        names: what each input of the program is, as the user would write it.
    """
    for each in at_the_ends(found):
        if each.side == "argument":
            yield _stored_otherwise(load, names[each.index], each)
        elif (node := _result(load, each.index)) is not None:
            yield _returned_otherwise(node, each)


def at_the_ends(found: Analysis) -> list[Transpose]:
    """Copies of arguments and of results into another order, one for each argument or result."""
    seen: dict[tuple[str, int], Transpose] = {}
    for step in found.layout_changes:
        made = found.module.entry.by_name.get(step.name)
        share = found.share(step.seconds)
        for side, index, order in _ends(found.module.entry, made) if made and share >= WORTH else ():
            if order != tuple(range(len(order))):
                seen.setdefault((side, index), Transpose(side, index, order, share))
    return list(seen.values())


def _ends(
    entry: Computation, made: Instruction
) -> Iterator[tuple[Literal["argument", "result"], int, tuple[int, ...]]]:
    if len(made.operands) != 1:
        return
    source = entry.by_name[made.operands[0]]
    first = _through(entry, source, made.shape)
    if first is not None and first.opcode == "parameter" and first.literal.isdigit():
        yield "argument", int(first.literal), _outermost_first(made.shape)
    for index in _results(entry, made):
        if source.shape.dims == made.shape.dims:
            yield "result", index, _outermost_first(source.shape)


def _through(entry: Computation, source: Instruction, shape: Shape) -> Instruction | None:
    """Where an array comes from, as long as nothing changes its axes."""
    while source.opcode in _SAME and source.operands and source.shape.dims == shape.dims:
        source = entry.by_name[source.operands[0]]
    return source if source.shape.dims == shape.dims else None


def _results(entry: Computation, made: Instruction) -> Iterator[int]:
    """Which results of the program an instruction is."""
    if made.root:
        yield 0
    elif entry.root.opcode == "tuple":
        yield from (index for index, name in enumerate(entry.root.operands) if name == made.name)


def _outermost_first(shape: Shape) -> tuple[int, ...]:
    return tuple(reversed(shape.order))


def _result(load: Load, index: int) -> Node | None:
    """The node whose value is a result of the program; None for what is written into an argument."""
    if any(index == written for _, written in load.program.mutated):
        return None
    returned: Any = load.graph.graph.output_node().args[0]
    return next((returned[i] for i, result in enumerate(load.program.results) if result.index == index), None)


# ---- the changes


def _stored_otherwise(load: Load, name: str, each: Transpose) -> Change:
    position, spec = load.program.arguments[each.index], load.program.inputs[each.index]
    node = load.graph.graph.find_nodes(op="placeholder")[position]
    back, sizes = _inverse(each.order), [spec.shape[axis] for axis in each.order]
    return Change(
        "transpose",
        f"{name} {spec} is transposed before it is used",
        _line(list(node.users)),
        f"keep it as {sizes}, {name}.permute{each.order}.contiguous(), and use {name}.permute{back}, which is free",
        each.share,
        graph=lambda traced: stored(traced.graph_module, position, each.order),
    )


def _returned_otherwise(node: Node, each: Transpose) -> Change:
    name, back = node.name, _inverse(each.order)
    return Change(
        "transpose",
        f"a result, {_described(node)}, is transposed after it is computed",
        _line([node]),
        f"return it as it is computed, .permute{each.order}, and permute it where it is read: .permute{back}",
        each.share,
        graph=partial(returned, name=name, order=each.order),
    )


def _described(node: Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _line(nodes: Sequence[Node]) -> str:
    found = next((line for node in nodes if (line := where(node))), None)
    return f"{found.file}:{found.line}" if found else ""


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(axis) for axis in range(len(order)))


def stored(graph_module: GraphModule, position: int, order: tuple[int, ...]) -> GraphModule:
    """The graph that takes one argument with its axes in another order, and writes it so where it writes to it."""
    graph, env = Graph(), dict[Node, Node]()
    changed = graph_module.graph.find_nodes(op="placeholder")[position]
    for node in graph_module.graph.nodes:
        if node is changed:
            kept = graph.node_copy(node)
            kept.meta = {**node.meta, "val": node.meta["val"].permute(order).contiguous()}
            env[node] = _permuted(graph, kept, _inverse(order), node)
        elif node.target is aten.copy_.default and node.args[0] is changed:
            written = _permuted(graph, env[node.args[1]], order, node)
            env[node] = graph.call_function(node.target, (kept, written))
            env[node].meta = {**node.meta, "val": kept.meta["val"]}
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    return GraphModule(attributes(graph_module), graph)


def returned(traced: stages.Traced, name: str, order: tuple[int, ...]) -> GraphModule:
    """The graph that returns one result with its axes in another order."""
    source = traced.graph_module
    graph, env = Graph(), dict[Node, Node]()
    for node in source.graph.nodes:
        if node.op == "output":
            wanted = next(each for each in env if each.name == name)
            env[wanted] = _permuted(graph, env[wanted], order, wanted)
        env[node] = graph.node_copy(node, env.__getitem__)
    return GraphModule(attributes(source), graph)


def _permuted(graph: Graph, node: Node, order: tuple[int, ...], like: Node) -> Node:
    made = graph.call_function(aten.permute.default, (node, list(order)))
    made.meta = {**like.meta, "val": node.meta["val"].permute(order)}
    return made
