"""Counters: what happened, as a flat dict of numbers. They are the evidence (tests assert on them); logs are not.

Counts: ``graphs`` ``nodes`` ``lowerings`` ``xla_compiles`` ``executions`` ``eager_calls`` (until a graph was
compiled) ``fallback_ops`` ``memory_hits`` ``disk_hits`` ``disk_misses`` ``disk_puts`` ``disk_waits``
``disk_evictions`` ``remote_hits`` ``remote_misses`` ``remote_puts`` ``lowering_hits`` ``lowering_misses``
``lowering_puts`` (a graph's program, found in the same place) ``tracing_hits`` ``tracing_misses`` ``tracing_puts``
``tracing_bypasses`` (what AOTAutograd made, in torch's own cache) ``cache_faults`` ``h2d_bytes`` ``d2h_bytes``
``copied_arguments`` ``ops_native`` ``ops_jnp`` ``ops_torch_mlir``.
Seconds: ``lowering_seconds`` ``xla_seconds`` ``load_seconds`` ``cache_seconds``, and ``saved_seconds``: compiling that
cache hits made unnecessary.

Events say the same one at a time, to whoever listens (``on_event``); their names are JAX's where JAX has the event.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

_COUNTS = (
    "graphs nodes lowerings xla_compiles executions eager_calls fallback_ops memory_hits disk_hits disk_misses "
    "disk_puts disk_waits disk_evictions remote_hits remote_misses remote_puts cache_faults "
    "lowering_hits lowering_misses lowering_puts tracing_hits tracing_misses tracing_puts tracing_bypasses "
    "h2d_bytes d2h_bytes copied_arguments ops_native ops_jnp ops_torch_mlir"
).split()
_SECONDS = "lowering_seconds xla_seconds load_seconds cache_seconds saved_seconds".split()


def _zero() -> dict[str, float]:
    return {**dict.fromkeys(_COUNTS, 0), **dict.fromkeys(_SECONDS, 0.0)}


counters: dict[str, float] = _zero()
"""The live counters. The call path adds to it directly; everyone else uses ``count`` and ``timed``."""
_lock = threading.Lock()


def count(name: str, by: float = 1) -> None:
    """Add to a counter. An undeclared name is a KeyError: counters are declared above."""
    with _lock:
        counters[name] += by


@contextlib.contextmanager
def timed(name: str, program: str = "") -> Iterator[None]:
    """Add the block's wall seconds to ``<name>_seconds``; with a ``program``, tell the listeners too."""
    start = time.perf_counter()
    if program:
        event("stage/begin", stage=name, program=program)
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        count(f"{name}_seconds", seconds)
        if program:
            event("stage/end", stage=name, program=program, seconds=seconds)


def stats() -> dict[str, Any]:
    """A copy of all counters since the process started or ``reset_stats`` was called. Where ``Buckets`` are in use,
    ``shapes`` holds a dict for each: calls by size, elements given and padded, calls checked, calls run eagerly."""
    shapes = {name: dict(report) for name, report in _shapes.items() if report}
    return {**counters, **({"shapes": shapes} if shapes else {})}


_shapes: dict[str, Counter[str]] = {}


def shape_report(name: str) -> Counter[str]:
    """The live report of the ``Buckets`` of a function."""
    return _shapes.setdefault(name, Counter())


def reset_stats() -> None:
    """Set every counter to zero."""
    with _lock:
        counters.update(_zero())
        for report in _shapes.values():
            report.clear()


Listener = Callable[[str, dict[str, Any]], None]
_listeners: list[Listener] = []


def on_event(listener: Listener) -> Callable[[], None]:
    """Call ``listener(name, details)`` at every event, in the thread where it happens; the result ends that.

    ``compilation_cache/cache_hits``, ``…/cache_misses``, ``…/cache_puts`` with ``key`` and ``program``; hits also with
    ``compile_time_saved_sec``; ``lowering_cache/…`` the same for lowered programs; ``tracing_cache/cache_hits``,
    ``…/cache_misses``, ``…/cache_puts``, ``…/cache_bypasses`` with ``program``. ``stage/begin`` and ``stage/end`` with
    ``stage`` ("lowering", "xla", "load", "cache") and ``program``; the end also with ``seconds``.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def event(name: str, **details: Any) -> None:
    """Tell the listeners. What a listener raises reaches whoever caused the event."""
    for listener in tuple(_listeners):
        listener(name, details)
