"""The one place that joins lowering, cache and runtime: a graph in, something callable out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from tpu_compile import dump
from tpu_compile.cache import open_store
from tpu_compile.cache.key import CacheKey
from tpu_compile.cache.store import CacheStore
from tpu_compile.calling import CallPlan, Residency
from tpu_compile.config import config
from tpu_compile.errors import CacheError, DeviceError, Gap, UnsupportedOp
from tpu_compile.lowering import fx
from tpu_compile.lowering.program import Program
from tpu_compile.runtime import CompileOptions, open_client
from tpu_compile.stats import count, timed

log = logging.getLogger("tpu_compile")


class Runtime:
    """The process's executables in memory. There is one: ``runtime``."""

    def __init__(self) -> None:
        self._executables: dict[Any, Compiled] = {}
        self._locks: dict[Any, threading.Lock] = {}

    @property
    def client(self) -> Any:
        """The PJRT client of the platform in force."""
        return open_client(config.platform, config.plugin_options)

    def executable(self, program: Program, options: CompileOptions) -> Compiled:
        """Load or compile a program: memory, then disk, then XLA. Threads wait only for the program they want."""
        client = self.client
        key = (program.digest, options, id(client))
        with self._locks.setdefault(key, threading.Lock()):
            found = self._executables.get(key)
            if found is not None:
                count("memory_hits")
                return Compiled(program, found.executable, found.key, client, "memory")
            self._executables[key] = result = _load_or_compile(program, options, client)
            return result

    def forget(self) -> None:
        """Drop the executables held in memory (those in use stay alive with their users)."""
        self._executables.clear()


runtime = Runtime()


@dataclass(frozen=True)
class Compiled:
    """A program with its executable. ``origin`` says where that came from: "memory", "disk" or "xla"."""

    program: Program
    executable: Any
    key: CacheKey
    client: Any
    origin: str


def options_in_force() -> CompileOptions:
    """The knobs that decide what XLA produces."""
    return CompileOptions(
        excess_precision=config.excess_precision,
        xla_options=tuple(sorted(config.xla_options.items())),
        optimization_level=config.optimization_level,
    )


def cache_key(program: Program, options: CompileOptions, client: Any) -> CacheKey:
    """The program and everything else that decides the binary, part by part."""
    parts = {
        "program": program.digest,
        "arguments": ";".join(map(str, program.inputs)),
        "results": ";".join(map(str, program.outputs)),
        **client.key_parts(options),
    }
    return CacheKey.of(program.name, parts)


def _load_or_compile(program: Program, options: CompileOptions, client: Any) -> Compiled:
    if program.ffi_handlers:
        from tpu_compile.runtime import ffi

        ffi.register(program.ffi_handlers)
    key = cache_key(program, options, client)
    store = open_store()
    if store is None:
        return Compiled(program, _compile(program, options, client), key, client, "xla")
    entry = store.get(key)
    loaded = entry and _load(program, options, client, store, key, entry.payload)
    if loaded:
        return Compiled(program, loaded, key, client, "disk")
    if config.explain_cache_misses:
        _explain(store, key, program)
    with store.compiling(key) as late:
        loaded = late and _load(program, options, client, store, key, late.payload)
        if loaded:
            return Compiled(program, loaded, key, client, "disk")
        start = time.perf_counter()
        executable = _compile(program, options, client)
        seconds = time.perf_counter() - start
        if seconds >= config.cache_min_compile_seconds:
            _store(store, key, executable, seconds, program)
    return Compiled(program, executable, key, client, "xla")


def _store(store: CacheStore, key: CacheKey, executable: Any, seconds: float, program: Program) -> None:
    with timed("cache", program.name):
        try:
            payload = executable.serialize()
        except DeviceError as error:
            log.warning("%s cannot be kept in the cache: %s", program.name, error)
            return
        store.put(key, payload, compile_seconds=seconds, metadata=_metadata(program))


def _metadata(program: Program) -> dict[str, Any]:
    """What an entry says about its program: for people, and for ``explain``, to whom two digests say nothing."""
    return {
        "arguments": list(map(str, program.inputs)),
        "results": list(map(str, program.outputs)),
        "ops": " ".join(f"{name.removesuffix('.default')}={number}" for name, number in program.ops),
    }


def _explain(store: CacheStore, key: CacheKey, program: Program) -> None:
    from tpu_compile.cache.explain import explain_miss

    reason = explain_miss(store, key, _metadata(program))
    if reason:
        log.warning("cache miss of %s: %s", key.name, reason)


