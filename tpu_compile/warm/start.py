"""torch's own ahead-of-time hooks: a function compiled without being called, and the same function in another process.

Both are private to torch 2.13; tests name what is used of them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch._dynamo.aot_compile import AOTCompiledFunction, aot_compile_fullgraph
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.hooks import Hooks
from torch._dynamo.package import SourceInfo, load_guard_manager, load_guards_state

Filter = Callable[[Sequence[Any]], list[bool]]


class Start(AOTCompiledFunction):
    """A stored function, in the globals of the one it was compiled from: what changes there, its guards see.

    torch's own class copies the globals.
    """

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        artifacts, env = self._artifacts, self._artifacts.runtime_env
        artifacts.check_compatibility()
        live = self._extra_globals
        assert live is not None, "restore gives them"
        for alias, module in env.import_sources.items():
            live.setdefault(alias, import_module(module))
        for name, value in env.used_globals.items():
            live.setdefault(name, value)
        live[artifacts.backend_id] = artifacts.compiled_fn
        function = types.FunctionType(env.bytecode, live, closure=env.closure, argdefs=env.argdefs)
        function.__kwdefaults__ = env.kwdefaults
        self.fn = function
        state = load_guards_state(artifacts.guards_state)
        artifacts.guard_manager = load_guard_manager(state, artifacts.original_code, live)

    @classmethod
    def restore(cls, payload: bytes, f_globals: dict[str, object]) -> Start:
        """What ``stored`` gave. Raises whatever pickle does."""
        start = cls.deserialize(payload, f_globals)
        assert isinstance(start, cls)
        return start

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


def stored(compiled: AOTCompiledFunction) -> bytes:
    """A compiled function as torch pickles it, without the text of the modules it was traced from."""
    compiled._artifacts.source_info = SourceInfo(inlined_sources=set())
    return AOTCompiledFunction.serialize(compiled).serialized_data
