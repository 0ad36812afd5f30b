"""The files of one cache directory: ``entries/<digest>`` and ``locks/<digest>``. It checks who owns what; no policy.

Everything raises ``OSError`` or ``Rejected``; the store decides what that means.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tpu_compile.cache.entry import (
    HITS,
    HITS_OFFSET,
    PREAMBLE,
    Entry,
    Header,
    Preamble,
    Rejected,
    decode_header,
    decode_payload,
)

try:
    import fcntl
except ImportError:  # Windows: an open file cannot be deleted there, which is what the read lock is for
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = ".tmp-"
_STALE_SECONDS = 3600.0
_SAFELY = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""No links, no waiting for a FIFO's other end, no inheritance; each where the system has it."""


@dataclass(frozen=True)
class FileInfo:
    """One file of the cache: bytes on disk, and seconds since the epoch of its last use."""

    digest: str
    size: int
    used: float


class Folder:
    """The files below one cache directory. The directory itself may be a symlink; nothing inside it may."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries = root / "entries"
        self.locks = root / "locks"

    def path(self, digest: str) -> Path:
        """Where the entry of a digest is, or would be."""
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise Rejected("damaged", f"{digest[:80]!r} is no digest")
        return self.entries / digest

    def prepare(self, folder: Path) -> None:
        """Create ``folder`` (0700) or check that it is a directory of ours, and close it to others."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        info = self._check_folder(folder)
        if info.st_mode & 0o077 and info.st_uid == _user():
            folder.chmod(0o700)

    def read(self, digest: str, secret: bytes = b"") -> Entry:
        """The checked entry; marks it as used and counts the hit in the file.

        Raises:
            FileNotFoundError: there is none.
            Rejected: what is there must not be used.
        """
        with self._opened(digest) as (file, size):
            preamble, header = _read_header(file, size, digest, secret)
            entry = Entry(decode_payload(header, _read_exactly(file, header.stored_size)), header)
            _mark_used(file, preamble.hits + 1)
            return entry

    def read_header(self, digest: str, secret: bytes = b"") -> tuple[Header, int]:
        """Header and number of hits, without reading the payload and without marking it as used."""
        with self._opened(digest) as (file, size):
            preamble, header = _read_header(file, size, digest, secret)
            return header, preamble.hits

    def write(self, digest: str, pieces: Iterable[bytes]) -> int:
        """Put a file in place, whole or not at all: temporary name, fsync, rename. Returns its size."""
        target = self.path(digest)
        self.prepare(self.entries)
        temporary = self.entries / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            size = _write_new(temporary, pieces)
            _replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return size

    def remove(self, digest: str) -> None:
        """Take an entry away, whatever it is; none there is fine."""
        _remove(self.path(digest))

    def scan(self) -> list[FileInfo]:
        """Every file under a digest's name, least recently used first. Times in the future become now."""
        now = time.time()
        found = [info for item in self._listing() if (info := _file_info(item, now)) is not None]
        return sorted(found, key=lambda info: info.used)

    def evict(self, digest: str) -> bool:
        """Remove an entry unless somebody is reading it."""
        path = self.path(digest)
        try:
            file = os.open(path, os.O_RDONLY | _SAFELY)
        except OSError:
            _remove(path)
            return True
        try:
            if not _lock(file, exclusive=True):
                return False
            _remove(path)
            return True
        finally:
            os.close(file)

    def sweep(self) -> None:
        """Remove temporary files whose writers are gone."""
        for item in self._listing():
            if item.name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):
                    if abs(time.time() - item.stat(follow_symlinks=False).st_mtime) > _STALE_SECONDS:
                        _remove(Path(item.path))

    def _listing(self) -> list[os.DirEntry[str]]:
        try:
            self._check_folder(self.entries)
            with os.scandir(self.entries) as items:
                return list(items)
        except FileNotFoundError:
            return []

    def _check_folder(self, folder: Path) -> os.stat_result:
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode):
            raise Rejected("foreign", f"{folder} is not a directory")
        if not _trusted(info):
            raise Rejected("foreign", f"{folder} belongs to user {info.st_uid}, not to you")
        return info

    @contextlib.contextmanager
    def _opened(self, digest: str) -> Iterator[tuple[int, int]]:
        """File descriptor and size of an entry of ours, held against eviction while it is read."""
        path = self.path(digest)
        self._check_folder(self.entries)
        file = _open_entry(path)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):
                raise Rejected("damaged", "it is not a regular file")
            if not _trusted(info):
                raise Rejected("foreign", f"it belongs to user {info.st_uid}, not to you")
            _lock(file, exclusive=False)
            yield file, info.st_size
        finally:
            os.close(file)


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _trusted(info: os.stat_result) -> bool:
    """Ours or root's: root could replace this very program, so a cache that root has filled is no new risk."""
    return info.st_uid in (_user(), 0)


