"""A cache in one file, to be built in CI and shipped to the machines: ``.tar``, ``.tar.gz`` or ``.zip``.

Only entries are written, and only entries are read: every member is called ``entries/<digest>``, and is checked like an
entry found on disk before it is stored under that digest. No path from an archive is ever used.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tpu_compile.cache.disk import is_digest
from tpu_compile.cache.entry import Rejected, decode, without_hits
from tpu_compile.cache.store import PICKLED, CacheStore, kind
from tpu_compile.errors import CacheError

_PREFIX = "entries/"
_Member = tuple[str, Callable[[], bytes]]


@dataclass
class Transfer:
    """What was copied, what was there already, and what was refused and why. ``bytes`` counts the copied files."""

    copied: int = 0
    present: int = 0
    bytes: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def export_archive(store: CacheStore, target: Path) -> Transfer:
    """Write every sound entry into ``target``, whole or not at all.

    Raises:
        CacheError: the file cannot be written, or its suffix is unknown.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    result = Transfer()
    with _explained(f"Cannot write {target}"):
        try:
            with _writer(target, temporary) as add:
                for file in store.folder.scan():
                    _export(store, file.digest, add, result)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return result


def import_archive(store: CacheStore, source: Path) -> Transfer:
    """Store the entries of an archive that are sound and not here yet. They are native code: know the sender.

    Raises:
        CacheError: it is no archive, or it holds anything but entries; then nothing is imported.
    """
    result = Transfer()
    with _explained(f"Cannot read {source}"), _reader(source) as members:
        for name, _ in members:
            if not (name.startswith(_PREFIX) and is_digest(name.removeprefix(_PREFIX))):
                raise CacheError(f"{source} is refused, nothing was imported: {name!r} is no cache entry.")
        here = {file.digest for file in store.folder.scan()}
        for name, read in members:
            digest = name.removeprefix(_PREFIX)
            if digest in here:
                result.present += 1
            else:
                _import(store, digest, read(), result)
    return result


def _export(store: CacheStore, digest: str, add: Callable[[str, bytes], None], result: Transfer) -> None:
    try:
        data = without_hits(store.folder.read_file(digest))
        decode(data, digest, store.secret)
    except (Rejected, OSError) as fault:
        result.refused[digest] = str(fault)
        return
    add(_PREFIX + digest, data)
    result.copied += 1
    result.bytes += len(data)


def _import(store: CacheStore, digest: str, data: bytes, result: Transfer) -> None:
    try:
        entry = decode(data, digest, store.secret)
    except Rejected as fault:
        result.refused[digest] = str(fault)
        return
    if kind(entry.header.parts) in PICKLED:
        result.refused[digest] = "it is pickled by torch: such entries are made where they are used"
        return
    if not store.write(entry.header, [data]):
        result.refused[digest] = "it could not be written, or is larger than the cache may be"
        return
    result.copied += 1
    result.bytes += len(data)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Library and system errors as one CacheError that says what could not be done."""
    try:
        yield
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError, RuntimeError) as fault:
        if isinstance(fault, CacheError) and not isinstance(fault, Rejected):
            raise
        raise CacheError(f"{what}: {getattr(fault, 'strerror', None) or fault}") from fault


@contextlib.contextmanager
def _writer(target: Path, temporary: Path) -> Iterator[Callable[[str, bytes], None]]:
    if target.suffix == ".zip":
        with zipfile.ZipFile(temporary, "x") as packed:
            yield lambda name, data: packed.writestr(name, data)
    elif target.suffix in (".tar", ".tgz") or target.name.endswith(".tar.gz"):
        with tarfile.open(temporary, "x" if target.suffix == ".tar" else "x:gz") as tar:
            yield lambda name, data: tar.addfile(_tar_member(name, len(data)), io.BytesIO(data))
    else:
        raise CacheError(f"{target}: the name must end in .tar, .tar.gz, .tgz or .zip.")


def _tar_member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, int(time.time())
    return member


@contextlib.contextmanager
def _reader(source: Path) -> Iterator[list[_Member]]:
    """All members with a function that reads each. Anything but a plain file appears under a name that is refused."""
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as packed:
            yield [(item.filename, partial(packed.read, item)) for item in packed.infolist()]
    else:
        with _open_tar(source) as tar:
            yield [(_tar_name(item), partial(_tar_read, tar, item)) for item in tar.getmembers()]


def _open_tar(source: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(source, "r")
    except tarfile.ReadError:
        raise tarfile.ReadError("it is neither a tar nor a zip archive") from None


def _tar_name(item: tarfile.TarInfo) -> str:
    return item.name if item.isreg() else f"{item.name} (a link, folder or device)"


def _tar_read(tar: tarfile.TarFile, item: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(item)
    return file.read() if file is not None else b""
