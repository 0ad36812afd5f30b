"""What each op of a graph costs, estimated from shapes alone: which of the user's lines to look at first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from tpu_compile.places import place

aten = torch.ops.aten
_MOVES = frozenset(
    (
        *(
            aten.copy_,
            aten.clone,
            aten._to_copy,
            aten.cat,
            aten.stack,
            aten.constant_pad_nd,
            aten.flip,
            aten.roll,
            aten.repeat,
        ),
        *(aten.gather, aten.index, aten.index_select, aten.embedding, aten.slice_scatter, aten.select_scatter),
        *(aten.full, aten.full_like, aten.zeros, aten.ones, aten.empty, aten.arange, aten.scalar_tensor, aten.where),
    )
)
"""Ops that only move data: they have bytes and no flops."""


@dataclass(frozen=True)
class NodeCost:
    """One op. ``flops``: a multiply-add counts two, any other op one an element (of its larger side).
    ``bytes``: all that it reads and writes if nothing is fused; views cost nothing."""

    node: str
    op: str
    flops: int
    bytes: int
    where: str


def node_costs(graph_module: GraphModule, bindings: Mapping[Any, int] | None = None) -> list[NodeCost]:
    """Every op of a graph that does any work, the one with the most flops first (bytes decide a tie).

    Args:
        bindings: numbers for the graph's symbolic sizes.
    """
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function" and isinstance(n.target, OpOverload)]
    found = [_cost(n, bindings or {}) for n in nodes if not _is_view(n.target)]
    return sorted(found, key=lambda c: (-c.flops, -c.bytes))


def product_flops(graph_module: GraphModule, bindings: Mapping[Any, int] | None = None) -> int:
    """Flops of a graph's products and convolutions alone, a multiply-add counted as two."""
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function" and isinstance(n.target, OpOverload)]
    return sum(_formula(n, bindings or {}) or 0 for n in nodes)


def _is_view(op: OpOverload) -> bool:
    returned = op._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write


def _cost(node: Node, bindings: Mapping[Any, int]) -> NodeCost:
    assert isinstance(node.target, OpOverload)
    read = _sizes([n.meta.get("val") for n in node.all_input_nodes], bindings)
    written = _sizes([node.meta.get("val")], bindings)
    flops = _formula(node, bindings)
    if flops is None:
        flops = (
            0
            if node.target.overloadpacket in _MOVES
            else max((elements for elements, _ in (*read, *written)), default=0)
        )
    return NodeCost(node.name, str(node.target), flops, sum(size for _, size in (*read, *written)), place(node))


def _sizes(values: list[Any], bindings: Mapping[Any, int]) -> list[tuple[int, int]]:
    """(elements, bytes) of each tensor in nested values."""
    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
    counts = [prod(_shape(t, bindings)) for t in tensors]
    return [(count, count * t.element_size()) for count, t in zip(counts, tensors, strict=True)]


def _shape(t: torch.Tensor, bindings: Mapping[Any, int]) -> list[int]:
    return [_number(size, bindings) for size in t.shape]


def _number(size: Any, bindings: Mapping[Any, int]) -> int:
    return int(size.node.expr.xreplace(bindings)) if isinstance(size, torch.SymInt) else size


def _formula(node: Node, bindings: Mapping[Any, int]) -> int | None:
    """torch's own count for products and convolutions. Formulas that want tensors (they have nothing to unwrap) do not
    count shapes."""
    assert isinstance(node.target, OpOverload)
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None or not hasattr(formula, "__wrapped__"):
        return None

    def shape(value: Any) -> Any:
        return _shape(value, bindings) if isinstance(value, torch.Tensor) else _number(value, bindings)

    args = map_arg(node.args, lambda n: n.meta.get("val"))
    return int(formula(*pytree.tree_map(shape, args), out_val=pytree.tree_map(shape, node.meta["val"])))
