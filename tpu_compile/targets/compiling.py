"""Compiling for a TPU that is not there, each program once: what libtpu said is kept in the cache on disk, also that a
program does not fit."""

from __future__ import annotations

import hashlib
import json
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from tpu_compile.cache import open_store
from tpu_compile.cache.key import CacheKey
from tpu_compile.errors import OutOfMemory
from tpu_compile.executables import Compiled, cache_key
from tpu_compile.lowering.program import Program
from tpu_compile.runtime import CompileOptions
from tpu_compile.runtime.executable import MemoryAnalysis
from tpu_compile.runtime.topology import CompileOnlyExecutable, topology
from tpu_compile.stats import count, timed

_LENGTHS = struct.Struct("<QQ")
"""Of the JSON and of the compressed text; the executable is the rest."""


def compile_for(target: str, program: Program, options: CompileOptions, *, code: bool = True) -> Compiled:
    """A program compiled for a slice such as ``v5e:2x2``, from the cache if it was before.

    Args:
        code: whether the executable's bytes are wanted; without them there may be none.

    Raises:
        ConfigError: there is no such slice.
        OutOfMemory: the chip does not hold it; ``needed`` and ``available`` are bytes.
        CompilationFailed: XLA rejected it.
    """
    chips = topology(target)
    key = cache_key(program, options, chips)

    def make() -> bytes:
        with timed("xla", f"{program.name} for {chips.name}"):
            made = chips.compile(program.bytecode, program.name, options, code=code)
        count("xla_compiles")
        return pack(made)

    keys = [_part_of(key, program, kept) for kept in (("", "text") if not code else ("",))]
    payload, origin = _kept(keys, make, program.name)
    return Compiled(program, unpack(program.name, payload), key, chips, origin)


def hbm_for(target: str, program: Program, options: CompileOptions) -> int:
    """Bytes of HBM that a program takes on a slice, from the cache, or found without making its code.

    Raises:
        ConfigError, OutOfMemory, CompilationFailed: as ``compile_for``.
    """
    chips = topology(target)

    def make() -> bytes:
        with timed("xla", f"{program.name} for {chips.name}, as far as its memory,"):
            return _pack({"hbm": chips.hbm(program.bytecode, program.name, options)}, b"", b"")

    payload, _ = _kept([_part_of(cache_key(program, options, chips), program, "hbm")], make, program.name)
    return int(_described(payload)["hbm"])


def _kept(keys: Sequence[CacheKey], make: Callable[[], bytes], name: str) -> tuple[bytes, Literal["xla", "disk"]]:
    """(what is stored under one of the keys, else what ``make`` made and is stored now under the last, where it is
    from). That a program does not fit is stored too."""
    store = open_store()
    for key in keys:
        if store and (entry := store.get(key)):
            with timed("load", name):
                return entry.payload, "disk"
    if not store:
        return _made(make), "xla"
    with store.compiling(keys[-1]) as entry:
        if entry is not None:
            return entry.payload, "disk"
        start = time.perf_counter()
        payload = _made(make)
        store.put(keys[-1], payload, compile_seconds=time.perf_counter() - start, metadata={})
        return payload, "xla"


def _part_of(key: CacheKey, program: Program, kept: str) -> CacheKey:
    """The text names the user's lines, which a key for running leaves out: code that moved is compiled anew.

    Args:
        kept: what of the compile is: nothing for all of it.
    """
    lines = hashlib.sha256(program.bytecode).hexdigest()
    return CacheKey.of(key.name, {**dict(key.parts), "lines": lines, **({"kept": kept} if kept else {})})


def _made(make: Callable[[], bytes]) -> bytes:
    try:
        return make()
    except OutOfMemory as error:
        if not error.needed:  # the compiler itself ran out: nothing that another try must repeat
            raise
        said = {"message": str(error), "needed": error.needed, "available": error.available}
        return _pack({"does_not_fit": said}, b"", b"")


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
    described = _described(payload)
    head_size, text_size = _LENGTHS.unpack_from(payload)
    at = _LENGTHS.size
    text = zlib.decompress(payload[at + head_size : at + head_size + text_size]).decode()
    memory = MemoryAnalysis(**described["memory"])
    return CompileOnlyExecutable(name, text, described["cost"], memory, payload[at + head_size + text_size :])


def _described(payload: bytes) -> dict[str, Any]:
    """The JSON of what ``_pack`` made.

    Raises:
        OutOfMemory: the program was found not to fit.
    """
    head_size, _ = _LENGTHS.unpack_from(payload)
    described: dict[str, Any] = json.loads(payload[_LENGTHS.size : _LENGTHS.size + head_size])
    if said := described.get("does_not_fit"):
        raise OutOfMemory(said["message"], needed=said["needed"], available=said["available"])
    return described
