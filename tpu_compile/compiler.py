"""The one place that joins lowering, cache and runtime: a graph in, something callable out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from tpu_compile import dump
from tpu_compile.calling import CallPlan, Residency
from tpu_compile.config import config, override, scoped
from tpu_compile.errors import Gap, LoweringError, UnsupportedOp
from tpu_compile.executables import Compiled, cache_key, options_in_force, runtime
from tpu_compile.lowering import fx, torch_mlir
from tpu_compile.lowering.program import Program
from tpu_compile.stats import count, timed
from tpu_compile.targets.compiling import compile_for
from tpu_compile.warm import index

__all__ = [
    "Compiled",
    "CompiledGraph",
    "Deferred",
    "Lowering",
    "Outline",
    "Recorder",
    "cache_key",
    "compile_graph",
    "donates",
    "looked_at",
    "lower_graph",
    "note_break",
    "options_in_force",
    "outline",
    "record",
    "residency",
    "runtime",
]

log = logging.getLogger("tpu_compile")


@dataclass(frozen=True)
class Lowering:
    """One lowering of a graph, as a recorder sees it."""

    name: str
    graph: GraphModule
    compiled: Compiled
    bindings: Mapping[Any, int]


@dataclass
class Recorder:
    """Everything that was lowered and compiled while it was active (``record``), the ops that run on the CPU, and why
    Dynamo ended a graph before the function did."""

    lowerings: list[Lowering] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)


_recorder: ContextVar[Recorder | None] = ContextVar("tpu_compile_recorder", default=None)


@contextmanager
def record() -> Iterator[Recorder]:
    """Collect what is compiled inside the block."""
    recorder = Recorder()
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def note_break(reason: str) -> None:
    """Tell the recorder, if there is one, why a graph ended early."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.breaks.append(reason)


def lower_graph(
    graph_module: GraphModule,
    name: str,
    bindings: dict[Any, int] | None = None,
    family: str = "",
    donate: bool = False,
) -> Program:
    """Lower one graph, for the platform in force unless ``family`` names another, and count it. What it overwrites is
    donated if an argument is on a device, or with ``donate``."""
    with timed("lowering", name):
        donate = donate or donates(graph_module)
        if config.lowering == "torch-mlir":
            graph_module = torch_mlir.as_one_call(graph_module)
        program = fx.lower(graph_module, name, family=family or runtime.client.family, bindings=bindings, donate=donate)
    count("lowerings")
    count("nodes", len(graph_module.graph.nodes))
    for tier, ops in program.ops_per_tier:
        count(f"ops_{tier}", ops)
    return program


def donates(graph_module: GraphModule) -> bool:
    """Whether what the graph overwrites may be taken over: an argument is on a device."""
    return any(_on_device(n.meta.get("val")) for n in graph_module.graph.nodes if n.op == "placeholder")


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")


_Lowered = tuple[Program, Callable[[], Program] | None]
"""A program; where it was found in the cache, also what lowers it again."""


