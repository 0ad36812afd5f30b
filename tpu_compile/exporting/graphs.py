"""A graph with symbolic sizes as JSON, and as a graph again once the sizes are numbers.

Operators are written by name and looked up among those that have a rule; nothing else can be called. A node keeps what
FakeTensor says of it, with sizes as expressions, and the user's line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from tpu_compile.errors import ExportError
from tpu_compile.exporting import expressions
from tpu_compile.lowering.gaps import ASSERTIONS
from tpu_compile.lowering.random import keyed_ops, rng_key
from tpu_compile.lowering.registry import registry

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float)
_NAMED: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


@dataclass
class _Writer:
    """Writes one graph. ``constants`` gathers the tensors it holds, of its subgraphs too."""

    graph_module: GraphModule
    names: Mapping[str, str]
    constants: list[torch.Tensor]
    source_lines: bool
    places: dict[Node, int] = field(default_factory=dict)

    def record(self) -> list[Any]:
        nodes = []
        for place, node in enumerate(self.graph_module.graph.nodes):
            nodes.append(self.node(node))
            self.places[node] = place
        return nodes

    def node(self, node: Node) -> dict[str, Any]:
        written: dict[str, Any] = {"name": node.name, "line": (node.stack_trace or "") if self.source_lines else ""}
        value = node.meta.get("val")
        if node.op == "output":
            return {"op": "output", "args": self.argument(node.args[0])}
        if node.op == "placeholder":
            return {**written, "op": "placeholder", "val": self.value(value)}
        if node.op == "get_attr":
            return {**written, **self.attribute(node)}
        if isinstance(value, _NUMBERS):
            return {**written, "op": "number", "val": self.number(value)}
        return {
            **written,
            "op": "call",
            "target": _dump_target(node.target),
            "args": [self.argument(a) for a in node.args],
            "kwargs": {k: self.argument(v) for k, v in node.kwargs.items()},
            "val": self.value(value),
        }

    def attribute(self, node: Node) -> dict[str, Any]:
        held: Any = self.graph_module
        for name in str(node.target).split("."):
            held = getattr(held, name)
        if isinstance(held, GraphModule):
            return {"op": "graph", "nodes": _Writer(held, self.names, self.constants, self.source_lines).record()}
        self.constants.append(held)
        return {"op": "constant", "index": len(self.constants) - 1}

    def value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            sizes = [list(map(self.number, ns)) for ns in (value.shape, value.stride(), (value.storage_offset(),))]
            return {"tensor": [str(value.dtype).removeprefix("torch."), value.device.type, *sizes]}
        if isinstance(value, (tuple, list)):
            return [self.value(v) for v in value]
        return {"number": self.number(value)} if isinstance(value, _NUMBERS) else None

    def number(self, value: Any) -> expressions.Expression:
        return expressions.dump(value, self.names)

    def argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return {"node": self.places[value]}
        if isinstance(value, (list, tuple)):
            return [self.argument(v) for v in value]
        if isinstance(value, (float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return {"number": self.number(value)}
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, complex):
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, slice):
            return {"slice": [self.argument(v) for v in (value.start, value.stop, value.step)]}
        if type(value) in _NAMED:
            return {_NAMED[type(value)]: str(value).removeprefix("torch.")}
        raise ExportError(f"an operator's argument of type {type(value).__name__} cannot be written to a file")


def dump(
    graph_module: GraphModule, names: Mapping[str, str], *, source_lines: bool = True
) -> tuple[list[Any], list[torch.Tensor]]:
    """A graph of aten ops as JSON, and the tensor constants that it refers to by number. ``names``: of symbols.

    Raises:
        ExportError: it holds what a file cannot describe.
    """
    constants: list[torch.Tensor] = []
    return _Writer(graph_module, names, constants, source_lines).record(), constants


def _dump_target(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if target is operator.getitem:
        return "getitem"
    raise ExportError(f"a call of {target} cannot be written to a file")


@dataclass
class _Reader:
    """Builds one graph for one binding of the sizes."""

    bindings: Mapping[str, int]
    constants: list[torch.Tensor]
    mode: FakeTensorMode
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    graph: Graph = field(default_factory=Graph)
    made: list[Any] = field(default_factory=list)

    def build(self, nodes: list[Any]) -> GraphModule:
        for entry in nodes:
            self.made.append(self.node(entry))
        return GraphModule(self.root, self.graph)

    def node(self, entry: Mapping[str, Any]) -> Any:
        op = entry["op"]
        if op == "output":
            return self.graph.output(_tuple(self.argument(entry["args"])))
        if op == "number":
            return expressions.value(entry["val"], self.bindings)
        if op == "placeholder":
            node = self.graph.placeholder(str(entry["name"]))
        elif op in ("graph", "constant"):
            return self.held(entry)
        else:
            args = tuple(map(self.argument, entry["args"]))
            node = self.graph.call_function(
                _targets()[entry["target"]], args, {k: self.argument(v) for k, v in entry["kwargs"].items()}
            )
        node.meta.update(val=self.value(entry["val"]), stack_trace=str(entry["line"]) or None)
        return node

    def held(self, entry: Mapping[str, Any]) -> Node:
        name = f"held_{len(self.made)}"
        if entry["op"] == "graph":
            held: Any = _Reader(self.bindings, self.constants, self.mode).build(entry["nodes"])
        else:
            held = self.constants[entry["index"]]
        setattr(self.root, name, held)
        node = self.graph.get_attr(name)
        if isinstance(held, torch.Tensor):
            node.meta["val"] = self.mode.from_tensor(held)
        return node

    def value(self, written: Any) -> Any:
        if isinstance(written, list):
            return tuple(map(self.value, written))
        if written is None:
            return None
        ((kind, content),) = written.items()
        if kind == "number":
            return expressions.value(content, self.bindings)
        dtype, device, *sizes = content
        shape, stride, (offset,) = ([expressions.size(n, self.bindings) for n in ns] for ns in sizes)
        return self.fake(_torch(dtype, torch.dtype), device, shape, stride, offset)

    def fake(self, dtype: torch.dtype, device: str, shape: list[int], stride: list[int], offset: int) -> torch.Tensor:
        with self.mode:
            if not offset:
                return torch.empty_strided(shape, stride, dtype=dtype, device=torch.device(device))
            extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            return torch.empty(extent, dtype=dtype, device=torch.device(device)).as_strided(shape, stride, offset)

    def argument(self, written: Any) -> Any:
        if isinstance(written, list):
            return [self.argument(v) for v in written]
        if not isinstance(written, dict):
            return written
        ((kind, content),) = written.items()
        if kind == "node":
            return self.made[content]
        if kind == "number":
            return expressions.value(content, self.bindings)
        if kind == "slice":
            return slice(*map(self.argument, content))
        return _ATOMS[kind](content)


_ATOMS: dict[str, Callable[[Any], Any]] = {
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "device": torch.device,
    "dtype": lambda name: _torch(name, torch.dtype),
    "layout": lambda name: _torch(name, torch.layout),
    "memory_format": lambda name: _torch(name, torch.memory_format),
}


def _torch(name: str, kind: type) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, kind):
        raise ValueError(f"{name} is no {kind.__name__}")
    return found


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def load(nodes: list[Any], constants: list[torch.Tensor], bindings: Mapping[str, int]) -> GraphModule:
    """The graph for one binding of its sizes.

    Raises:
        KeyError, ValueError, TypeError, IndexError, AttributeError: it is not what ``dump`` gives.
    """
    return _Reader(bindings, constants, FakeTensorMode()).build(nodes)


@lru_cache(maxsize=1)
def _targets() -> dict[str, Any]:
    """What a file may call, by name: what has a rule, keys of random ops, getitem, and checks that compute nothing."""
    keyed_ops()  # registers the operators
    known = [op for op in (*registry, rng_key, *ASSERTIONS) if isinstance(op, (OpOverload, HigherOrderOperator))]
    named = {_dump_target(op): op for op in known}
    return {**named, "getitem": operator.getitem}
