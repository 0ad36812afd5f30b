"""Layers that repeat in a graph of Dynamo's become torch's ``scan`` before AOTAutograd sees them, so that it, too, has
one layer to trace, to differentiate and to partition.

What this leaves as it is (layers that draw random numbers or write to their arguments, sizes that are symbols) is a
loop of the lowered program nonetheless: ``lowering/layers.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_compile.config import config
from tpu_compile.lowering import layers
from tpu_compile.lowering.layers import Loop, value

_SCAN = torch.ops.higher_order.scan


def fold_layers(graph_module: GraphModule) -> None:
    """Rewrite a graph of torch functions in place, with ``scan_layers``. Its nodes carry what Dynamo knows of their
    values."""
    if not config.scan_layers or config.debug_checks:
        return
    loops = [loop for loop in layers.find(graph_module) if _of_tensors(loop) and _is_pure(loop)]
    for number, loop in enumerate(loops):
        _fold(graph_module, loop, f"scanned_layer_{number}")
    if loops:
        graph_module.recompile()


# ---- may it be a scan?


def _of_tensors(loop: Loop) -> bool:
    """Whether tensors of known sizes alone come in, something is handed on as it came, and of the last layer nothing
    else is read."""
    into = [*loop.initial, *loop.shared, *(n for nodes in loop.each for n in nodes)]
    carried = [value(loop.turns[0][q]) for q in loop.carried]
    return (
        bool(carried)
        and all(_is_fixed(value(n)) for n in into)
        and all(_same(value(first), v) for first, v in zip(loop.initial, carried, strict=True))
        and set(loop.last) <= set(loop.carried)
    )


def _is_fixed(v: Any) -> bool:
    """Whether a value is a tensor of known sizes."""
    return isinstance(v, FakeTensor) and all(type(n) is int for n in (*v.shape, *v.stride()))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def _is_pure(loop: Loop) -> bool:
    """Whether a layer only computes new results: it changes no state of torch, writes nothing, draws nothing, and hands
    out no memory twice, for somebody to write to later."""
    nodes = [n for n in loop.body.graph.nodes if n.op.startswith("call_")]
    if any(not n.users or isinstance(n.target, HigherOrderOperator) for n in nodes):
        return False
    fakes = [n.meta["val"] for n in loop.body.graph.find_nodes(op="placeholder")]
    with torch.no_grad(), fakes[0].fake_mode, _Watch() as seen:  # type: ignore[no-untyped-call]
        loop.body.recompile()
        try:
            results = loop.body(*fakes)
        except (RuntimeError, NotImplementedError):  # a value decides how it goes on
            return False
    made = {q: _memory(t) for q, t in zip((*loop.carried, *loop.kept), results, strict=False)}
    return bool(seen.pure) and len({*made.values(), *map(_memory, fakes)}) == len(made) + len({*map(_memory, fakes)})


def _memory(t: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(t.untyped_storage())


class _Watch(TorchDispatchMode):
    pure = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable or _draws(func, args):
            self.pure = False
        return func(*args, **(kwargs or {}))


def _draws(op: Any, args: Sequence[Any]) -> bool:
    """Whether a call draws numbers; those of attention do if they drop something out."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    parameters = op._schema.arguments
    return all(a.name != "dropout_p" or bool(args[i : i + 1] and args[i]) for i, a in enumerate(parameters))


# ---- making it one


def _fold(graph_module: GraphModule, loop: Loop, name: str) -> None:
    graph, after, said = graph_module.graph, loop.turns[-1][-1].next, loop.turns[0][0].meta
    graph_module.add_submodule(name, _body(loop))
    with graph.inserting_before(after):
        first = [graph.call_method("contiguous", (n,)) for n in loop.initial]
        rows = [graph.call_function(torch.stack, (list(nodes),)) for nodes in loop.each]
        scan = graph.call_function(_SCAN, (graph.get_attr(name), first, rows, tuple(loop.shared)))
        handed = {q: graph.call_function(operator.getitem, (scan, i)) for i, q in enumerate(loop.carried)}
        ys = range(len(first), len(first) + len(loop.kept))
        kept = [graph.call_function(operator.getitem, (scan, i)) for i in ys]
        for node in (*first, *rows, scan):
            node.meta = {key: said[key] for key in ("stack_trace", "nn_module_stack") if key in said}
        inside = {n for layer in loop.turns for n in layer}
        for q in loop.last:
            _replace(loop.turns[-1][q], handed[q], inside)
        for q, stacked in zip(loop.kept, kept, strict=True):
            for k, layer in enumerate(loop.turns):
                if any(user not in inside for user in layer[q].users):
                    _replace(layer[q], graph.call_function(torch.select, (stacked, 0, k)), inside)
    for layer in reversed(loop.turns):
        for node in reversed(layer):
            graph.erase_node(node)


def _replace(node: Node, by: Node, inside: set[Node]) -> None:
    by.meta = dict(node.meta)
    node.replace_all_uses_with(by, delete_user_cb=lambda user: user not in inside)


def _body(loop: Loop) -> GraphModule:
    """A layer as ``scan`` wants it: no result is a view of an argument or of another one."""
    graph = loop.body.graph
    output = graph.output_node()
    wanted: Sequence[Any] = output.args[0][: len(loop.carried) + len(loop.kept)]  # type: ignore[index,assignment]
    kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with graph.inserting_before(output):
        output.args = (tuple([graph.call_method("clone", (n,), kwargs) for n in wanted]),)
    loop.body.recompile()
    return loop.body
