"""Memory for a program's temporaries that stays with the process, on clients whose memory is the host's.

XLA asks the allocator for all temporaries of a program at each execution. Above 32 MiB glibc maps such memory anew each
time and unmaps it afterwards: the kernel hands out, and clears, every page again, which is a quarter of the CPU time of
a small GPT-2's training step. While a program of that size runs, glibc is told to take it from the heap instead, whose
end stays with the process up to twice the size of the largest program's temporaries.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

from tpu_compile.config import config, environment

MAPPED = 32 * 2**20
"""Bytes from which glibc maps memory whatever it has learned (DEFAULT_MMAP_THRESHOLD_MAX)."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MAPS = 65536
"""glibc's own limit of mapped pieces (DEFAULT_MMAP_MAX)."""
_LARGEST = 2**31 - 1
_SET = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""With one of these somebody has set the allocator up already."""


class _Heap:
    """glibc's allocator, as far as ``mallopt`` steers it."""

    def __init__(self, mallopt: Callable[[int, int], int]) -> None:
        self._mallopt, self._lock, self._kept = mallopt, threading.Lock(), 0

    def keep(self, size: int) -> None:
        """Give nothing back below twice the largest ``size`` so far. Setting one threshold ends glibc's adjustment of
        the other, which is then what it would have come to."""
        with self._lock:
            if size > self._kept:
                self._kept = size
                self._mallopt(_TRIM_THRESHOLD, min(2 * size, _LARGEST))
                self._mallopt(_MMAP_THRESHOLD, MAPPED)

    def running(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which finds all its memory in the heap."""

        def kept(buffers: Any) -> Any:
            self._mallopt(_MMAP_MAX, 0)
            try:
                return run(buffers)
            finally:
                self._mallopt(_MMAP_MAX, _MAPS)

        return kept


@functools.cache
def _heap() -> _Heap | None:
    mallopt = getattr(ctypes.PyDLL(None), "mallopt", None)
    told = "glibc.malloc" in environment("GLIBC_TUNABLES") or any(environment(name) for name in _SET)
    return None if mallopt is None or told else _Heap(mallopt)


def keeping(run: Callable[..., Any], size: int) -> Callable[..., Any]:
    """``run``, an execution that takes ``size`` bytes of temporaries, as one that leaves them with the process if they
    are many."""
    heap = _heap() if config.keep_temporaries and size > MAPPED else None
    if heap is None:
        return run
    heap.keep(size)
    return heap.running(run)