def _load(
    program: Program, options: CompileOptions, client: Any, store: CacheStore, key: CacheKey, payload: bytes
) -> Any:
    """The stored executable, or None if this machine's runtime refuses it."""
    with timed("load", program.name):
        try:
            return client.load(payload, program.name, options)
        except DeviceError as error:
            store.discard(key, f"the runtime refuses it: {error}")
            if config.raise_cache_errors:
                raise CacheError(str(error)) from error
            return None


def _compile(program: Program, options: CompileOptions, client: Any) -> Any:
    with timed("xla", program.name):
        executable = client.compile(program.bytecode, program.name, options)
    count("xla_compiles")
    return executable


# ---- graphs


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
        donate = donate or any(_on_device(n.meta.get("val")) for n in graph_module.graph.nodes if n.op == "placeholder")
        program = fx.lower(graph_module, name, family=family or runtime.client.family, bindings=bindings, donate=donate)
    count("lowerings")
    count("nodes", len(graph_module.graph.nodes))
    for tier, ops in program.ops_per_tier:
        count(f"ops_{tier}", ops)
    return program


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")


class CompiledGraph:
    """A graph ready to be called with AOTAutograd's flat (boxed) arguments. Symbolic sizes are bound at each call;
    every new binding is
    lowered and compiled once."""

    def __init__(self, graph_module: GraphModule, name: str, kept: frozenset[int] = frozenset()) -> None:
        self._boxed_call = (
            True  # on the instance: torch wraps us with functools.wraps, which copies no class attributes
        )
        self.graph_module, self.name, self._kept = graph_module, name, kept
        self._options = options_in_force()
        self._lock = threading.Lock()
        self._plans: dict[tuple[int, ...], Any] = {}
        self._read_sizes = _size_reader(graph_module)
        if not self._read_sizes:
            self._only: CallPlan | None = self._make(None)
        else:
            self._only = None

    def __call__(self, arguments: list[Any]) -> list[Any]:
        plan = self._only or self._bound(arguments)
        try:
            return plan(arguments)
        finally:
            arguments.clear()

    def _bound(self, arguments: Sequence[Any]) -> CallPlan:
        sizes = tuple([read(arguments) for read in self._read_sizes])
        plan = self._plans.get(sizes)
        if plan is None:
            with self._lock:
                plan = self._plans.get(sizes) or self._make(fx.bind(self.graph_module.graph, arguments))
                self._plans[sizes] = plan
        return plan

    def _make(self, bindings: dict[Any, int] | None) -> CallPlan:
        program = lower_graph(self.graph_module, self.name, bindings)
        compiled = runtime.executable(program, self._options)
        if config.log_compiles:
            log.warning("%s: %s from %s", self.name, ", ".join(map(str, program.inputs)), compiled.origin)
        if config.dump_to:
            dump.write(config.dump_to, self.graph_module, compiled)
        recorder = _recorder.get()
        if recorder is not None:
            recorder.lowerings.append(Lowering(self.name, self.graph_module, compiled, bindings or {}))
        placed = residency(self.graph_module)
        if placed is not None:
            from tpu_compile.device.resident import ResidentPlan

            return ResidentPlan(program, compiled.executable, compiled.client, placed)
        return CallPlan(program, compiled.executable, compiled.client, self._kept)


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


def _size_reader(graph_module: GraphModule) -> list[Callable[[Sequence[Any]], int]]:
    """One reader for each argument that can vary: an integer argument, or an axis of symbolic size."""
    readers: list[Callable[[Sequence[Any]], int]] = []
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    for position, node in enumerate(placeholders):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            readers.append(partial(_integer, position))
        elif isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    readers.append(partial(_size, position, axis))
    return readers


def compile_graph(
    graph_module: GraphModule, name: str, *, kept: frozenset[int] = frozenset(), one_graph: bool = False
) -> Any:
    """Make a functional aten graph callable.

    Ops without a rule split it: the parts between them are compiled, they run on the CPU, and the user is told once.

    Args:
        graph_module: functional aten ops with FakeTensor metadata.
        name: for the program, errors, and the cache file.
        kept: positions of arguments that are parameters; their import is kept between calls.
        one_graph: the user said fullgraph=True; what nothing lowers is an error.

    Raises:
        UnsupportedOp: under ``one_graph``, with every gap.
    """
    count("graphs")
    try:
        return CompiledGraph(graph_module, name, kept)
    except UnsupportedOp as error:
        if one_graph:
            raise
        from tpu_compile.splitting import SplitGraph

        split = SplitGraph(graph_module, name, error)
        recorder = _recorder.get()
        if recorder is not None:
            recorder.gaps.extend(split.gaps)
        return split
