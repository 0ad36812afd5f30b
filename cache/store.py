"""The cache as the compiler sees it: get, put, and "is somebody compiling this already?". Faults end here."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_compile.cache.disk import Folder
from tpu_compile.cache.entry import Entry, Header, Rejected, encode
from tpu_compile.cache.faults import contained, report
from tpu_compile.cache.key import CacheKey
from tpu_compile.config import config
from tpu_compile.stats import count, timed

log = logging.getLogger("tpu_compile.cache")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_TRIM_TO = 0.9
"""A full cache is emptied to this share of its cap, so that not every put has to look for something to evict."""
_PUTS_BETWEEN_SCANS = 64


@dataclass(frozen=True)
class EntryInfo:
    """One stored entry, for listings: header, bytes on disk, time of last use (epoch seconds), number of hits."""

    header: Header
    path: Path
    size: int
    used: float
    hits: int


class CacheStore:
    """Entries in one directory. All methods are safe to call from several threads and processes at once."""

    def __init__(self, directory: Path | None = None, max_size: int | None = None) -> None:
        """``directory`` defaults to the knob ``cache_dir``, ``max_size`` (bytes, 0: no cap) to ``cache_max_size``."""
        self.folder = Folder(directory or default_directory())
        self.max_size = config.cache_max_size if max_size is None else max_size
        self._size: int | None = None
        self._puts = 0
        self._lock = threading.Lock()

    def get(self, key: CacheKey) -> Entry | None:
        """The stored entry, checked, or None. Counts ``disk_hits`` or ``disk_misses``."""
        with timed("cache"):
            entry = self._find(key)
        if entry is None:
            count("disk_misses")
        return entry

    def put(self, key: CacheKey, payload: bytes, *, compile_seconds: float, metadata: Mapping[str, Any]) -> bool:
        """Store what a successful compile produced; ``metadata`` holds JSON values. False when it was not stored."""
        if compile_seconds < config.cache_min_compile_seconds:
            return False
        with timed("cache"), contained("write to the cache", self.folder.root):
            pieces = encode(
                key, payload, compile_seconds=compile_seconds, created=time.time(), versions={}, metadata=metadata
            )
            if self.max_size and sum(map(len, pieces)) > self.max_size:
                return False
            self._account(self.folder.write(key.digest, pieces), keep=key.digest)
            count("disk_puts")
            return True
        return False

    @contextlib.contextmanager
    def compiling(self, key: CacheKey) -> Iterator[Entry | None]:
        """Hold the right to compile ``key``: yields None when it is ours, or the entry that appeared.

        It is also ours when ``config.cache_lock_timeout`` runs out, when the owner died, or where locks do not work.
        """
        with contextlib.ExitStack() as held:
            entry = None
            with contained("lock the cache", self.folder.root):
                entry = self._wait_for_turn(key, held)
            yield entry

    def discard(self, key: CacheKey, reason: str) -> None:
        """Remove an entry whose payload the runtime refused to load."""
        with contained("remove a cache entry from", self.folder.entries):
            self.folder.remove(key.digest)
        report("refused", f"Cache entry {self.folder.path(key.digest)} was removed: {reason}.")

    def entries(self) -> Iterator[EntryInfo]:
        """Every readable entry, most recently used first; damaged ones are skipped (``verify`` finds them)."""
        for file in reversed(self.folder.scan()):
            with contextlib.suppress(OSError, Rejected):
                header, hits = self.folder.read_header(file.digest)
                yield EntryInfo(header, self.folder.path(file.digest), file.size, file.used, hits)

    def _find(self, key: CacheKey) -> Entry | None:
        path = self.folder.path(key.digest)
        with contained("read cache entry", path):
            try:
                entry = self.folder.read(key.digest)
            except FileNotFoundError:
                return None
            except (OSError, Rejected):
                with contextlib.suppress(OSError, Rejected):
                    self.folder.remove(key.digest)
                raise
            count("disk_hits")
            return entry
        return None

    def _wait_for_turn(self, key: CacheKey, held: contextlib.ExitStack) -> Entry | None:
        from filelock import FileLock, Timeout  # 10 ms that a process without misses does not pay

        self.folder.prepare(self.folder.locks)
        lock = FileLock(self.folder.locks / key.digest, mode=0o600, thread_local=False)
        deadline, pause = time.monotonic() + config.cache_lock_timeout, 0.0
        while True:
            with contextlib.suppress(Timeout):
                held.enter_context(lock.acquire(blocking=False))
            if (entry := self._find(key)) is not None:
                held.close()
                return entry
            if lock.is_locked:
                return None
            if not pause:
                log.info("waiting for another process or thread that compiles %s", key.name)
            if time.monotonic() > deadline:
                waited = f"{config.cache_lock_timeout:g} s"
                report("lock timeout", f"Another process still compiles {key.name} after {waited}; compiling it here.")
                return None
            pause = min(pause * 1.5, _LONGEST_PAUSE) or _FIRST_PAUSE
            time.sleep(pause)

    def _account(self, written: int, keep: str) -> None:
        """Add a put to the known size, and evict when the cap is passed. The directory is only scanned now and then."""
        if not self.max_size:
            return
        with self._lock:
            self._puts += 1
            if self._size is None or self._puts % _PUTS_BETWEEN_SCANS == 0:
                self._size = sum(file.size for file in self.folder.scan())
            else:
                self._size += written
            if self._size > self.max_size:
                self._size = self._evict(int(self.max_size * _TRIM_TO), keep)

    def _evict(self, target: int, keep: str = "") -> int:
        """Remove least recently used entries until ``target`` bytes are left. Returns the bytes that are left."""
        files = self.folder.scan()
        size = sum(file.size for file in files)
        for file in files:
            if size <= target:
                break
            if file.digest != keep and self.folder.evict(file.digest):
                size -= file.size
        self.folder.sweep()
        return size


def default_directory() -> Path:
    """The knob ``cache_dir``, else the platform's cache directory."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("tpu-compile", appauthor=False))


def open_store() -> CacheStore | None:
    """The store that the knobs ask for; None when ``cache`` is off."""
    return CacheStore() if config.cache else None
