"""The cache as the compiler sees it: get, put, and "is somebody compiling this already?". Faults end here."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_compile.cache import housekeeping
from tpu_compile.cache.disk import Folder
from tpu_compile.cache.entry import Entry, Header, Rejected, encode
from tpu_compile.cache.faults import contained, report
from tpu_compile.cache.housekeeping import CacheStats, Problem, Removed
from tpu_compile.cache.key import CacheKey
from tpu_compile.config import config
from tpu_compile.stats import count, event, timed

if TYPE_CHECKING:
    from tpu_compile.cache.remote import Remote

log = logging.getLogger("tpu_compile.cache")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_TRIM_TO = 0.9
"""A full cache is emptied to this share of its cap, so that not every put has to look for something to evict."""
_PUTS_BETWEEN_SCANS = 64

PROGRAM, TRACED, AHEAD = "graph", "traced", "function"
"""Labels that only the keys of lowered programs have, of traced graphs, and of functions that were compiled ahead of
time. An entry without one holds an executable."""
_KINDS = {PROGRAM: "program", TRACED: "trace", AHEAD: "function"}
PICKLED = frozenset({"trace", "function"})
"""Kinds whose payload torch unpickles: they stay where they were made."""
_EVENTS = {"disk": "compilation_cache", "lowering": "lowering_cache", "tracing": "tracing_cache"}
TRACING_SHARE = 10
"""Of the size cap, one part in so many is for what tracing made."""


@dataclass(frozen=True)
class EntryInfo:
    """One stored entry, for listings: header, bytes on disk, time of last use (epoch seconds), number of hits."""

    header: Header
    path: Path
    size: int
    used: float
    hits: int

    @property
    def kind(self) -> str:
        """What it holds: an ``executable``, the ``program`` that a graph was lowered to, the ``trace`` of one, or a
        ``function`` that was compiled ahead of time."""
        return kind(self.header.parts)

    @property
    def seconds_saved(self) -> float:
        """Compiling or lowering that the hits on this entry made unnecessary."""
        return self.hits * self.header.compile_seconds


def kind(parts: Mapping[str, str]) -> str:
    """What an entry with these key parts holds."""
    return next((kind for label, kind in _KINDS.items() if label in parts), "executable")


class CacheStore:
    """Entries in one directory. All methods are safe to call from several threads and processes at once."""

    def __init__(
        self,
        directory: Path | None = None,
        max_size: int | None = None,
        remote: Remote | None = None,
        counts: str = "disk",
    ) -> None:
        """``directory`` defaults to the knob ``cache_dir``, ``max_size`` (bytes, 0: no cap) to ``cache_max_size``.
        ``counts``: which counters its use adds to: ``disk`` (executables), ``lowering`` (programs), ``tracing``."""
        self.counts = counts
        self.folder = Folder(directory or default_directory())
        self.max_size = config.cache_max_size if max_size is None else max_size
        self.remote = remote
        self._size: int | None = None
        self._puts = 0
        self._lock = threading.Lock()

    @property
    def secret(self) -> bytes:
        """The key that signs entries; empty when they are not signed."""
        return str(config.cache_key).encode()

    def get(self, key: CacheKey) -> Entry | None:
        """The stored entry, checked, or None. Counts ``disk_hits`` (``remote_hits``) or ``disk_misses``, or what
        ``counts`` puts in their place."""
        with timed("cache"):
            entry = self.look(key)
            if entry is not None:
                return _hit(entry, self.counts, f"{self.counts}_hits")
            entry = self._fetch(key)
        if entry is None:
            count(f"{self.counts}_misses")
            event(f"{_EVENTS[self.counts]}/cache_misses", key=key.digest, program=key.name)
        return entry

    def put(
        self,
        key: CacheKey,
        payload: bytes,
        *,
        compile_seconds: float,
        metadata: Mapping[str, Any],
        even_if_quick: bool = False,
    ) -> bool:
        """Store what a successful compile produced; ``metadata`` holds JSON values. False when it was not stored.
        ``even_if_quick``: whatever the knob ``cache_min_compile_seconds`` says."""
        if compile_seconds < config.cache_min_compile_seconds and not even_if_quick:
            return False
        with timed("cache"):
            pieces = encode(
                key,
                payload,
                compile_seconds=compile_seconds,
                created=time.time(),
                versions={"tpu-compile": _version()},
                metadata=metadata,
                secret=self.secret,
            )
            if self.remote and self.remote.write:
                self.remote.push(key.digest, b"".join(pieces))
            return self.write(key, pieces)

    def write(self, key: CacheKey | Header, pieces: list[bytes]) -> bool:
        """Put an entry that is already encoded in place, within the size cap. False when that was not possible."""
        if self.max_size and sum(map(len, pieces)) > self.max_size:
            return False
        with contained("write to the cache", self.folder.root):
            self._account(self.folder.write(key.digest, pieces), keep=key.digest)
            count(f"{self.counts}_puts")
            event(f"{_EVENTS[self.counts]}/cache_puts", key=key.digest, program=key.name)
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

    def entries(self, of: str = "executable") -> Iterator[EntryInfo]:
        """Every readable entry of a kind (``executable``, ``program``, empty for both), most recently used first;
        damaged ones are skipped (``verify`` finds them).

        Raises:
            CacheError: the directory is not ours to read.
        """
        for file in reversed(self.folder.scan()):
            with contextlib.suppress(OSError, Rejected):
                header, hits = self.folder.read_header(file.digest, self.secret)
                if of in ("", kind(header.parts)):
                    yield EntryInfo(header, self.folder.path(file.digest), file.size, file.used, hits)

    def prune(self, *, max_size: int | None = None, older_than: float | None = None) -> Removed:
        """Evict what was not used for ``older_than`` seconds, then the longest unused down to ``max_size`` bytes."""
        return housekeeping.prune(self.folder, max_size, older_than)

    def clear(self) -> Removed:
        """Remove everything."""
        return housekeeping.clear(self.folder)

    def verify(self, *, remove: bool = False) -> list[Problem]:
        """Check every entry; ``remove`` takes away what cannot be used."""
        return housekeeping.verify(self.folder, self.secret, remove=remove)

    def stats(self) -> CacheStats:
        """Entries, bytes, hits and seconds saved, over all that is stored."""
        return housekeeping.summarize(self.folder, self.entries(of=""), self.max_size)

    def look(self, key: CacheKey | Header) -> Entry | None:
        """The entry in this directory, checked, or None; nothing is counted."""
        with contained("read cache entry", self.folder.path(key.digest)):
            try:
                return self.folder.read(key.digest, self.secret)
            except FileNotFoundError:
                return None
            except (Rejected, PermissionError) as fault:
                self._repair(key.digest, fault)
                raise
        return None

    def _repair(self, digest: str, fault: Rejected | PermissionError) -> None:
        """Take away what cannot be used. Entries signed otherwise may be good for others: a put replaces them."""
        if isinstance(fault, Rejected) and fault.kind == "unsigned":
            return
        with contextlib.suppress(OSError, Rejected):
            self.folder.remove(digest, only=getattr(fault, "file", None))

    def _fetch(self, key: CacheKey) -> Entry | None:
        """The remote entry, checked like any other and then kept locally."""
        found = self.remote.fetch(key.digest, self.secret) if self.remote else None
        if found is None:
            return None
        entry, data = found
        self.write(key, [data])
        counters = ("remote_hits",) if self.counts == "disk" else ("remote_hits", f"{self.counts}_hits")
        return _hit(entry, self.counts, *counters)

    def _wait_for_turn(self, key: CacheKey, held: contextlib.ExitStack) -> Entry | None:
        from filelock import FileLock, Timeout  # 10 ms that a process without misses does not pay

        self.folder.prepare(self.folder.locks)
        lock = FileLock(self.folder.locks / key.digest, mode=0o600, thread_local=False)
        deadline, pause = time.monotonic() + config.cache_lock_timeout, 0.0
        while True:
            with contextlib.suppress(Timeout):
                held.enter_context(lock.acquire(blocking=False))
            if (entry := self.look(key)) is not None:
                held.close()
                return _hit(entry, self.counts, f"{self.counts}_hits")
            if lock.is_locked:
                return None
            if not pause:
                count("disk_waits")
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
            if self._puts % _PUTS_BETWEEN_SCANS == 0:
                self.folder.sweep()
                self._size = sum(file.size for file in self.folder.scan())
            else:
                self._size = (self._size or 0) + written
            self._puts += 1
            if self._size > self.max_size:
                self._size = housekeeping.shrink(self.folder, int(self.max_size * _TRIM_TO), keep)


def _hit(entry: Entry, what: str, *counters: str) -> Entry:
    for counter in counters:
        count(counter)
    count("saved_seconds", entry.compile_seconds)
    event(
        f"{_EVENTS[what]}/cache_hits",
        key=entry.header.digest,
        program=entry.header.name,
        compile_time_saved_sec=entry.compile_seconds,
    )
    return entry


def default_directory() -> Path:
    """The knob ``cache_dir``, else the platform's cache directory."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("tpu-compile", appauthor=False))


def open_store(counts: str = "disk") -> CacheStore | None:
    """The store that the knobs ask for, one object for one setting; None when ``cache`` is off."""
    if not config.cache:
        return None
    remote = _open_remote(config.cache_remote, config.cache_remote_write) if config.cache_remote else None
    return _open(default_directory(), config.cache_max_size, remote, counts)


@functools.lru_cache(maxsize=8)
def _open(directory: Path, max_size: int, remote: Remote | None, counts: str) -> CacheStore:
    return CacheStore(directory, max_size, remote, counts)


@functools.lru_cache(maxsize=8)
def tracing_store(store: CacheStore) -> CacheStore:
    """The store of what tracing made, in a folder of its own below the cache: pickled by torch, so it is neither
    exported nor shared."""
    cap = store.max_size // TRACING_SHARE
    return CacheStore(store.folder.root / "tracing", cap, counts="tracing")


@functools.lru_cache(maxsize=4)
def _open_remote(url: str, write: bool) -> Remote:
    from tpu_compile.cache.remote import Remote  # threads and queues that a local cache does not need

    return Remote(url, write=write)


@functools.cache
def _version() -> str:
    from importlib.metadata import version  # 17 ms

    return version("tpu-compile")
