"""One digest for a graph: two graphs that share it lower to the same program.

It covers all that a rule can see: targets, arguments, what FakeTensor promises for each node, the contents of tensor
constants, subgraphs; symbols as the numbers they are bound to. Names, source lines and the order of keywords are left
out. What has no text of its own (an object, a function of the user's) has no fingerprint, and neither has its graph.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from tpu_compile.lowering.dtypes import to_numpy

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN_FUNCTIONS = frozenset({"_operator", "operator", "math", "builtins"})


class NoFingerprint(Exception):
    """Something in the graph decides its lowering and has no text that stands for it."""


@dataclass(frozen=True)
class Fingerprint:
    """``operators``: the names of all that the graph calls. ``tensors``: its constants, in the walk's order."""

    digest: str
    operators: frozenset[str]
    tensors: tuple[torch.Tensor, ...]


def fingerprint(graph_module: GraphModule, bindings: Mapping[Any, int]) -> Fingerprint:
    """The fingerprint of a functional aten graph, for one binding of its symbols.

    Raises:
        NoFingerprint: there is none.
    """
    writer = _Writer(bindings)
    text = writer.graph(graph_module)
    return Fingerprint(
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
        frozenset(writer.operators),
        tuple(writer.tensors),
    )


class _Writer:
    """Writes a graph down so that every difference shows. Strings are quoted: nothing in one looks like structure."""

    def __init__(self, bindings: Mapping[Any, int]) -> None:
        self.bindings = bindings
        self.operators: set[str] = set()
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[Node, int] = {}

    def graph(self, module: GraphModule) -> str:
        """One line a node, in order; a node is known by its number."""
        outer, self.numbers = self.numbers, {}
        try:
            lines = []
            for number, node in enumerate(module.graph.nodes):
                lines.append(self.node(module, node))
                self.numbers[node] = number
            return "{" + "\n".join(lines) + "}"
        finally:
            self.numbers = outer

    def node(self, module: GraphModule, node: Node) -> str:
        if node.meta.get("unbacked_bindings"):
            raise NoFingerprint(f"the shape or value of {node.target} depends on data")
        value = self.promise(node.meta.get("val"))
        if node.op == "placeholder":
            return f"placeholder:{value}"
        if node.op == "get_attr":
            return f"constant {self.constant(module, str(node.target))}:{value}"
        if node.op == "output":
            return f"output {self.text(node.args)}"
        if node.op == "call_function":
            return f"{self.operator(node.target)} {self.text(node.args)} {self.text(node.kwargs)}:{value}"
        raise NoFingerprint(f"{node.op} of {node.target}")

    # ---- what is called

    def operator(self, target: Any) -> str:
        """An operator by its name (the torch version decides what it is), those of other packages by their schema."""
        if isinstance(target, OpOverload):
            self.operators |= {str(target), target.name()}
            known = target.namespace in ("aten", "prims", "tpu_compile")
            return f"op:{target.name()}" if known else f"op:{target._schema}"
        if isinstance(target, (HigherOrderOperator, OpOverloadPacket)):
            self.operators.add(str(target))
            return f"{type(target).__name__}:{target}"
        module, name = getattr(target, "__module__", "") or "", getattr(target, "__qualname__", "")
        plain = module in _PLAIN_FUNCTIONS or module.partition(".")[0] == "torch"
        if plain and getattr(sys.modules.get(module), name, None) is target:
            return f"function:{module}.{name}"
        raise NoFingerprint(f"a call of {target}")

    # ---- what it is called with

    def text(self, value: Any) -> str:
        """An argument, with nodes as their numbers and symbols as what they are bound to."""
        write = _WRITERS.get(type(value))
        if write is not None:
            return write(self, value)
        for kind, write in _WRITERS.items():
            if isinstance(value, kind):
                return write(self, value)
        raise NoFingerprint(f"an argument of type {type(value).__name__}")

    def symbol(self, value: Any) -> str:
        expression = value.node.expr
        bound = expression.xreplace(self.bindings) if hasattr(expression, "xreplace") else expression
        return f"{type(value).__name__}({bound})"

    # ---- what comes out

    def promise(self, value: Any) -> str:
        """What FakeTensor says of a node's result."""
        if isinstance(value, torch.Tensor):
            return self.layout(value)
        if isinstance(value, (tuple, list)):
            return "[" + ",".join(map(self.promise, value)) + "]"
        return self.text(value)

    def layout(self, t: torch.Tensor) -> str:
        if t.layout is not torch.strided:
            raise NoFingerprint(f"a tensor of layout {t.layout}")
        numbers = (*t.shape, *t.stride(), t.storage_offset())
        if not all(type(n) is int for n in numbers):
            numbers = tuple(map(self.text, numbers))
        return f"{t.dtype}{t.device.type}{numbers}{'c' * t.is_conj()}{'n' * t.is_neg()}"

    # ---- constants

    def constant(self, module: Any, path: str) -> str:
        for name in path.split("."):
            module = getattr(module, name)
        if isinstance(module, GraphModule):
            return self.graph(module)
        if not isinstance(module, torch.Tensor) or isinstance(module, FakeTensor):
            raise NoFingerprint(f"an attribute of type {type(module).__name__}")
        return self.tensor(module)

    def tensor(self, t: torch.Tensor) -> str:
        """A tensor by its contents, and by its place among the graph's constants: one that is met twice is one
        argument of the program."""
        for place, known in enumerate(self.tensors):
            if known is t:
                return f"again {place}"
        self.tensors.append(t)
        contents = hashlib.sha256(to_numpy(t).tobytes()).hexdigest()
        return f"{self.layout(t)} {contents}"


def _sequence(opening: str, closing: str) -> Callable[[_Writer, Any], str]:
    return lambda writer, value: opening + ",".join(map(writer.text, value)) + closing


def _mapping(writer: _Writer, value: Mapping[Any, Any]) -> str:
    return "{" + ",".join(sorted(f"{writer.text(k)}={writer.text(v)}" for k, v in value.items())) + "}"


def _slice(writer: _Writer, value: slice) -> str:
    return f"slice{writer.text((value.start, value.stop, value.step))}"


_WRITERS: dict[type, Callable[[_Writer, Any], str]] = {
    Node: lambda writer, value: f"%{writer.numbers[value]}",
    type(None): lambda writer, value: "none",
    bool: lambda writer, value: f"bool:{value}",
    int: lambda writer, value: f"int:{value}",
    float: lambda writer, value: f"float:{value.hex()}",
    complex: lambda writer, value: f"complex:{value.real.hex()},{value.imag.hex()}",
    str: lambda writer, value: repr(value),
    type(...): lambda writer, value: "ellipsis",
    tuple: _sequence("(", ")"),
    list: _sequence("[", "]"),
    dict: _mapping,
    slice: _slice,
    **dict.fromkeys(_SYMBOLIC, _Writer.symbol),
    **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), lambda writer, value: f"torch:{value}"),
    torch.device: lambda writer, value: f"device:{value}",
    **dict.fromkeys((OpOverload, OpOverloadPacket, HigherOrderOperator), _Writer.operator),
}
