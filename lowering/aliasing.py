"""Which nodes of a functional graph stand for the same memory."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Node

aten = torch.ops.aten


def memory_of(node: Node) -> Node:
    """The node whose memory a node's tensor is: views, whole or in part, lead to what they are views of."""
    while isinstance(node.target, OpOverload) and isinstance(node.args[0] if node.args else None, Node):
        alias = node.target._schema.returns[0].alias_info if node.target._schema.returns else None
        if (alias is None or alias.is_write) and node.target is not aten._unsafe_view.default:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node