def _open_entry(path: Path) -> int:
    """Open for reading, and for counting the hit where that is allowed."""
    try:
        try:
            return os.open(path, os.O_RDWR | _SAFELY)
        except OSError as fault:
            if fault.errno not in (errno.EACCES, errno.EPERM, errno.EISDIR, errno.EROFS):
                raise
            return os.open(path, os.O_RDONLY | _SAFELY)
    except OSError as fault:
        if path.is_symlink():
            raise Rejected("foreign", "it is a symbolic link") from fault
        raise


def _read_header(file: int, size: int, digest: str, secret: bytes) -> tuple[Preamble, Header]:
    preamble = Preamble.read(_read_exactly(file, PREAMBLE.size, short=True))
    if size < PREAMBLE.size + preamble.header_length:
        raise Rejected("damaged", "it ends inside its header")
    header = decode_header(preamble, _read_exactly(file, preamble.header_length), digest, secret)
    expected = PREAMBLE.size + preamble.header_length + header.stored_size
    if size != expected:
        raise Rejected("damaged", f"it has {size} bytes instead of {expected}")
    return preamble, header


def _read_exactly(file: int, size: int, short: bool = False) -> bytes:
    """``size`` bytes; fewer only where ``short`` allows it."""
    pieces: list[bytes] = []
    missing = size
    while missing and (piece := os.read(file, missing)):
        pieces.append(piece)
        missing -= len(piece)
    if missing and not short:
        raise Rejected("damaged", f"it ends {missing} bytes early")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _mark_used(file: int, hits: int) -> None:
    """Count a hit in place, which also sets the time of last use. A read-only cache simply does not count."""
    with contextlib.suppress(OSError):
        os.pwrite(file, HITS.pack(hits), HITS_OFFSET)


def _write_new(path: Path, pieces: Iterable[bytes]) -> int:
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        size = sum(file.write(piece) for piece in pieces)
        file.flush()
        os.fsync(file.fileno())
    return size


def _replace(temporary: Path, target: Path) -> None:
    try:
        os.replace(temporary, target)
    except (IsADirectoryError, NotADirectoryError, PermissionError):
        _remove(target)  # a directory under the entry's name
        os.replace(temporary, target)


def _remove(path: Path) -> None:
    """Unlink a file or link, or delete a directory that stands in a file's place."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        if not path.is_dir() or path.is_symlink():
            raise
        shutil.rmtree(path)


def _file_info(item: os.DirEntry[str], now: float) -> FileInfo | None:
    if item.name.startswith("."):
        return None
    try:
        info = item.stat(follow_symlinks=False)
        if info.st_mtime > now + 60:
            os.utime(item.path, (now, now), follow_symlinks=False)
    except OSError:
        return None  # evicted meanwhile
    return FileInfo(item.name, info.st_size, min(info.st_mtime, now))


def _lock(file: int, *, exclusive: bool) -> bool:
    """A lock that ends with the descriptor. Without one, readers rely on unlinked files staying readable."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
