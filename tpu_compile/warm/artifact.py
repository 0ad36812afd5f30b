"""A compiled graph as torch keeps it: AOTAutograd's cache and Dynamo's ahead-of-time artifacts pickle what they are
given, and this is what they are given.

The state is plain data: the program as a record with its bytecode, since the executable may be gone when it is needed;
a graph with symbolic sizes as torch's GraphPickler writes it; for an ahead-of-time artifact the executables too. Such
files are code, as all pickles are: they never leave the user's own cache but by the user's own hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.output_code import OutputCode
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from tpu_compile import compiler
from tpu_compile.compiler import CompiledGraph, Outline
from tpu_compile.errors import CacheError, DeviceError
from tpu_compile.lowering import dtypes
from tpu_compile.lowering.program import Program
from tpu_compile.views import Replayed
from tpu_compile.warm import record, sources

State = dict[str, Any]

swallowed: ContextVar[CacheError | None] = ContextVar("tpu_compile_swallowed", default=None)
"""The cache fault that the user asked to see and that torch's cache, which takes any error for a miss, keeps back."""


def ahead_of_time() -> bool:
    """Whether Dynamo compiles for an artifact of its own: then the executables go along, the backward's included."""
    return bool(functorch_config.bypass_autograd_cache_key)


class GraphCode(OutputCode):
    """What a compile gave, callable; without it and with its state when it is pickled."""

    def __init__(self, compiled: Callable[[list[Any]], list[Any]]) -> None:
        self._boxed_call = True  # on the instance, see CompiledGraph
        self.compiled: Callable[[list[Any]], list[Any]] | None = compiled
        self.state: State = {}

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.compiled(inputs)  # type: ignore[misc, arg-type]

    def prepare_for_serialization(self) -> None:
        """Exchange the compiled graph for its state. torch calls it on a copy.

        Raises:
            BypassAOTAutogradCache: it has none.
        """
        compiled, tail = self.compiled, None
        if isinstance(compiled, Replayed):
            compiled, tail = compiled.compiled, compiled.tail
        if not isinstance(compiled, CompiledGraph):
            raise BypassAOTAutogradCache("a graph with ops that run on the CPU is compiled anew in every process")
        try:
            self.state = {**dump(compiled), "tail": None if tail is None else _graph(tail)}
        except record.NotRecordable as reason:
            raise BypassAOTAutogradCache(str(reason)) from reason
        self.compiled = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Mapping[str, Any]) -> None:
        """Become callable in another process."""
        if self.compiled is None:
            try:
                with _disable_current_modes():  # the constants are real
                    compiled = restore(self.state, lazy=bool(graph_kwargs.get("is_backward")))
                tail = self.state["tail"]
                self.compiled = compiled if tail is None else Replayed(compiled, _runnable(_load_graph(tail)))
            except CacheError as fault:
                swallowed.set(fault)
                raise
            self.state = {}

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There is none."""


def dump(compiled: CompiledGraph) -> State:
    """All that ``restore`` needs.

    Raises:
        NotRecordable: something in it cannot be written down, or a rule of the user's has lowered it.
    """
    graph = compiled.graph_module
    foreign = sources.foreign_rules()
    used = {name for program, _ in compiled.programs.values() for name, _ in program.ops} & foreign
    if used:
        raise record.NotRecordable(f"{', '.join(sorted(used))} has a rule of the user's")
    if compiled.outline.sizes and foreign:
        raise record.NotRecordable("a graph with symbolic sizes may meet a rule of the user's later")
    return {
        "outline": compiled.outline,
        "family": compiler.runtime.client.family,
        "programs": {sizes: _program(program) for sizes, (program, _) in compiled.programs.items()},
        "executables": _executables(compiled) if ahead_of_time() else [],
        "graph": _graph(graph) if compiled.outline.sizes else None,
    }


def restore(state: State, *, lazy: bool) -> CompiledGraph:
    """The compiled graph that ``dump`` was given. ``lazy``: its executable is loaded at the first call.

    Raises:
        DeviceError: it was made for another kind of device.
    """
    family = compiler.runtime.client.family
    if state["family"] != family:
        raise DeviceError(f"it was compiled for {state['family']}, and this is {family}", "FAILED_PRECONDITION")
    outline: Outline = state["outline"]
    programs = {sizes: _load_program(saved, outline.name) for sizes, saved in state["programs"].items()}
    for sizes, digest, payload in state["executables"]:
        compiler.runtime.adopt(programs[sizes], compiler.options_in_force(), digest, payload)
    graph = state["graph"]
    return CompiledGraph.restored(outline, programs, (lambda: _load_graph(graph)) if graph else None, lazy=lazy)


def _program(program: Program) -> State:
    return {
        "record": record.dump(program, program.constants),
        "bytecode": program.bytecode,
        "constants": [_constant(t) for t in program.constants],
    }


def _load_program(saved: State, name: str) -> Program:
    return record.load(saved["record"], name, saved["bytecode"], [_load_constant(*c) for c in saved["constants"]])


def _constant(t: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return t.dtype, tuple(t.shape), dtypes.to_numpy(t).tobytes()


def _load_constant(dtype: torch.dtype, shape: tuple[int, ...], contents: bytes) -> torch.Tensor:
    flat = torch.from_numpy(np.frombuffer(bytearray(contents), dtype=np.uint8))
    return flat.view(dtype).reshape(shape) if contents else torch.empty(shape, dtype=dtype, device="cpu")


def _executables(compiled: CompiledGraph) -> list[tuple[tuple[int, ...], str, bytes]]:
    """The sizes, cache key and serialized form of each executable of the graph."""
    made = ((sizes, compiler.runtime.executable(p, compiled.options)) for sizes, (p, _) in compiled.programs.items())
    return [(sizes, found.key.digest, found.executable.serialize()) for sizes, found in made]


_OF_NODES = frozenset({"val", "stack_trace", "unbacked_bindings", "argument"})
"""What a lowering reads of a node's metadata."""


def _graph(graph: GraphModule) -> bytes:
    from torch.fx._graph_pickler import GraphPickler, Options

    try:
        return GraphPickler.dumps(graph, Options(ops_filter=None, node_metadata_key_filter=_OF_NODES.__contains__))
    except Exception as error:  # whatever an object raises that cannot be pickled: it ends in a bypass that says so
        raise record.NotRecordable(f"its graph cannot be pickled: {error}") from error


def _runnable(graph: GraphModule) -> GraphModule:
    graph.recompile()
    return graph


def _load_graph(pickled: bytes) -> GraphModule:
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from tpu_compile.lowering.random import keyed_ops

    keyed_ops()  # the graph may call them
    graph = GraphPickler.loads(pickled, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(graph, GraphModule), type(graph)
    return graph
