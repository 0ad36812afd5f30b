"""How ``trace`` asks Dynamo and AOTAutograd for the graph of a computation without running it, and runs it later.

A function is compiled by ``torch.compile`` with a backend of ours. Its first call ends, by an exception, where the
graph would run: Dynamo has then made all that surrounds the graph (guards, nested results, writes to buffers). A later
call comes to the same place and finds what is to run there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from tpu_compile import capture
from tpu_compile.errors import BadCall, LoweringError, TpuCompileError
from tpu_compile.lowering import fx
from tpu_compile.lowering.random import functionalize_random

Run = Callable[[list[Any]], list[Any]]
_running: ContextVar[Run | None] = ContextVar("tpu_compile_running", default=None)
"""What stands in for a traced function's graph, during one call of it."""


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Let traced functions that are called inside the block run ``run`` in place of their graph."""
    token = _running.set(run)
    try:
        yield
    finally:
        _running.reset(token)


@dataclass(frozen=True)
class Tracing:
    """A captured computation.

    Attributes:
        graph: functional aten ops with FakeTensor metadata; parameters and buffers are arguments.
        bindings: the traced call's numbers for the graph's symbols.
        kept: positions of arguments that stay the same memory from call to call.
        function: what to call inside ``running``.
    """

    graph: GraphModule
    name: str
    bindings: Mapping[Any, int]
    kept: frozenset[int]
    function: Callable[..., Any]


def capture_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracing:
    """The graph of ``fn(*args, **kwargs)`` under ``no_grad``. See ``stages.trace``."""
    backend = _Backend()
    function = torch.compile(_fresh_copy(fn), backend=backend.compile, fullgraph=True)
    bindings: Mapping[Any, int] = {}
    try:
        with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            function(*args, **kwargs)
    except _Captured as captured:
        bindings = captured.bindings
    if backend.graph is None:
        raise LoweringError(f"{_name(fn)} runs no tensor operation: there is nothing to compile.")
    return Tracing(backend.graph, backend.name, bindings, backend.kept, function)


def callable_and_arguments(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """``fn`` as something to call, and the arguments to trace it with."""
    if isinstance(fn, (str, Path)):
        fn = torch.export.load(fn)
    if isinstance(fn, torch.export.ExportedProgram):
        if not args and not kwargs:
            args, kwargs = fn.example_inputs or ((), {})
        args, kwargs = _mark_dynamic(fn, args, kwargs)
        return fn.module(), args, kwargs
    return getattr(fn, "_orig_mod", fn), args, kwargs


def _mark_dynamic(
    exported: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with the sizes marked that are symbolic in an exported program."""
    inputs = exported.graph_signature.user_inputs
    symbolic = [n.meta.get("val") for n in exported.graph.find_nodes(op="placeholder") if n.name in inputs]
    flat, tree = pytree.tree_flatten((args, kwargs))
    if len(flat) != len(symbolic):
        raise BadCall(f"the exported program takes {len(symbolic)} arguments, got {len(flat)}", "INVALID_ARGUMENT")
    marked = pytree.tree_unflatten(list(map(_marked, symbolic, flat)), tree)
    return marked  # type: ignore[no-any-return]


def _marked(symbolic: Any, given: Any) -> Any:
    if not isinstance(symbolic, torch.Tensor):
        return given
    axes = [i for i, size in enumerate(symbolic.shape) if isinstance(size, torch.SymInt)]
    if not axes:
        return given
    ours = given.detach()  # a tensor of our own to mark
    torch._dynamo.maybe_mark_dynamic(ours, axes)
    return ours


def _fresh_copy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``fn``, with code of its own: Dynamo counts its recompiles by code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    name = _name(fn)
    code = call.__code__.replace(co_name=name.rpartition(".")[2], co_qualname=name)
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def _name(fn: Callable[..., Any]) -> str:
    if isinstance(fn, torch.nn.Module):
        return f"{type(fn).__name__}.forward"
    return getattr(fn, "__qualname__", type(fn).__name__)


class _Captured(Exception):
    """Ends the call that traced: Dynamo has the function's frame, we have its graph, and nothing ran."""

    def __init__(self, bindings: dict[Any, int]) -> None:
        super().__init__()
        self.bindings = bindings


class NotAsTraced(BadCall):
    """Dynamo would trace anew: the call's arguments, or state that the function reads, have changed."""


class _Backend:
    """The Dynamo backend of one traced function."""

    def __init__(self) -> None:
        self.graph: GraphModule | None = None
        self.name = "graph"
        self.kept: frozenset[int] = frozenset()

    def compile(self, graph_module: GraphModule, example_inputs: Any) -> Any:
        if self.graph is not None:
            raise capture.through_dynamo(NotAsTraced(self.name))
        self.name = capture.frame_name()
        try:
            return capture.aot_graphs(graph_module, example_inputs, self._keep)
        except TpuCompileError as error:
            raise capture.through_dynamo(error)  # noqa: B904 -- the same error

    def _keep(self, graph: GraphModule, kind: str) -> Any:
        if kind != "inference":
            raise LoweringError(
                f"{self.name} asks for gradients inside; trace() takes inference only: use torch.compile."
            )
        functionalize_random(graph)
        self.graph, self.kept = graph, capture.static_arguments(graph.graph, kind)

        def stand_in(arguments: list[Any]) -> list[Any]:
            run = _running.get()
            if run is None:
                raise _Captured(fx.bind(graph.graph, arguments))
            return run(arguments)

        stand_in._boxed_call = True  # type: ignore[attr-defined]
        return stand_in
