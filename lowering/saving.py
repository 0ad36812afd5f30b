"""What a forward saves of every layer, saved as one stacked tensor: the forward's loop fills it, the backward's reads
it, and nothing is taken apart for each layer in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from tpu_compile.lowering import layers

_DETACH = torch.ops.aten.detach.default


def stack_saved(forward: GraphModule, backward: GraphModule, returned: int) -> None:
    """Change both graphs, as a partitioner has made them, where layers of the forward may become a loop.

    ``returned``: how many of the forward's results are not saved. A saved one and its reader have one name.
    """
    readers = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    results: Sequence[Node] = forward.graph.output_node().args[0]  # type: ignore[assignment]
    saved: dict[Node, Node] = {}
    for node in results[returned:]:
        if isinstance(node, Node) and node.name in readers and not _apart(node):
            saved.setdefault(_attached(node), node)
    rows = [[saved[n] for n in row] for row in _rows(forward, saved)]
    stacks = {}
    for row in rows:
        stacks[row[0]] = stack = _stack(forward, [_attached(n) for n in row])
        _read_rows(backward, [readers[n.name] for n in row], stack)
    gone = {n for row in rows for n in row[1:]}
    passed = [stacks.get(n, n) for n in results[returned:] if n not in gone]
    forward.graph.output_node().args = ((*results[:returned], *passed),)
    for row in rows:
        for node in row:
            _drop(node)
    for changed in (forward, backward):
        changed.recompile()


def _rows(forward: GraphModule, saved: dict[Node, Node]) -> list[list[Node]]:
    """The values of layers in a row that are saved, of each kind."""
    found = []
    for loop in layers.repetitions(forward):
        for position in loop.kept if loop.carried else ():
            row = [layer[position] for layer in loop.turns if layer[position] in saved]
            if len(row) >= layers.TURNS and len(layers.pieces(row, [loop])) == 1:
                found.append(row)
    return found


def _apart(node: Node) -> bool:
    """Whether AOTAutograd keeps a saved tensor apart from the others."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check"))


def _attached(node: Node) -> Node:
    """What a value is that was detached, perhaps long after its layer."""
    while node.target is _DETACH:
        (node,) = node.args  # type: ignore[assignment]
    return node


def _stack(forward: GraphModule, row: Sequence[Node]) -> Node:
    with forward.graph.inserting_before(forward.graph.output_node()):
        stack = forward.graph.call_function(torch.ops.aten.stack.default, (list(row),))
    stack.meta["val"] = torch.stack([n.meta["val"] for n in row])
    return stack


def _read_rows(backward: GraphModule, readers: Sequence[Node], stack: Node) -> None:
    """Have an argument of the backward in the first one's place, under the name of ``stack``, and rows of it instead
    of all."""
    graph = backward.graph
    with graph.inserting_before(readers[0]):
        argument = graph.placeholder(stack.name)
    argument.meta["val"] = stack.meta["val"]
    last = graph.find_nodes(op="placeholder")[-1]
    for k, reader in enumerate(readers):
        with graph.inserting_after(last):
            row = graph.call_function(torch.ops.aten.select.int, (argument, 0, k))
        row.meta = reader.meta
        reader.replace_all_uses_with(row)
        graph.erase_node(reader)


def _drop(node: Node) -> None:
    """Erase detached values that nobody reads."""
    while node.target is _DETACH and not node.users:
        (source,) = node.args
        node.graph.erase_node(node)
        node = source  # type: ignore[assignment]
