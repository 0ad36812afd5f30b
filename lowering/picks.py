"""Picks of data-dependent size that are only summed: what a mask picks sums up to what is left when the rest is zero.

So compile the gradients of ``x[mask] = value`` and ``index_fill``, whose value may be a parameter (a mask token).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def sum_picks(graph_module: GraphModule) -> None:
    """Rewrite such picks in a functional aten graph whose nodes carry FakeTensor metadata."""
    graph = graph_module.graph
    picks = [n for n in graph.nodes if n.target in _MASKED and n.meta.get("val") is not None]
    changed = False
    for node in picks:
        masked = _MASKED[node.target](_Writer(graph_module, node), node)
        if masked is not None:
            node.replace_all_uses_with(masked)
            changed = True
    if changed:
        graph.eliminate_dead_code()
        graph_module.recompile()


class _Writer:
    """Writes nodes, with their metadata, before a node."""

    def __init__(self, graph_module: GraphModule, before: Node) -> None:
        self.graph, self.before = graph_module.graph, before

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(op, args, kwargs)
        fakes = torch.fx.map_arg(args, lambda n: n.meta["val"])
        with self.before.meta["val"].fake_mode:
            node.meta = {**self.before.meta, "val": op(*fakes, **kwargs)}
        node.meta.pop("unbacked_bindings", None)
        return node


def _only_summed(node: Node, axis: int) -> bool:
    """Whether every use of ``node`` is a sum over ``axis``."""
    rank = node.meta["val"].dim()
    for user in node.users:
        dims = user.args[1] if user.target is aten.sum.dim_IntList and len(user.args) > 1 else None
        over = range(rank) if not dims else [d % rank for d in dims]  # type: ignore[union-attr, operator]
        if user.target not in (aten.sum.default, aten.sum.dim_IntList) or axis not in over:
            return False
    return bool(node.users)


def _is_unknown(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and any(str(s).startswith("u") for s in size.node.expr.free_symbols)


def _zeroed(write: _Writer, x: Node, mask: Node, axis: int) -> Node:
    """``x`` with zeros where ``mask`` (on the axes from ``axis`` on) is false; those axes made one."""
    sizes, covered = list(x.meta["val"].shape), mask.meta["val"].dim()
    after = sizes[axis + covered :]
    off = write(
        aten.view.default, write(aten.logical_not.default, mask), [*mask.meta["val"].shape, *(1 for _ in after)]
    )
    zeroed = write(aten.masked_fill.Scalar, x, off, 0)
    return write(aten.view.default, zeroed, [*sizes[:axis], mask.meta["val"].numel(), *after])


def _masked_index(write: _Writer, node: Node) -> Node | None:
    """``x[..., mask, ...]``."""
    x, indices = node.args
    given: Sequence[Any] = [i for i in indices if i is not None]  # type: ignore[union-attr]
    if len(given) != 1 or given[0].meta["val"].dtype is not torch.bool:
        return None
    axis = next(i for i, index in enumerate(indices) if index is not None)  # type: ignore[arg-type]
    if not _is_unknown(node.meta["val"].shape[axis]) or not _only_summed(node, axis):
        return None
    return _zeroed(write, x, given[0], axis)  # type: ignore[arg-type]


def _unique_index_select(write: _Writer, node: Node) -> Node | None:
    """``x.index_select(dim, index.unique())``."""
    x, dim, index = node.args
    unique = index.args[0] if index.op == "call_function" and index.args else None  # type: ignore[union-attr]
    if not isinstance(unique, Node) or unique.target is not aten._unique.default or index.args[1] != 0:  # type: ignore[union-attr]
        return None
    value = x.meta["val"]  # type: ignore[union-attr]
    axis = dim % max(value.dim(), 1)  # type: ignore[operator]
    if not _only_summed(node, axis):
        return None
    if not value.dim():
        x = write(aten.view.default, x, [1])
    n = value.shape[axis] if value.dim() else 1
    places = write(aten.view.default, unique.args[0], [unique.args[0].meta["val"].numel()])  # type: ignore[union-attr]
    nowhere = write(aten.full.default, [n], False, dtype=torch.bool, device=value.device)
    return _zeroed(write, x, write(aten.scatter.value, nowhere, 0, places, True), axis)  # type: ignore[arg-type]


_MASKED: dict[Any, Callable[[_Writer, Node], Node | None]] = {
    aten.index.Tensor: _masked_index,
    aten.index_select.default: _unique_index_select,
}
