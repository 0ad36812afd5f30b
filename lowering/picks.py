"""Picks of data-dependent size that are only summed: what a mask picks sums up to what is left when the rest is zero.

So compile the gradients of ``x[mask] = value`` and ``index_fill``, whose value may be a parameter (a mask token).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


@dataclass(frozen=True)
class Pick:
    """``node`` picks from ``x`` where ``mask`` is true; the mask covers the axes of ``x`` from ``axis`` on, which are
    one axis, ``axis``, of what is picked."""

    x: Node
    mask: Node
    axis: int

    @property
    def extra(self) -> int:
        """How many axes more than the pick ``x`` has."""
        return self.mask.meta["val"].dim() - 1


def sum_picks(graph_module: GraphModule) -> None:
    """Rewrite such picks in a functional aten graph whose nodes carry FakeTensor metadata."""
    changed = [n for n in graph_module.graph.nodes if n.target in _PICKS and _PICKS[n.target](graph_module, n)]
    if changed:
        graph_module.graph.eliminate_dead_code()
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


def _is_unknown(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and any(str(s).startswith("u") for s in size.node.expr.free_symbols)


def _summed_axes(user: Node, rank: int) -> list[int]:
    dims: Any = user.args[1] if len(user.args) > 1 else None
    return [d % rank for d in dims] if dims else list(range(rank))


def _only_summed(node: Node, axis: int) -> bool:
    """Whether every use of ``node`` is a sum over ``axis``."""
    rank = node.meta["val"].dim()
    sums = (aten.sum.default, aten.sum.dim_IntList)
    return bool(node.users) and all(u.target in sums and axis in _summed_axes(u, rank) for u in node.users)


def _rewrite_sums(graph_module: GraphModule, node: Node, pick: Pick) -> None:
    """Sum ``x``, zero off the mask, in place of what was picked."""
    write = _Writer(graph_module, node)
    off = write(aten.logical_not.default, pick.mask)
    for _ in range(pick.x.meta["val"].dim() - pick.axis - pick.mask.meta["val"].dim()):
        off = write(aten.unsqueeze.default, off, off.meta["val"].dim())
    zeroed = write(aten.masked_fill.Scalar, pick.x, off, 0)
    for user in list(node.users):
        user.replace_all_uses_with(_sum_of(_Writer(graph_module, user), user, zeroed, pick, node.meta["val"].dim()))


def _sum_of(write: _Writer, user: Node, zeroed: Node, pick: Pick, rank: int) -> Node:
    """The sum that ``user`` is, of ``zeroed``, whose masked axes count as one."""
    if user.target is aten.sum.default:
        return write(aten.sum.default, zeroed, **user.kwargs)
    picked = range(pick.axis, pick.axis + pick.extra + 1)
    dims = [d for d in _summed_axes(user, rank) if d < pick.axis]
    dims += [*picked, *(d + pick.extra for d in _summed_axes(user, rank) if d > pick.axis)]
    keepdim = len(user.args) > 2 and bool(user.args[2])
    total = write(aten.sum.dim_IntList, zeroed, dims, keepdim, **user.kwargs)
    return write(aten.squeeze.dims, total, list(picked[1:])) if keepdim and pick.extra else total


def _masked_index(graph_module: GraphModule, node: Node) -> bool:
    """``x[..., mask, ...]``."""
    x: Any = node.args[0]
    indices: Any = node.args[1]
    given = [(at, index) for at, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return False
    ((axis, mask),) = given
    known = not _is_unknown(node.meta["val"].shape[axis])
    if mask.meta["val"].dtype is not torch.bool or known or not _only_summed(node, axis):
        return False
    _rewrite_sums(graph_module, node, Pick(x, mask, axis))
    return True


def _unique_index_select(graph_module: GraphModule, node: Node) -> bool:
    """``x.index_select(dim, index.unique())``."""
    x, dim, index = node.args
    unique: Any = index.args[0] if isinstance(index, Node) and index.args else None
    if not isinstance(unique, Node) or unique.target is not aten._unique.default or index.args[1] != 0:  # type: ignore[union-attr]
        return False
    value = x.meta["val"]  # type: ignore[union-attr]
    if not value.dim():  # there is one element, and it is picked once
        node.replace_all_uses_with(x)  # type: ignore[arg-type]
        return True
    axis = dim % value.dim()
    if not _only_summed(node, axis):
        return False
    write = _Writer(graph_module, node)
    places: Any = unique.args[0]
    if not places.meta["val"].dim():
        places = write(aten.unsqueeze.default, places, 0)
    one_row: Any = x
    for at in reversed([i for i in range(value.dim()) if i != axis]):
        one_row = write(aten.select.int, one_row, at, 0)
    nowhere = write(aten.full_like.default, one_row, False, dtype=torch.bool)
    mask = write(aten.scatter.value, nowhere, 0, places, True)
    _rewrite_sums(graph_module, node, Pick(x, mask, axis))  # type: ignore[arg-type]
    return True


_PICKS: dict[Any, Callable[[GraphModule, Node], bool]] = {
    aten.index.Tensor: _masked_index,
    aten.index_select.default: _unique_index_select,
}
