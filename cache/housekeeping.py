"""What the cache commands do to a folder of entries: evict, prune, clear, verify, sum up. Faults are raised here."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_compile.cache.disk import FileInfo, Folder
from tpu_compile.cache.entry import Rejected
from tpu_compile.stats import count

if TYPE_CHECKING:
    from tpu_compile.cache.store import EntryInfo


@dataclass(frozen=True)
class Removed:
    """What a command took away: files and bytes."""

    entries: int
    bytes: int


@dataclass(frozen=True)
class Problem:
    """One thing ``verify`` found: the file, the kind (``Rejected.kind``, ``unreadable`` or ``stray``), the reason."""

    path: Path
    kind: str
    reason: str


@dataclass(frozen=True)
class CacheStats:
    """The cache's figures. Bytes, seconds, and epoch seconds of the least recent use (0: empty)."""

    directory: Path
    entries: int
    bytes: int
    payload_bytes: int
    max_size: int
    hits: int
    compile_seconds: float
    seconds_saved: float
    least_recent_use: float


def shrink(folder: Folder, target: int, keep: str = "") -> int:
    """Evict least recently used entries until ``target`` bytes are left, or all are in use. Returns the bytes left."""
    files = folder.scan()
    size = sum(file.size for file in files)
    for file in files:
        if size <= target:
            break
        if file.digest != keep and folder.evict(file.digest):
            count("disk_evictions")
            size -= file.size
    return size


def prune(folder: Folder, max_size: int | None = None, older_than: float | None = None) -> Removed:
    """Evict what was not used for ``older_than`` seconds, then the least recently used down to ``max_size`` bytes."""
    before = folder.scan()
    if older_than is not None:
        _evict(folder, (file for file in before if time.time() - file.used >= older_than))
    if max_size is not None:
        shrink(folder, max_size)
    folder.sweep()
    return _difference(before, folder.scan())


def clear(folder: Folder) -> Removed:
    """Remove every entry, stray file, forgotten temporary file and unheld lock."""
    before = folder.scan()
    for file in before:
        folder.remove(file.digest)
    folder.remove_strays()
    folder.sweep()
    return _difference(before, folder.scan())


def verify(folder: Folder, secret: bytes = b"", *, remove: bool = False) -> list[Problem]:
    """Read and check every entry, without counting it as used; ``remove`` takes away what cannot be used."""
    problems = [Problem(path, "stray", "it is not an entry") for path in folder.strays()]
    for file in folder.scan():
        problem = _check(folder, file.digest, secret)
        if problem is not None:
            problems.append(problem)
            if remove:
                folder.remove(file.digest)
    if remove:
        folder.remove_strays()
    return problems


def summarize(folder: Folder, infos: Iterable[EntryInfo], max_size: int) -> CacheStats:
    """The figures over all readable entries."""
    infos = list(infos)
    return CacheStats(
        directory=folder.root,
        entries=len(infos),
        bytes=sum(info.size for info in infos),
        payload_bytes=sum(info.header.payload_size for info in infos),
        max_size=max_size,
        hits=sum(info.hits for info in infos),
        compile_seconds=sum(info.header.compile_seconds for info in infos),
        seconds_saved=sum(info.seconds_saved for info in infos),
        least_recent_use=min((info.used for info in infos), default=0.0),
    )


def _evict(folder: Folder, files: Iterable[FileInfo]) -> None:
    for file in files:
        folder.evict(file.digest)


def _difference(before: list[FileInfo], after: list[FileInfo]) -> Removed:
    left = {file.digest for file in after}
    gone = [file for file in before if file.digest not in left]
    return Removed(len(gone), sum(file.size for file in gone))


def _check(folder: Folder, digest: str, secret: bytes) -> Problem | None:
    try:
        folder.check(digest, secret)
    except FileNotFoundError:
        return None  # evicted meanwhile
    except Rejected as fault:
        return Problem(folder.path(digest), fault.kind, str(fault))
    except OSError as fault:
        return Problem(folder.path(digest), "unreadable", fault.strerror or str(fault))
    return None