class CompiledGraph:
    """A graph ready to be called with AOTAutograd's flat (boxed) arguments. Symbolic sizes are bound at each call;
    every new binding is
    lowered and compiled once."""

    _only: Any
    """The plan of a graph without symbolic sizes, once it is made."""

    def __init__(
        self, graph_module: GraphModule, name: str, kept: frozenset[int] = frozenset(), *, lazy: bool = False
    ) -> None:
        """``lazy``: lower it now, and compile it when it is first called."""
        self._set_up(graph_module, outline(graph_module, name, kept), {})
        if not self.outline.sizes:
            self.programs[()] = self._lowered({})
            if not lazy:
                self._only = self._make((), {})

    @classmethod
    def restored(
        cls,
        outline: Outline,
        programs: Mapping[tuple[int, ...], Program],
        graph: Callable[[], GraphModule] | None,
        *,
        lazy: bool = False,
    ) -> CompiledGraph:
        """What another process made, without its tracing: ``programs`` by the numbers of its symbolic sizes, and
        ``graph``, which those with symbolic sizes need for others."""
        self = cls.__new__(cls)
        self._set_up(graph, outline, {sizes: (program, None) for sizes, program in programs.items()})
        if not outline.sizes and not lazy:
            self._only = self._make((), {})
        return self

    def _set_up(
        self,
        graph: GraphModule | Callable[[], GraphModule] | None,
        outline: Outline,
        programs: dict[tuple[int, ...], _Lowered],
    ) -> None:
        # on the instance: torch wraps us with functools.wraps, which copies no class attributes
        self._boxed_call = True
        self._graph, self.outline, self.programs = graph, outline, programs
        self.options, self._scope = options_in_force(), scoped({})
        self._lock = threading.Lock()
        self._plans: dict[tuple[int, ...], Any] = {}
        self._only = None
        self._read_sizes = [
            partial(_integer, position) if axis is None else partial(_size, position, axis)
            for position, axis in outline.sizes
        ]

    @property
    def graph_module(self) -> GraphModule:
        """The graph. One that was restored without symbolic sizes has none."""
        if not isinstance(self._graph, GraphModule):
            assert self._graph is not None, f"{self.outline.name} was restored from its program alone"
            self._graph = self._graph()
        return self._graph

    def __call__(self, arguments: list[Any]) -> list[Any]:
        plan = self._only or self._bound(arguments)
        try:
            return plan(arguments)  # type: ignore[no-any-return]
        finally:
            arguments.clear()

    def repeat(self, arguments: Sequence[Any], times: int) -> None:
        """Call it ``times`` times on arguments that stay, and throw its results away. Nothing else may exchange them or
        change their shapes meanwhile."""
        plan = self._only or self._bound(arguments)
        for turn in range(times):
            (plan.again if turn else plan)(arguments)

    def prepare(self, arguments: Sequence[Any]) -> None:
        """Lower and compile for the sizes of ``arguments``, unless that is done."""
        self._bound(arguments)

    def _bound(self, arguments: Sequence[Any]) -> Any:
        sizes = tuple([read(arguments) for read in self._read_sizes])
        plan = self._plans.get(sizes)
        if plan is None:
            with self._lock:
                plan = self._plans.get(sizes)
                if plan is None:
                    bindings = fx.bind(self.graph_module.graph, arguments) if sizes else {}
                    with override(**self._scope):
                        self._plans[sizes] = plan = self._make(sizes, bindings)
                    self._only = None if sizes else plan
        return plan

    def _make(self, sizes: tuple[int, ...], bindings: dict[Any, int]) -> Any:
        """What runs the graph for one binding: a CallPlan, or a ResidentPlan."""
        if sizes not in self.programs:
            self.programs[sizes] = self._lowered(bindings)
        (program, relower), name = self.programs[sizes], self.outline.name
        compiled = runtime.executable(program, self.options, relower)
        if config.target:
            compile_for(config.target, self._for_target(bindings), self.options)
        if config.log_compiles:
            log.warning("%s: %s from %s", name, ", ".join(map(str, program.inputs)), compiled.origin)
        if config.dump_to and self._graph is not None:
            dump.write(config.dump_to, self.graph_module, compiled)
        recorder = _recorder.get()
        if recorder is not None and self._graph is not None:
            recorder.lowerings.append(Lowering(name, self.graph_module, compiled, bindings))
        placed, kept = self.outline.resident, self.outline.kept
        if placed is not None:
            from tpu_compile.device.resident import ResidentPlan

            return ResidentPlan(program, compiled.executable, compiled.client, placed, kept)
        return CallPlan(program, compiled.executable, compiled.client, kept)

    def _for_target(self, bindings: dict[Any, int]) -> Program:
        """The graph's program on a TPU that holds its arguments."""
        return lower_graph(self.graph_module, self.outline.name, bindings, "tpu", donate=True)

    def _lowered(self, bindings: dict[Any, int]) -> _Lowered:
        """The graph's program, from the cache if it was lowered before; then also what lowers it again."""
        graph_module, name = self.graph_module, self.outline.name
        lower = partial(lower_graph, graph_module, name, bindings)
        if looked_at():
            return lower(), None
        family, donate = runtime.client.family, donates(graph_module)
        program, found = index.lowered(graph_module, name, lower, bindings=bindings, family=family, donate=donate)
        return program, lower if found else None


