"""The process that runs torch-mlir: reads requests, a line of JSON each, and writes answers the same way.

    {"inputs": {name: [shape, dtype]}, "nodes": [[name, op, args, kwargs]], "results": [name]}
    {"text": StableHLO} or {"error": why not}

Only JSON comes in and goes out. An abort in native code ends this process, and nothing else.
"""

from __future__ import annotations

import json
import operator
import os
import re
import sys
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx


def resolve(target: str) -> Any:
    """``aten.add.Tensor`` as the operator."""
    if target == "getitem":
        return operator.getitem
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def decode(argument: Any, nodes: dict[str, Node]) -> Any:
    """An argument from JSON."""
    if isinstance(argument, list):
        return [decode(a, nodes) for a in argument]
    if not isinstance(argument, dict):
        return argument
    if "node" in argument:
        return nodes[argument["node"]]
    return torch.device("cpu") if argument["torch"] == "device" else getattr(torch, argument["torch"])


def build(request: dict[str, Any]) -> GraphModule:
    """The graph of a request."""
    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in request["inputs"]}
    for name, target, args, kwargs in request["nodes"]:
        written = {k: decode(v, nodes) for k, v in kwargs.items()}
        nodes[name] = graph.call_function(resolve(target), tuple(decode(args, nodes)), written)
    graph.output(tuple(nodes[name] for name in request["results"]))
    return GraphModule({}, graph)


def flat(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def stablehlo_text(request: dict[str, Any]) -> str:
    """Import the graph, taken apart by torch's core decompositions, and by others for what torch-mlir does not know;
    and lower it."""
    from torch_mlir.fx import OutputType, _module_lowering

    table: dict[Any, Any] = dict(core_aten_decompositions())
    module = imported(request, table)
    while further := unknown(str(module)) - table.keys():
        table.update((op, decomposition_table[op]) for op in further)
        module = imported(request, table)
    return str(_module_lowering(False, False, OutputType.get("stablehlo"), module))


def imported(request: dict[str, Any], table: dict[Any, Any]) -> Any:
    """The graph of a request as a module of torch-mlir's own dialect."""
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.extras.fx_importer import FxImporter

    graph = build(request)
    with FakeTensorMode():
        given = [(shape, getattr(torch, dtype)) for shape, dtype in request["inputs"].values()]
        inputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in given]
        traced = make_fx(lambda *xs: flat(graph(*xs)), decomposition_table=table)(*inputs)
    context = ir.Context()
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context)
    importer.import_stateless_graph(traced.graph)
    return importer.module


def unknown(text: str) -> set[Any]:
    """Operators that the dialect has no operation for, and that torch knows how to take apart."""
    names = set(re.findall(r'torch\.operator "torch\.(\w+\.\w+)', text))
    packets = [resolve(name) for name in names]
    overloads = {getattr(packet, overload) for packet in packets for overload in packet.overloads()}
    return overloads & decomposition_table.keys()


def answer(line: str) -> dict[str, str]:
    """The reply to one request; whatever torch-mlir raises is a reason."""
    try:
        return {"text": stablehlo_text(json.loads(line))}
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        return {"error": f"{type(error).__name__}: {reason}"[:400]}


def main() -> None:
    """Serve until the parent closes our input. Native code that prints writes to stderr, not among the answers."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            out.write(json.dumps(answer(line)) + "\n")
            out.flush()
