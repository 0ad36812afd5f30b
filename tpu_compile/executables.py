"""Programs as executables: in memory, on disk, or from XLA. Each is loaded or compiled once in a process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpu_compile.cache import open_store
from tpu_compile.cache.key import CacheKey
from tpu_compile.cache.store import CacheStore
from tpu_compile.config import config
from tpu_compile.errors import CacheError, DeviceError
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

    def executable(
        self, program: Program, options: CompileOptions, relower: Callable[[], Program] | None = None
    ) -> Compiled:
        """Load or compile a program: memory, then disk, then XLA. Threads wait only for the program they want.

        ``relower``: makes the program anew, with the source lines of today, where XLA has to see it.
        """
        client = self.client
        key = (program.digest, options, id(client))
        with self._locks.setdefault(key, threading.Lock()):
            found = self._executables.get(key)
            if found is not None:
                count("memory_hits")
                return Compiled(program, found.executable, found.key, client, "memory")
            self._executables[key] = result = _load_or_compile(program, options, client, relower)
            return result

    def adopt(self, program: Program, options: CompileOptions, digest: str, payload: bytes) -> None:
        """Take an executable that came with its program, if it is what this process would have compiled."""
        client = self.client
        if cache_key(program, options, client).digest != digest:
            return
        key = (program.digest, options, id(client))
        with self._locks.setdefault(key, threading.Lock()), timed("load", program.name):
            if key not in self._executables:
                _register_handlers(program)
                loaded = client.load(payload, program.name, options)
                cached = Compiled(program, loaded, cache_key(program, options, client), client, "disk")
                self._executables[key] = cached

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


def _load_or_compile(
    program: Program, options: CompileOptions, client: Any, relower: Callable[[], Program] | None = None
) -> Compiled:
    _register_handlers(program)
    key = cache_key(program, options, client)
    store = open_store()
    if store is None:
        return Compiled(program, _compile(program, options, client, relower), key, client, "xla")
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
        executable = _compile(program, options, client, relower)
        seconds = time.perf_counter() - start
        if seconds >= config.cache_min_compile_seconds:
            _store(store, key, executable, seconds, program)
    return Compiled(program, executable, key, client, "xla")


def _register_handlers(program: Program) -> None:
    if program.ffi_handlers:
        from tpu_compile.runtime import ffi

        ffi.register(program.ffi_handlers)


def _store(store: CacheStore, key: CacheKey, executable: Any, seconds: float, program: Program) -> None:
    with timed("cache", program.name):
        try:
            payload = executable.serialize()
        except DeviceError as error:
            log.warning("%s cannot be kept in the cache: %s", program.name, error)
            return
        store.put(key, payload, compile_seconds=seconds, metadata=metadata(program))


def metadata(program: Program) -> dict[str, Any]:
    """What an entry says about its program: for people, and for ``explain``, to whom two digests say nothing."""
    return {
        "arguments": list(map(str, program.inputs)),
        "results": list(map(str, program.outputs)),
        "ops": " ".join(f"{name.removesuffix('.default')}={number}" for name, number in program.ops),
    }


def _explain(store: CacheStore, key: CacheKey, program: Program) -> None:
    from tpu_compile.cache.explain import explain_miss

    reason = explain_miss(store, key, metadata(program))
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


def _compile(program: Program, options: CompileOptions, client: Any, relower: Callable[[], Program] | None) -> Any:
    if relower is not None:
        fresh = relower()
        assert fresh.digest == program.digest, f"{program.name} was found under a fingerprint that is not its own"
        program = fresh
    with timed("xla", program.name):
        executable = client.compile(program.bytecode, program.name, options)
    count("xla_compiles")
    return executable
