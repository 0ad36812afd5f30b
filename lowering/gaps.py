"""What keeps a graph from being lowered: every gap at once, each with the user's line."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from tpu_compile.errors import Gap, UnsupportedOp
from tpu_compile.lowering import dtypes, numbers
from tpu_compile.lowering.context import SourceLine, source_line
from tpu_compile.lowering.registry import registry

aten = torch.ops.aten

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers that are known once the symbols are bound."""
ASSERTIONS = frozenset(
    {
        aten._assert_async.msg,
        aten._assert_async.default,
        aten._assert_scalar.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        aten._assert_tensor_metadata.default,
    }
)
"""Checks on data or sizes that FakeTensor has made already, or that only an eager run can make; they compute
nothing."""


INSTEAD: dict[Any, str] = {
    aten.nonzero.default: "torch.where(mask, a, b), or torch.nonzero_static(x, size=n)",
    aten.index.Tensor: "torch.where(mask, x, 0) in place of x[mask]",
    aten.masked_select.default: "torch.where(mask, x, 0) in place of x[mask]",
    aten._unique2.default: "x.sort(), whose values repeat",
    aten.bincount.default: "torch.zeros(n).scatter_add(0, x, weights)",
    aten.repeat_interleave.Tensor: "repeat_interleave(…, output_size=n)",
    aten._local_scalar_dense.default: "the tensor itself in place of .item(), or make the number an argument",
}
"""How to say it with a shape that is known, by operator."""


def where(node: Node) -> SourceLine | None:
    """The user's line of a node."""
    trace = node.stack_trace
    return source_line(trace) if trace else None


def missing(graph_module: GraphModule) -> list[tuple[Node, Gap]]:
    """Everything in a graph (and its subgraphs) that has no rule, with the user's lines; a node of a subgraph is
    charged to its caller."""
    gaps = []
    for node in graph_module.graph.nodes:
        gap = _gap(node)
        if gap:
            gaps.append((node, gap))
        gaps.extend((node, inner) for sub in _subgraphs(graph_module, node) for _, inner in missing(sub))
    return gaps


def _subgraphs(graph_module: GraphModule, node: Node) -> Iterator[GraphModule]:
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
        return
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            inner = attribute(graph_module, str(argument.target))
            if isinstance(inner, GraphModule):
                yield inner


def _gap(node: Node) -> Gap | None:
    if node.op != "call_function" or evaluated(node) or node.target is operator.getitem or node.target in ASSERTIONS:
        return None
    number = node.meta.get("unbacked_bindings") or node.target is aten._local_scalar_dense.default
    if number and not numbers.stays_inside(node):
        instead = INSTEAD.get(node.target, "torch.where, or masks of a fixed shape")
        hint = f"use {instead}; or let the graph break here (no fullgraph=True)"
        return Gap(str(node.target), "its result's shape or value depends on data", str(where(node) or ""), hint)
    if registry.get(node.target) is None:
        return Gap(str(node.target), "no rule lowers it", str(where(node) or ""))
    foreign = next((d for n in (node, *node.all_input_nodes) for d in _foreign_dtypes(n.meta.get("val"))), None)
    if foreign:
        return Gap(str(node.target), f"StableHLO has no element type for {foreign}", str(where(node) or ""))
    return None


def _foreign_dtypes(value: Any) -> Iterator[torch.dtype]:
    """Dtypes of tensors in a node's value that no program can hold (complex32, the quantized ones)."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in dtypes.NUMPY:
            yield value.dtype
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _foreign_dtypes(item)


def evaluated(node: Node) -> bool:
    """Whether the node computes a Python number, known once the symbols are bound."""
    value = node.meta.get("val")
    return isinstance(value, (*SYMBOLIC, int, float, bool)) and node.target is not aten._local_scalar_dense.default


def attribute(module: Any, path: str) -> Any:
    """What a ``get_attr`` node names."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def unsupported(pairs: Sequence[tuple[Node, Gap]], name: str) -> UnsupportedOp:
    """The error that lists the gaps of a graph, with their nodes."""
    return UnsupportedOp([gap for _, gap in pairs], name, [node for node, _ in pairs])
