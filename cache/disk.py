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

from tpu_compile.cache.entry import HITS, HITS_OFFSET, Entry, Header, Reader, Rejected, read_header, read_payload

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
        if not is_digest(digest):
            raise Rejected("damaged", f"{digest[:80]!r} is no digest")
        return self.entries / digest

    def prepare(self, folder: Path) -> None:
        """Create ``folder`` (0700) or check that it is a directory of ours, and close it to others."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as fault:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), fault.filename) from None
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
        try:
            return self._read(digest, secret)
        except OSError as fault:
            if fault.errno != errno.ESTALE:
                raise
            return self._read(digest, secret)  # NFS: another client replaced the file between our open and read

    def _read(self, digest: str, secret: bytes) -> Entry:
        with self._opened(digest) as (file, size):
            read = _reader(file)
            header, hits = read_header(read, size, digest, secret)
            entry = Entry(read_payload(read, header), header)
            _mark_used(file, hits + 1)
            return entry

    def read_header(self, digest: str, secret: bytes = b"") -> tuple[Header, int]:
        """Header and number of hits, without reading the payload and without marking it as used."""
        with self._opened(digest) as (file, size):
            return read_header(_reader(file), size, digest, secret)

    def read_file(self, digest: str) -> bytes:
        """The whole file as it is, to be copied elsewhere. Not checked, not marked as used."""
        with self._opened(digest) as (file, size):
            return _reader(file)(size)

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

    def remove(self, digest: str, only: tuple[int, int] | None = None) -> None:
        """Take an entry away, whatever it is; none there is fine. ``only``: unless the file is no longer this one."""
        path = self.path(digest)
        with contextlib.suppress(FileNotFoundError):
            self._check_folder(self.entries)
            if only is None or _identity(path.lstat()) == only:
                _remove(path)

    def scan(self) -> list[FileInfo]:
        """Every file under a digest's name, least recently used first. Times in the future become now."""
        now = time.time()
        found = [info for item in self._listing(self.entries) if (info := _file_info(item, now)) is not None]
        return sorted(found, key=lambda info: info.used)

    def evict(self, digest: str) -> bool:
        """Remove an entry unless somebody is reading it."""
        path = self.path(digest)
        try:
            file = _open_entry(path)
        except FileNotFoundError:
            return True
        except (PermissionError, Rejected):
            _remove(path)
            return True
        try:
            if not _lock(file, exclusive=True):
                return False
            _remove(path)
            return True
        finally:
            os.close(file)

    def check(self, digest: str, secret: bytes = b"") -> None:
        """Read and check a whole entry without counting it as used.

        Raises:
            Rejected, OSError: as ``read``.
        """
        with self._opened(digest) as (file, size):
            read = _reader(file)
            read_payload(read, read_header(read, size, digest, secret)[0])

    def strays(self) -> list[Path]:
        """What is in the folder of entries and is neither an entry nor a file being written."""
        names = (item.name for item in self._listing(self.entries))
        return [self.entries / name for name in names if not is_digest(name) and not name.startswith(_TEMPORARY)]

    def remove_strays(self) -> None:
        """Remove them."""
        for path in self.strays():
            _remove(path)

    def sweep(self, older_than: float = _STALE_SECONDS) -> None:
        """Remove temporary files whose writers are gone, and locks that nobody holds, after so many seconds."""
        now = time.time()
        for item in self._listing(self.entries):
            if item.name.startswith(_TEMPORARY) and _age(item, now) >= older_than:
                with contextlib.suppress(OSError):
                    _remove(Path(item.path))
        for item in self._listing(self.locks):
            if _age(item, now) >= older_than:
                with contextlib.suppress(OSError):
                    _remove_lock(item.path)

    def _listing(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            self._check_folder(folder)
            with os.scandir(folder) as items:
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
        folder = self._check_folder(self.entries)
        file = _open_entry(path)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):
                raise Rejected("damaged", "it is not a regular file")
            if not _trusted(info):
                raise Rejected("foreign", f"it belongs to user {info.st_uid}, not to you")
            if info.st_mode & 0o022 and folder.st_mode & 0o011:
                raise Rejected("foreign", f"others may write to it; `chmod -R go-rwx {self.entries}` or move the cache")
            _lock(file, exclusive=False)
            yield file, info.st_size
        except Rejected as fault:
            fault.file = _identity(info)
            raise
        finally:
            os.close(file)


def is_digest(name: str) -> bool:
    """Whether ``name`` is a SHA-256 in lower-case hex, as every entry's file name is."""
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _trusted(info: os.stat_result) -> bool:
    """Ours or root's: root could replace this very program, so a cache that root has filled is no new risk."""
    return info.st_uid in (_user(), 0)


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


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


def _reader(file: int) -> Reader:
    def read(size: int) -> bytes:
        pieces: list[bytes] = []
        while size and (piece := os.read(file, size)):
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    return read


def _mark_used(file: int, hits: int) -> None:
    """Count a hit in place, which also sets the time of last use. A read-only cache simply does not count."""
    with contextlib.suppress(OSError):
        os.lseek(file, HITS_OFFSET, os.SEEK_SET)
        os.write(file, HITS.pack(hits % 2**64))


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
    if not is_digest(item.name):
        return None
    try:
        info = item.stat(follow_symlinks=False)
        if info.st_mtime > now + 60:
            os.utime(item.path, (now, now), follow_symlinks=False)
    except OSError:
        return None  # evicted meanwhile
    return FileInfo(item.name, info.st_size, min(info.st_mtime, now))


def _age(item: os.DirEntry[str], now: float) -> float:
    """Seconds since the last change. A time in the future counts as old: nothing here is written ahead of the clock."""
    try:
        return abs(now - item.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return 0.0


def _remove_lock(path: str) -> None:
    """Unlink a lock file unless it is held. Whoever waits for the unlinked file notices and makes a new one."""
    file = os.open(path, os.O_RDWR | _SAFELY)
    try:
        if _lock(file, exclusive=True):
            os.unlink(path)
    finally:
        os.close(file)


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
