"""torch's own ahead-of-time hooks: a function compiled without being called, and the same function in another process.

Both are private to torch 2.13; tests name what is used of them.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch._dynamo.aot_compile import AOTCompiledFunction, aot_compile_fullgraph
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.hooks import Hooks
from torch._dynamo.package import SourceInfo, load_guard_manager, load_guards_state

Filter = Callable[[Sequence[Any]], list[bool]]
_OF_DYNAMO = re.compile(r"^__|_\d+_c\d+$")
"""Names that Dynamo puts among a function's globals."""


class Start(AOTCompiledFunction):
    """A stored function, among the globals, the closure and the defaults of the one that it was compiled from as it is
    now: what changes there, its guards see. torch's own class has copies of them.
    """

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        self._artifacts.check_compatibility()

    @classmethod
    def restore(cls, payload: bytes, function: types.FunctionType) -> Start:
        """What ``stored`` gave, for the same function. Raises whatever pickle does."""
        start = cls.deserialize(payload)
        assert isinstance(start, cls)
        start._attach(function)
        return start

    def _attach(self, function: types.FunctionType) -> None:
        artifacts, live = self._artifacts, function.__globals__
        env = replace(
            artifacts.runtime_env,
            closure=function.__closure__,
            argdefs=function.__defaults__,
            kwdefaults=function.__kwdefaults__,
        )
        artifacts.runtime_env, artifacts.signature = env, inspect.signature(function, follow_wrapped=False)
        for alias, module in env.import_sources.items():
            live.setdefault(alias, import_module(module))
        for name, value in env.used_globals.items():
            live.setdefault(name, value)
        live[artifacts.backend_id] = artifacts.compiled_fn
        self.fn = types.FunctionType(env.bytecode, live, closure=env.closure, argdefs=env.argdefs)
        self.fn.__kwdefaults__ = env.kwdefaults
        state = load_guards_state(artifacts.guards_state)
        artifacts.guard_manager = load_guard_manager(state, artifacts.original_code, live)

    def holds(self, scope: dict[str, Any]) -> bool:
        """Whether every guard holds."""
        return bool(self._guards.check(scope))

    def why_not(self, scope: dict[str, Any]) -> str:
        """The first guard that does not hold, as its expression; empty if all do."""
        if self.holds(scope):
            return ""
        info = self._guards.check_verbose(scope)
        parts = [str(part).partition("  #")[0].strip() for part in info.verbose_code_parts]
        return " and ".join(parts)

    @property
    def _guards(self) -> Any:
        return self._artifacts.guard_manager


def compile_function(
    function: types.FunctionType,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    backend: Any,
    keep: Filter,
    dynamic: bool | None,
) -> AOTCompiledFunction:
    """Trace and compile a function for calls like one with ``arguments``, in one graph and without calling it."""
    with compile_lock:  # as an ordinary compile does
        return aot_compile_fullgraph(function, arguments, Hooks(guard_filter_fn=keep), backend, dynamic)


def modules(compiled: AOTCompiledFunction) -> set[str]:
    """The modules of all functions that were traced."""
    return {source.module for source in compiled.source_info().inlined_sources}


def stored(compiled: AOTCompiledFunction, function: types.FunctionType) -> bytes:
    """A compiled function as torch pickles it, without what ``Start`` takes from ``function`` and without the text of
    the modules that it was traced from."""
    artifacts = compiled._artifacts
    env = artifacts.runtime_env
    users = {name for name in function.__globals__ if not _OF_DYNAMO.search(name)}
    added = {name: value for name, value in env.used_globals.items() if name not in users}
    artifacts.runtime_env = replace(env, used_globals=added, closure=None, argdefs=None, kwdefaults=None)
    artifacts.signature = inspect.Signature()
    artifacts.source_info = SourceInfo(inlined_sources=set())
    return AOTCompiledFunction.serialize(compiled).serialized_data
