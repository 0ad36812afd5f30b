"""Counters: what happened, as a flat dict of numbers. They are the evidence (tests assert on them); logs are not.

Counts: ``graphs`` ``nodes`` ``lowerings`` ``xla_compiles`` ``executions`` ``fallback_ops`` ``memory_hits`` ``disk_hits`` ``disk_misses``
``disk_puts`` ``cache_faults`` ``h2d_bytes`` ``d2h_bytes`` ``copied_arguments`` ``ops_native`` ``ops_jnp`` ``ops_torch_mlir`` ``ops_eager``.
Seconds: ``lowering_seconds`` ``xla_seconds`` ``load_seconds`` ``cache_seconds``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_COUNTS = (
    "graphs nodes lowerings xla_compiles executions fallback_ops memory_hits disk_hits disk_misses disk_puts cache_faults "
    "h2d_bytes d2h_bytes copied_arguments ops_native ops_jnp ops_torch_mlir ops_eager"
).split()
_SECONDS = "lowering_seconds xla_seconds load_seconds cache_seconds".split()


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
def timed(name: str) -> Iterator[None]:
    """Add the block's wall seconds to ``<name>_seconds``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        count(f"{name}_seconds", time.perf_counter() - start)


def stats() -> dict[str, float]:
    """A copy of all counters since the process started or ``reset_stats`` was called."""
    return dict(counters)


def reset_stats() -> None:
    """Set every counter to zero."""
    with _lock:
        counters.update(_zero())
