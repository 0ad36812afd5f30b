"""``options={"async_compile": True}``: a graph runs eagerly, op by op, until a thread has compiled it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any

import torch
import torch._dynamo
from torch._ops import OpOverload
from torch.fx import GraphModule

from tpu_compile.compiler import CompiledGraph
from tpu_compile.stats import count

log = logging.getLogger(__name__)
_WORKERS = 2
_NOTE = (
    "It was compiled in the background (async_compile): calls before ran eagerly, each one from here on raises this. "
    "torch._dynamo.config.suppress_errors = True lets them go on eagerly."
)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_WORKERS, "tpu_compile-async")


def runs_eagerly(graph_module: GraphModule) -> bool:
    """Whether torch can run every op. Draws are functions of a key that only a program takes: a graph that draws waits
    for its executable, so that its numbers are those that every later call follows."""
    inner = [m for m in graph_module.modules() if isinstance(m, GraphModule)]
    targets = [n.target for m in inner for n in m.graph.nodes if n.op == "call_function"]
    return not any(isinstance(t, OpOverload) and t.namespace == "tpu_compile" for t in targets)


class WhenReady:
    """A graph with its executable to come: one for each set of sizes, if they are symbolic.

    What goes wrong while it compiles is raised by every later call, as by a backend that Dynamo waits for; where that
    is told to ``suppress_errors``, the graph runs eagerly for good, and a warning says so once.
    """

    def __init__(self, graph_module: GraphModule, make: Callable[[], Any]) -> None:
        self._boxed_call = True
        self._graph, self._make = graph_module, make
        self._compiling = _threads().submit(copy_context().run, make)
        values = [n.meta.get("val") for n in graph_module.graph.find_nodes(op="placeholder")]
        symbolic = any(isinstance(v, torch.SymInt) or getattr(v, "_has_symbolic_sizes_strides", False) for v in values)
        self._ready: dict[Any, Future[Any]] | None = {} if symbolic else None
        self._failed: dict[Future[Any], TracebackType | None] = {}

    def __call__(self, arguments: list[Any]) -> list[Any]:
        job = self._job(arguments)
        if job.done():
            error = job.exception()
            if error is None:
                return job.result()(arguments)  # type: ignore[no-any-return]
            self._raise(job, error)
        count("eager_calls")
        with torch.no_grad():
            results = list(self._graph(*arguments))
        arguments.clear()
        return results

    def _raise(self, job: Future[Any], error: BaseException) -> None:
        first = job not in self._failed
        traceback = self._failed.setdefault(job, error.__traceback__)  # each raise would make a longer one of the last
        if not torch._dynamo.config.suppress_errors:
            if first:
                error.add_note(_NOTE)
            raise error.with_traceback(traceback)
        if first:
            log.warning("A graph runs eagerly for good: it could not be compiled in the background: %s", error)

    def _job(self, arguments: list[Any]) -> Future[Any]:
        if self._ready is None or not self._compiling.done() or self._compiling.exception() is not None:
            return self._compiling
        compiled = self._compiling.result()
        if not isinstance(compiled, CompiledGraph):  # it was split: its parts compile when they are met
            return self._compiling
        sizes = tuple([a.shape if isinstance(a, torch.Tensor) else a for a in arguments])
        if sizes not in self._ready:
            self._ready[sizes] = _threads().submit(copy_context().run, _prepared, compiled, list(arguments))
        return self._ready[sizes]


def _prepared(compiled: CompiledGraph, arguments: list[Any]) -> CompiledGraph:
    compiled.prepare(arguments)
    return compiled
