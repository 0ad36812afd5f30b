"""Compiling for a TPU that is not there, each program once: what libtpu said is kept in the cache on disk, also that a
program does not fit."""

from __future__ import annotations

import hashlib
import json
import struct
import time
import zlib
from dataclasses import asdict
from typing import Any

from tpu_compile.cache import open_store
from tpu_compile.cache.key import CacheKey
from tpu_compile.cache.store import CacheStore
from tpu_compile.errors import OutOfMemory
from tpu_compile.executables import Compiled, cache_key
from tpu_compile.lowering.program import Program
from tpu_compile.runtime import CompileOptions
from tpu_compile.runtime.executable import MemoryAnalysis
from tpu_compile.runtime.topology import CompileOnlyExecutable, Topology, topology
from tpu_compile.stats import count, timed

_LENGTHS = struct.Struct("<QQ")
"""Of the JSON and of the compressed text; the executable is the rest."""


def compile_for(target: str, program: Program, options: CompileOptions) -> Compiled:
    """A program compiled for a slice such as ``v5e:2x2``, from the cache if it was before.

    Raises:
        ConfigError: there is no such slice.
        OutOfMemory: the chip does not hold it; ``needed`` and ``available`` are bytes.
        CompilationFailed: XLA rejected it.
    """
    chips = topology(target)
    key = cache_key(program, options, chips)
    stored, store = _with_lines(key, program), open_store()
    entry = store.get(stored) if store else None
    if entry is None and store:
        with store.compiling(stored) as entry:
            if entry is None:
                return Compiled(program, _fresh(chips, program, options, store, stored), key, chips, "xla")
    if entry is None:
        return Compiled(program, _fresh(chips, program, options), key, chips, "xla")
    with timed("load", program.name):
        return Compiled(program, unpack(program.name, entry.payload), key, chips, "disk")


def _fresh(
    chips: Topology,
    program: Program,
    options: CompileOptions,
    store: CacheStore | None = None,
    stored: CacheKey | None = None,
) -> CompileOnlyExecutable:
    start = time.perf_counter()
    payload, found = _compile(chips, program, options)
    if store and stored:
        store.put(stored, payload, compile_seconds=time.perf_counter() - start, metadata={})
    if isinstance(found, OutOfMemory):
        raise found
    return found


def _with_lines(key: CacheKey, program: Program) -> CacheKey:
    """The text names the user's lines, which a key for running leaves out: code that moved is compiled anew."""
    return CacheKey.of(key.name, {**dict(key.parts), "lines": hashlib.sha256(program.bytecode).hexdigest()})


def _compile(
    chips: Topology, program: Program, options: CompileOptions
) -> tuple[bytes, CompileOnlyExecutable | OutOfMemory]:
    try:
        with timed("xla", f"{program.name} for {chips.name}"):
            made = chips.compile(program.bytecode, program.name, options)
    except OutOfMemory as error:
        if not error.needed:  # the compiler itself ran out: nothing that another try must repeat
            raise
        said = {"message": str(error), "needed": error.needed, "available": error.available}
        return _pack({"does_not_fit": said}, b"", b""), error
    count("xla_compiles")
    return pack(made), made


def pack(made: CompileOnlyExecutable) -> bytes:
    """An executable with everything known about it, as bytes."""
    return _pack({"cost": dict(made.cost), "memory": asdict(made.memory)}, made.text.encode(), made.blob)


def _pack(described: dict[str, Any], text: bytes, blob: bytes) -> bytes:
    head, squeezed = json.dumps(described).encode(), zlib.compress(text, 3)
    return _LENGTHS.pack(len(head), len(squeezed)) + head + squeezed + blob


def unpack(name: str, payload: bytes) -> CompileOnlyExecutable:
    """The executable that ``pack`` made bytes of.

    Raises:
        OutOfMemory: it was found not to fit.
    """
    head_size, text_size = _LENGTHS.unpack_from(payload)
    at = _LENGTHS.size
    described = json.loads(payload[at : at + head_size])
    if said := described.get("does_not_fit"):
        raise OutOfMemory(said["message"], needed=said["needed"], available=said["available"])
    text = zlib.decompress(payload[at + head_size : at + head_size + text_size]).decode()
    memory = MemoryAnalysis(**described["memory"])
    return CompileOnlyExecutable(name, text, described["cost"], memory, payload[at + head_size + text_size :])
