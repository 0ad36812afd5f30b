"""``tpu_compile.aot``: guards, bytecode and executables of a function, stored through torch's own ahead-of-time hooks.
A process that finds them goes from import to its first result without Dynamo, AOTAutograd, lowering or XLA.

torch pickles what it stores, so it stays in the user's own cache: it is never exported, imported or shared.
"""

from __future__ import annotations

import logging
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import PackageError, Unsupported, UserError
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

from tpu_compile import backend
from tpu_compile.cache import CacheKey, CacheStore, open_store
from tpu_compile.cache.store import AHEAD, tracing_store
from tpu_compile.config import override, scoped
from tpu_compile.errors import DeviceError, LoweringError, TpuCompileWarning
from tpu_compile.warm import autograd, identity, sources, start, structure, traced_code
from tpu_compile.warm.start import Start
from tpu_compile.warm.structure import NotKept

log = logging.getLogger("tpu_compile.warm")
_REFUSALS = (
    NotKept,
    traced_code.Unrecordable,
    PackageError,
    BypassAOTAutogradCache,
    LoweringError,
    Unsupported,
    UserError,
)
_DAMAGED = (
    *(pickle.PickleError, AttributeError, ImportError, EOFError, KeyError, IndexError, TypeError, ValueError),
    *(RuntimeError, DeviceError),
)


def aot(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> Ahead:
    """Compile a function or module for calls like ``model(*args, **kwargs)``, or take what an earlier process stored.

    Say it under the modes of the calls (``no_grad``, training, autocast). Nothing is run. A call that breaks a guard is
    compiled in the ordinary way, and so is what cannot be stored (a graph break, an operator of another package, ...);
    one warning says why.

    Args:
        dynamic, options: as of ``torch.compile``.

    Raises:
        ConfigError: an unknown option.
    """
    return Ahead(model, args, kwargs or {}, dynamic, options or {})


class Ahead:
    """What ``aot`` returns, called like the model.

    Attributes:
        name: of the function or module.
        found: an earlier process had stored it.
        stored: its key in the cache; empty if it is not there.
        why_not: why it is compiled at its first call instead; empty if it is compiled.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dynamic: bool | None,
        options: Mapping[str, Any],
    ) -> None:
        self.name, self.found, self.stored, self.why_not = structure.name(model), False, "", ""
        self._model, self._hooked = model, partial(structure.hooked, model)
        self._compile_anew = partial(torch.compile, model, backend="tpu", dynamic=dynamic, options=dict(options))
        self._anew: Callable[..., Any] | None = None
        self._start: Start | None = None
        self._first: tuple[Any, ...] = ()
        with override(**scoped(backend.check_options(options))):
            try:
                function, self._first = structure.unbound(model)
                self._start = self._prepared(function, (*self._first, *args), dict(kwargs), dynamic)
            except _REFUSALS as reason:
                self.why_not = str(reason)
                _say(f"{self.name} cannot be compiled ahead of time, so its first call compiles it: {reason}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ready = self._start
        if ready is not None:
            scope = ready.prepare_f_locals(*self._first, *args, **kwargs)
            if ready.holds(scope) and not self._hooked():
                return ready.fn(*self._first, *args, **kwargs)
            if self._anew is None:
                _say(f"{self.name} was compiled ahead for other calls, and is compiled anew: {_broken(ready, scope)}")
        if self._anew is None:
            self._anew = self._compile_anew()
        return self._anew(*args, **kwargs)

    def _prepared(
        self, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool | None
    ) -> Start:
        store = open_store()
        if store is None:
            return self._compiled(function, args, kwargs, dynamic, None)
        parts = {
            AHEAD: f"{function.__module__}.{function.__qualname__}",
            "function": identity.words(function),  # a module may hold several of one name: lambdas, inner functions
            "model": structure.describe(self._model),
            "arguments": structure.arguments(args[len(self._first) :], kwargs),
            "mode": structure.mode(),
            "dynamic": str(dynamic),
            **autograd.facts(one_graph=True),
        }
        place = _Place(tracing_store(store), CacheKey.of(self.name, parts))
        found = place.find(function, args, kwargs)
        self.found = found is not None
        ready = found or self._compiled(function, args, kwargs, dynamic, place)
        self.stored = place.key.digest if self.found or place.kept else ""
        return ready

    def _compiled(
        self,
        function: FunctionType,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic: bool | None,
        place: _Place | None,
    ) -> Start:
        began, guards = time.perf_counter(), identity.Guards()
        compiled = start.compile_function(function, (args, kwargs), backend.ahead(self.name), guards, dynamic)
        if guards.unspeakable:
            raise NotKept(f"no other process can check the guard {guards.unspeakable}")
        modules = start.modules(compiled) | traced_code.modules_of(guards.types | structure.types_of(self._model))
        notes = {
            "code": traced_code.digests(modules),
            "guards": guards.seen,
            "modules": identity.installed(guards.seen, function.__globals__),
        }
        payload = start.stored(compiled, function)
        ready = Start.restore(payload, function)
        odd = identity.broken(guards.seen, ready.prepare_f_locals(*args, **kwargs), function.__globals__)
        if odd:
            raise NotKept(f"no other process can check the guard {odd}")
        if place is not None:
            place.put(payload, notes, time.perf_counter() - began)
        return ready


class _Place:
    """Where one function is stored."""

    def __init__(self, store: CacheStore, key: CacheKey) -> None:
        self.store, self.key, self.kept = store, key, False

    def find(self, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Start | None:
        """What is stored, if it is sound and its guards hold for these arguments."""
        entry = self.store.get(self.key)
        if entry is None:
            return None
        try:
            module = traced_code.changed(entry.metadata["code"])
            if module:
                log.info("%s is compiled anew: the source of %s has changed", self.key.name, module)
                return None
            for name, module in entry.metadata["modules"].items():
                function.__globals__.setdefault(name, import_module(module))
            ready = Start.restore(entry.payload, function)
            scope = ready.prepare_f_locals(*args, **kwargs)
            reason = identity.broken(entry.metadata["guards"], scope, function.__globals__) or ready.why_not(scope)
        except _DAMAGED as fault:
            self.store.discard(self.key, f"it cannot be used: {type(fault).__name__}: {fault}")
            return None
        if reason:
            _say(f"{self.key.name} is compiled anew, since a guard of what was stored does not hold: {reason}")
            return None
        return ready

    def put(self, payload: bytes, notes: Mapping[str, Any], seconds: float) -> None:
        """Store it, unless a source file of ours has changed since this process read it."""
        if sources.unchanged():
            self.kept = self.store.put(self.key, payload, compile_seconds=seconds, metadata=notes, even_if_quick=True)


def _broken(ready: Start, scope: dict[str, Any]) -> str:
    return ready.why_not(scope) or "it has hooks"


def _say(message: str) -> None:
    warnings.warn(message, TpuCompileWarning, stacklevel=4)
