"""Tier 3, and the option ``lowering="torch-mlir"``: graphs through torch-mlir, a second lowering independent of ours.

torch-mlir can abort its process, so it runs in a worker: one child, started at the first request, asked in JSON,
started again after it died. Its answer is StableHLO text, cleaned and parsed into the program as a private function.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import operator
import re
import selectors
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from torch.fx import GraphModule, Node

from tpu_compile.errors import MissingDependency
from tpu_compile.lowering import hlo, numbers
from tpu_compile.lowering.context import LoweringContext, Refusal, source_line
from tpu_compile.lowering.jnp import merge
from tpu_compile.lowering.program import TensorSpec

SECONDS = 120.0
"""How long one request may take; a worker that is silent for longer is killed."""

_ALLOWED = ("func.", "stablehlo.", "chlo.", "builtin.")


def installed() -> bool:
    """Whether torch-mlir is there to be asked."""
    return importlib.util.find_spec("torch_mlir") is not None


# ---- the worker, seen from here


COMMAND = (sys.executable, "-c", "from tpu_compile.lowering.torch_mlir_worker import main; main()")


class Worker:
    """The child process and the requests to it, one at a time. There is one: ``worker``."""

    def __init__(self, seconds: float = SECONDS, command: Sequence[str] = COMMAND) -> None:
        self.seconds, self._command = seconds, command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    def ask(self, request: str) -> str:
        """StableHLO text for a request. Raises Refusal: torch-mlir said no, died, or kept silent."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            said = self._log.seek(0, 2)
            try:
                process.stdin.write(request.encode() + b"\n")
                process.stdin.flush()
                answer = self._line(process)
            except BrokenPipeError:
                answer = b""
            if not answer:
                raise Refusal(f"torch-mlir {self._end(process, said)}")
            reply = json.loads(answer)
            if "error" in reply:
                raise Refusal(f"torch-mlir cannot lower it: {self._complaint(said) or reply['error']}")
            return str(reply["text"])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as the child writes to it
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
            )
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        """The answer, or nothing: at the end of the child's output, or when it is late."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return process.stdout.readline() if selector.select(self.seconds) else b""

    def _end(self, process: subprocess.Popen[bytes], said: int) -> str:
        """Make an end of the child; what became of it, in words."""
        try:
            status: int | None = process.wait(1)
        except subprocess.TimeoutExpired:
            status = None
        complaint = self._complaint(said)
        self.stop()
        if status is None:
            return f"gave no answer in {self.seconds:g} s"
        return f"died with status {status}: {complaint or 'no message'}"

    def _complaint(self, said: int) -> str:
        """The first error that the child has written since place ``said`` of its log: MLIR's diagnostics go there."""
        self._log.seek(said)
        lines = self._log.read().decode(errors="replace").splitlines()
        return next((line.strip()[:400] for line in lines if "error:" in line.lower()), "")

    def stop(self) -> None:
        """Kill the child, if there is one, and close its pipes."""
        if self._process is None:
            return
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
        self._process = None


worker = Worker()
atexit.register(worker.stop)


@functools.lru_cache(maxsize=1024)
def stablehlo_text(request: str) -> str:
    """The cleaned module for a request. Raises Refusal."""
    text = worker.ask(request)
    return re.sub(r"\barith\.constant (dense<)", r"stablehlo.constant \1", text)


# ---- requests


def encode(value: Any, name: Callable[[Any], Any]) -> Any:
    """An argument as JSON; ``name`` says what to write for a tensor (a node or a value), and None for anything else."""
    known = name(value)
    if known is not None:
        return known
    if isinstance(value, (list, tuple)):
        return [encode(v, name) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"torch": "device"}
    raise Refusal(f"torch-mlir is not asked about arguments of type {type(value).__name__}")


def spec_of(shape: Sequence[int], dtype: torch.dtype) -> list[Any]:
    """A tensor's spec as JSON."""
    return [list(shape), str(dtype).removeprefix("torch.")]


def one_op(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, list[ir.Value]]:
    """(request, operands) of a single op on values and Python arguments."""
    operands: list[ir.Value] = []

    def name(value: Any) -> Any:
        if not hlo.is_value(value):
            return None
        operands.append(value)
        return {"node": f"x{len(operands) - 1}"}

    written = encode(list(args), name), {k: encode(v, name) for k, v in kwargs.items()}
    inputs = {f"x{i}": spec_of(hlo.shape(v), hlo.dtype(v)) for i, v in enumerate(operands)}
    nodes = [["result", str(op), *written]]
    return json.dumps({"inputs": inputs, "nodes": nodes, "results": ["result"]}), operands


def whole_graph(graph_module: GraphModule, results: Sequence[str], number: Callable[[Any], Any]) -> str:
    """The request for a functional graph, of which ``results`` are wanted. ``number`` binds symbolic sizes."""

    def name(value: Any) -> Any:
        if isinstance(value, numbers.SYMBOLIC):
            return number(value)
        if not isinstance(value, Node):
            return None
        known = value.meta.get("val")
        return number(known) if isinstance(known, numbers.SYMBOLIC) else {"node": value.name}

    inputs, nodes = {}, []
    for node in graph_module.graph.nodes:
        operand = _operand(graph_module, node)
        if operand is not None:
            inputs[node.name] = spec_of([number(s) for s in operand.shape], operand.dtype)
        elif node.op == "call_function" and not _keeps(node):
            kwargs = {k: encode(v, name) for k, v in node.kwargs.items()}
            nodes.append([node.name, _target(node), encode(list(node.args), name), kwargs])
    return json.dumps({"inputs": inputs, "nodes": nodes, "results": list(results)})