@dataclass(frozen=True)
class Outline:
    """What a call needs to know of a graph besides its programs.

    Attributes:
        name: for programs, errors and logs.
        kept: positions of arguments that are parameters; their import is kept between calls.
        sizes: what can vary: (position of an integer argument, None), or (position of a tensor, axis).
        resident: which arguments and results are `tpu` tensors; None if none are.
    """

    name: str
    kept: frozenset[int]
    sizes: tuple[tuple[int, int | None], ...]
    resident: Residency | None


def outline(graph_module: GraphModule, name: str, kept: frozenset[int]) -> Outline:
    """The outline of a graph."""
    return Outline(name, kept, tuple(_symbolic_sizes(graph_module)), residency(graph_module))


def looked_at() -> bool:
    """Whether somebody wants to see graphs and source lines as they are now (debug checks name them, a target has its
    own program of them): nothing is then taken from a cache that stands for tracing or lowering."""
    return _recorder.get() is not None or bool(config.dump_to) or config.debug_checks or bool(config.target)


def residency(graph_module: GraphModule) -> Residency | None:
    """Which arguments and results of a graph are `tpu` tensors; None if none are."""
    graph = graph_module.graph
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    (output,) = graph.find_nodes(op="output")
    outputs = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    resident = Residency(*(frozenset(i for i, n in enumerate(nodes) if _resident(n)) for nodes in (arguments, outputs)))
    return resident if resident.arguments or resident.results else None


def _resident(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.device.type == "tpu"


def _integer(position: int, arguments: Sequence[Any]) -> int:
    return int(arguments[position])


def _size(position: int, axis: int, arguments: Sequence[Any]) -> int:
    return int(arguments[position].shape[axis])


def _symbolic_sizes(graph_module: GraphModule) -> Iterator[tuple[int, int | None]]:
    """See ``Outline.sizes``."""
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    for position, node in enumerate(placeholders):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            yield position, None
        elif isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    yield position, axis


class Deferred:
    """A graph that could not be lowered ahead of its first call, which may never come."""

    def __init__(self, compile_now: Callable[[], Callable[[list[Any]], list[Any]]]) -> None:
        self._boxed_call = True
        self._compile, self._scope = compile_now, scoped({})
        self._compiled: Callable[[list[Any]], list[Any]] | None = None

    def __call__(self, arguments: list[Any]) -> list[Any]:
        if self._compiled is None:
            with override(**self._scope):
                self._compiled = self._compile()
        return self._compiled(arguments)


def compile_graph(
    graph_module: GraphModule,
    name: str,
    *,
    kept: frozenset[int] = frozenset(),
    one_graph: bool = False,
    lazy: bool = False,
) -> Any:
    """Make a functional aten graph callable.

    Ops without a rule split it: the parts between them are compiled, they run on the CPU, and the user is told once.

    Args:
        graph_module: functional aten ops with FakeTensor metadata.
        name: for the program, errors, and the cache file.
        kept: positions of arguments that are parameters; their import is kept between calls.
        one_graph: the user said fullgraph=True; what nothing lowers is an error.
        lazy: lower it now and compile it at its first call. What goes wrong with it waits until then too.

    Raises:
        UnsupportedOp: under ``one_graph``, with every gap.
    """
    if lazy:
        try:
            compiled = CompiledGraph(graph_module, name, kept, lazy=True)
        except LoweringError:
            return Deferred(partial(compile_graph, graph_module, name, kept=kept, one_graph=one_graph))
        count("graphs")
        return compiled
    count("graphs")
    try:
        return CompiledGraph(graph_module, name, kept)
    except UnsupportedOp as error:
        if one_graph or config.lowering != "native":  # a second opinion that eager gave would be none
            raise
        from tpu_compile.splitting import SplitGraph

        split = SplitGraph(graph_module, name, error)
        recorder = _recorder.get()
        if recorder is not None:
            recorder.gaps.extend(split.gaps)
        return split
