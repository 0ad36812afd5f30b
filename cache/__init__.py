"""Compiled programs on disk: bytes in, bytes out. It knows labelled key parts and payloads, and neither torch nor XLA.

    store = open_store()                                  # None when the knob `cache` is off
    key = CacheKey.of("matmul", {"program": bytecode, "arguments": "f32[8,128]; f32[128]", "libtpu": "0.0.42"})
    entry = store.get(key)                                # checked, or None; never an exception
    if entry is None:
        with store.compiling(key) as entry:               # waits while somebody else compiles the same program
            if entry is None:
                payload = compile()
                store.put(key, payload, compile_seconds=12.5, metadata={"outputs": "f32[8]"})

A cache fault is never the caller's problem: it is a miss, one warning a process, and the counter ``cache_faults``.

Labels are the caller's; three have a meaning here, for listings: ``arguments`` (items separated by ``;``), ``platform``
and ``program`` (bytes). Plural labels are compared item by item: see ``explain``.
"""

from tpu_compile.cache.entry import Entry, Header
from tpu_compile.cache.explain import explain_miss, nearest
from tpu_compile.cache.housekeeping import CacheStats, Problem, Removed
from tpu_compile.cache.key import CacheKey
from tpu_compile.cache.store import CacheStore, EntryInfo, open_store

__all__ = [
    "CacheKey",
    "CacheStats",
    "CacheStore",
    "Entry",
    "EntryInfo",
    "Header",
    "Problem",
    "Removed",
    "explain_miss",
    "nearest",
    "open_store",
]