def _target(node: Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        raise Refusal(f"torch-mlir does not know {node.target}{_line(node)}")
    return str(node.target)


def located(refusal: Refusal, graph_module: GraphModule) -> Refusal:
    """The same refusal with the user's line of the op that it names, if it names one."""
    named = re.search(r"torch\.(aten\.\w+)", refusal.reason)
    nodes = graph_module.graph.nodes if named else ()
    found = next((n for n in nodes if named and str(n.target).startswith(named[1] + ".")), None)
    return Refusal(refusal.reason + _line(found)) if found is not None else refusal


def _line(node: Node) -> str:
    line = source_line(node.stack_trace) if node.stack_trace else None
    return f", at {line}" if line else ""


# ---- whole graphs


class GraphCall:
    """Stands in a graph for all ops of another one, that torch-mlir lowers together; it is never run."""

    __name__ = __qualname__ = "graph_call"

    def __call__(self, graph_module: GraphModule, results: Sequence[str], *operands: Any) -> Any:
        raise AssertionError("a graph_call is lowered, not run")

    def __str__(self) -> str:
        return "the graph"


graph_call = GraphCall()


def as_one_call(graph_module: GraphModule) -> GraphModule:
    """The same graph with all its ops behind one ``graph_call``: arguments, results, numbers and writes stay in place.

    Raises MissingDependency without torch-mlir.
    """
    if not installed():
        raise MissingDependency("torch-mlir", 'options={"lowering": "torch-mlir"}', "torch-mlir")
    wanted = _wanted(graph_module)
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    operands = [n for n in graph_module.graph.nodes if _operand(graph_module, n) is not None]
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" or node in operands:
            copies[node] = graph.node_copy(node)
    inner = graph.get_attr("torch_mlir_graph")
    names = [n.name for n in wanted]
    call = graph.call_function(graph_call, (inner, names, *(copies[n] for n in operands)))
    call.meta["val"] = tuple(n.meta["val"] for n in wanted)
    for index, node in enumerate(wanted):
        copies[node] = graph.call_function(operator.getitem, (call, index))
        copies[node].meta["val"] = node.meta["val"]
    for node in graph_module.graph.nodes:
        if _keeps(node):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    attributes = {str(n.target): getattr(graph_module, str(n.target)) for n in operands if n.op == "get_attr"}
    return GraphModule({"torch_mlir_graph": graph_module, **attributes}, graph)


def _keeps(node: Node) -> bool:
    """Nodes that stay outside of the call: writes into arguments, numbers from sizes, the end."""
    number = node.op == "call_function" and not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
    return node.op == "output" or node.target is torch.ops.aten.copy_.default or number


def _operand(graph_module: GraphModule, node: Node) -> torch.Tensor | None:
    """The tensor that an argument or constant of the graph is, fake or real."""
    value = node.meta.get("val")
    if node.op == "get_attr" and value is None:
        value = getattr(graph_module, str(node.target), None)
    return value if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor) else None


def _wanted(graph_module: GraphModule) -> list[Node]:
    """Tensors that the ops compute and that are used outside of them."""
    used = [i for n in graph_module.graph.nodes if _keeps(n) for i in n.all_input_nodes]
    computed = (n for n in dict.fromkeys(used) if n.op == "call_function" and not _keeps(n))
    return [n for n in computed if isinstance(n.meta.get("val"), torch.Tensor)]


# ---- into the program


def call(
    ctx: LoweringContext, request: str, operands: Sequence[ir.Value], specs: Sequence[TensorSpec]
) -> list[ir.Value]:
    """Call torch-mlir's function for a request; its results must be what FakeTensor promises."""
    if request not in ctx.functions:
        ctx.functions[request] = _merged(ctx, stablehlo_text(request))
    name, types = ctx.functions[request]
    wanted = [hlo.tensor_type(spec.shape, spec.dtype) for spec in specs]
    if list(types) != wanted:
        raise Refusal(f"torch-mlir gives {', '.join(map(str, types))} for {', '.join(map(str, wanted))}")
    return list(func.CallOp(types, ir.FlatSymbolRefAttr.get(name), list(operands)).results)


def _merged(ctx: LoweringContext, text: str) -> tuple[str, list[ir.Type]]:
    try:
        foreign = _foreign(ir.Module.parse(text))
    except ir.MLIRError as error:
        raise Refusal(f"torch-mlir's module does not parse: {str(error).splitlines()[0]}") from None
    if foreign:
        raise Refusal(f"torch-mlir leaves {', '.join(foreign)} in the module")
    return merge(ctx, text, "torch_mlir")


def _foreign(module: ir.Module) -> list[str]:
    """Names of operations that XLA would not take."""
    names: dict[str, None] = {}

    def look(op: Any) -> Any:
        if not op.name.startswith(_ALLOWED):
            names[op.name] = None
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return list(names)
