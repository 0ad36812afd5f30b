"""The cache filled for a TPU that is not here: what a machine that has it would compile, under the key that it asks
for.

libtpu compiles without the hardware; the key differs from that of ``targets`` in that nothing of it is about looking
into the program. What only the hardware could say (whether libtpu's own name for its build is the same there) decides
whether the machine finds the entry, never whether it may use it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpu_compile import compiler
from tpu_compile.cache import CacheKey, CacheStore
from tpu_compile.executables import cache_key, metadata
from tpu_compile.lowering.program import Program
from tpu_compile.runtime import CompileOptions, keys, plugin
from tpu_compile.runtime.compiling import toolchain_parts
from tpu_compile.runtime.topology import Topology, topology
from tpu_compile.stats import count, timed
from tpu_compile.warm import index


@dataclass(frozen=True)
class Filled:
    """One program for a slice: its name, its key, and the seconds that compiling it took; 0 if it was there."""

    name: str
    key: CacheKey
    seconds: float


@dataclass(frozen=True)
class Attached:
    """A slice as a client on the machine that it is attached to would describe it."""

    chips: Topology

    def key_parts(self, options: CompileOptions) -> Mapping[str, str]:
        """The labels and values of ``Client.key_parts`` there."""
        library = plugin.find("tpu")
        return {
            "plugin": f"{library.name} {library.version}",
            "plugin_build": keys.library_build(library.path),
            "platform": self.chips.platform,
            "platform_version": self.chips.platform_version,
            "device_kind": self.chips.device_kind,
            "device_assignment": f"[[0]] of {self.chips.device_count}",
            **toolchain_parts(),
            **options.key_parts(),
        }


def fill(lowerings: Iterable[compiler.Lowering], target: str, store: CacheStore) -> Iterator[Filled]:
    """Compile graphs for a slice such as ``v5e:2x2`` into a store, as they come out.

    Raises:
        ConfigError: there is no such slice.
        OutOfMemory: the chip does not hold a program.
        CompilationFailed: XLA rejected one.
    """
    chips, options = topology(target), compiler.options_in_force()
    for lowering in lowerings:
        programs = (_lowered(lowering, chips.family, donate) for donate in (False, True))
        for program in {program.digest: program for program in programs}.values():
            yield _compiled(program, options, chips, store)


def _lowered(lowering: compiler.Lowering, family: str, donate: bool) -> Program:
    """The program of CPU tensors, or (``donate``) of tensors on the device; kept for the machine's own look-up."""
    lower = partial(compiler.lower_graph, lowering.graph, lowering.name, dict(lowering.bindings), family, donate)
    found: Any = index.lowered(
        lowering.graph, lowering.name, lower, bindings=lowering.bindings, family=family, donate=donate
    )
    program: Program = found[0]
    return program


def _compiled(program: Program, options: CompileOptions, chips: Topology, store: CacheStore) -> Filled:
    key = cache_key(program, options, Attached(chips))
    if store.look(key) is not None:
        return Filled(program.name, key, 0.0)
    start = time.perf_counter()
    with timed("xla", f"{program.name} for {chips.name}"):
        made = chips.compile(program.bytecode, program.name, options)
    count("xla_compiles")
    seconds = time.perf_counter() - start
    store.put(key, made.serialize(), compile_seconds=seconds, metadata=metadata(program), even_if_quick=True)
    return Filled(program.name, key, seconds)
