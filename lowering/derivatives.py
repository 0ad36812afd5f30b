"""Gradients that torch writes out in parts, to differentiate them again: ``torch.func.grad`` always asks for those.

In 16 bits each part would be rounded, and what XLA fuses into a product would be a chain of roundings in place of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)


def join_derivatives(graph_module: GraphModule) -> None:
    """Write ``silu_backward`` for what is one in parts, in a functional aten graph with FakeTensor metadata."""
    graph = graph_module.graph
    products = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    joined = [node for node in products if node.meta["val"].dtype in _NARROW and _join_silu(node)]
    if joined:
        graph.eliminate_dead_code()
        graph_module.recompile()


def _join_silu(node: Node) -> bool:
    """``(grad * s) * (x * (1 - s) + 1)`` with ``s = sigmoid(x)``."""
    scaled, factor = node.args
    grad, sigmoid = _operands(scaled, aten.mul.Tensor)
    slope, _ = _operands(factor, aten.add.Scalar, second=1)
    x, rest = _operands(slope, aten.mul.Tensor)
    ones, same = _operands(rest, aten.sub.Tensor)
    if not _operands(ones, aten.fill.Scalar, second=1)[0] or same is not sigmoid:
        return False
    if not isinstance(sigmoid, Node) or sigmoid.target is not aten.sigmoid.default or sigmoid.args[0] is not x:
        return False
    with node.graph.inserting_before(node):
        whole = node.graph.call_function(aten.silu_backward.default, (grad, x))
    whole.meta = dict(node.meta)
    node.replace_all_uses_with(whole)
    return True


def _operands(node: Any, op: Any, second: Any = None) -> tuple[Any, Any]:
    """What ``op(first, second)`` is of, if ``node`` is that; else nothing."""
    found = isinstance(node, Node) and node.target is op and len(node.args) == 2 and not node.kwargs
    return node.args if found and second in (None, node.args[1]) else (None, None)
