"""Graph → lowered program, in the same store as the executables: a process that sees a graph again lowers nothing.

The key is the graph's fingerprint and all else that decides its lowering. An entry's payload is the program's bytecode,
its metadata the rest of the program.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from tpu_compile.cache import CacheKey, CacheStore, open_store
from tpu_compile.cache.store import PROGRAM
from tpu_compile.config import config
from tpu_compile.lowering.program import Program
from tpu_compile.warm import record, sources
from tpu_compile.warm.fingerprint import Fingerprint, NoFingerprint, fingerprint

log = logging.getLogger("tpu_compile.warm")


def lowered(
    graph_module: GraphModule,
    name: str,
    lower: Callable[[], Program],
    *,
    bindings: Mapping[Any, int],
    family: str,
    donate: bool,
) -> tuple[Program, bool]:
    """The program of a graph, and whether it was found: without lowering it where that was done before.

    Args:
        lower: lowers the graph, for ``family`` and with ``bindings`` and ``donate``.
    """
    place = _place(graph_module, name, bindings, family, donate)
    if place is None:
        return lower(), False
    found = place.find()
    if found is not None:
        return found, True
    start = time.perf_counter()
    program = lower()
    place.put(program, time.perf_counter() - start)
    return program, False


def _place(
    graph_module: GraphModule, name: str, bindings: Mapping[Any, int], family: str, donate: bool
) -> _Place | None:
    """Where a graph's program is kept; None without a cache, or if the graph cannot be told from all others."""
    store = open_store(counts="lowering")
    if store is None:
        return None
    try:
        graph = fingerprint(graph_module, bindings)
    except NoFingerprint as reason:
        log.info("%s is lowered anew in every process: %s", name, reason)
        return None
    foreign = graph.operators & sources.foreign_rules()
    if foreign:
        log.info("%s is lowered anew in every process: %s has a rule of the user's", name, ", ".join(sorted(foreign)))
        return None
    return _Place(store, CacheKey.of(name, {PROGRAM: graph.digest, **_facts(family, donate)}), graph)


def _facts(family: str, donate: bool) -> dict[str, str]:
    """What decides a lowering besides the graph, as key parts."""
    return {
        "family": family,
        "donate": str(donate),
        "lowering": config.lowering,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
        "libraries": sources.libraries(),
        "sources": sources.digest(),
    }


@dataclass(frozen=True)
class _Place:
    """One graph's place in the store."""

    store: CacheStore
    key: CacheKey
    graph: Fingerprint

    def find(self) -> Program | None:
        """The program as it was lowered before, under this graph's name; None if there is none that is sound."""
        entry = self.store.get(self.key)
        if entry is None:
            return None
        try:
            return record.load(entry.metadata["program"], self.key.name, entry.payload, self.graph.tensors)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as fault:
            self.store.discard(self.key, f"it holds no program: {fault}")
            return None

    def put(self, program: Program, seconds: float) -> None:
        """Keep what was lowered, unless a source file has changed since this process read it."""
        if not sources.unchanged():
            return
        try:
            metadata = {"program": record.dump(program, self.graph.tensors)}
        except record.NotRecordable as reason:
            log.info("%s is lowered anew in every process: it holds %s", program.name, reason)
            return
        self.store.put(self.key, program.bytecode, compile_seconds=seconds, metadata=metadata, even_if_quick=True)
