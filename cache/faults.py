"""A cache fault is a miss, one warning for each kind and process, and a count; with ``raise_cache_errors`` an error."""

from __future__ import annotations

import contextlib
import errno
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from tpu_compile.cache.entry import Rejected
from tpu_compile.config import config
from tpu_compile.errors import CacheError, CacheWarning
from tpu_compile.stats import count, event

_warned: set[str] = set()
"""Kinds this process has warned about: the point is once a process, whatever number of stores it opens."""
_lock = threading.Lock()


def report(kind: str, message: str) -> None:
    """Count a fault and warn about its kind once, or raise it where the user asked for that.

    Raises:
        CacheError: ``config.raise_cache_errors`` is on.
    """
    count("cache_faults")
    event("compilation_cache/cache_faults", kind=kind, message=message)
    if config.raise_cache_errors:
        raise CacheError(message)
    with _lock:
        first = kind not in _warned
        _warned.add(kind)
    if first:
        more = "Programs are compiled again where needed; further faults of this kind are only counted (cache_faults)."
        warnings.warn(f"{message} {more}", CacheWarning, stacklevel=2)


def forget_warnings() -> None:
    """Warn anew about every kind (for tests and long-lived notebooks)."""
    with _lock:
        _warned.clear()


@contextlib.contextmanager
def contained(action: str, path: Path) -> Iterator[None]:
    """Turn what goes wrong with ``path`` into a report, and leave the block."""
    try:
        yield
    except Rejected as fault:
        problem = fault.kind, f"Cache entry {path} is not used: {fault}."
    except OSError as fault:
        kind = errno.errorcode.get(fault.errno or 0, "OSError")  # not the action: one cause, one warning
        problem = kind, f"Cannot {action} {path}: {_reason(fault)}."
    else:
        return
    report(*problem)


def _reason(fault: OSError) -> str:
    hints = {
        errno.ENOSPC: "the disk is full; `tpu-compile cache prune --max-size 1GB` makes room",
        errno.EDQUOT: "the disk quota is used up; `tpu-compile cache prune --max-size 1GB` makes room",
        errno.EROFS: "the file system is read-only; TPU_COMPILE_CACHE_DIR moves the cache",
        errno.ENOTDIR: "a file is in the way; TPU_COMPILE_CACHE_DIR moves the cache",
        errno.EACCES: "permission denied; TPU_COMPILE_CACHE_DIR moves the cache",
    }
    return hints.get(fault.errno or 0, fault.strerror or str(fault))
