"""The file: a zip whose members lie uncompressed, listed with size and SHA-256 in ``manifest.json``, whose own SHA-256
is the zip's comment."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tpu_compile.errors import DamagedFile, ExportError, NewerFile

FORMAT = 1
"""Grows when a reader of the old format would get a file of the new one wrong."""

_MANIFEST = "manifest.json"
_COMMENT = b"tpu-compile export "
_EPOCH = (1980, 1, 1, 0, 0, 0)
_LOCAL_HEADER = struct.Struct("<26xHH")

_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, struct.error)

Content = bytes | Iterable[bytes | memoryview]


def write(path: Path, manifest: Mapping[str, Any], members: Mapping[str, Content]) -> None:
    """Write a file under a temporary name, then move it into place. Equal contents give equal bytes.

    Raises:
        ExportError: it cannot be written there.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                _write(stream, manifest, members)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error}") from error


def _write(stream: IO[bytes], manifest: Mapping[str, Any], members: Mapping[str, Content]) -> None:
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        table = {name: _member(archive, name, content) for name, content in members.items()}
        text = encoded({"format": FORMAT, **manifest, "members": table})
        _member(archive, _MANIFEST, text)
        archive.comment = _COMMENT + hashlib.sha256(text).hexdigest().encode()


def _member(archive: zipfile.ZipFile, name: str, content: Content) -> dict[str, Any]:
    total, digest = 0, hashlib.sha256()
    with archive.open(zipfile.ZipInfo(name, _EPOCH), "w", force_zip64=True) as member:
        for piece in [content] if isinstance(content, bytes) else content:
            member.write(piece)
            digest.update(piece)
            total += len(piece)
    return {"size": total, "sha256": digest.hexdigest()}


class Archive:
    """An open file, mapped into memory: members are views of it, checked when the file is opened.

    Raises:
        DamagedFile: it is no such file, or not as it was written.
        NewerFile: its format is newer than this version reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
                # copied on write: a buffer that the program overwrites must not reach the file
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
                places = {info.filename: self._place(info) for info in archive.infolist()}
                comment = archive.comment
        except OSError as error:
            raise DamagedFile(f"{path} cannot be read: {error}") from error
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError) as error:
            raise DamagedFile(f"{path} is no file of tpu_compile.export: {error}") from error
        self._places = places
        self.manifest = self._read_manifest(comment)
        self._check()

    def _place(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"its member {info.filename!r} is compressed")
        name_size, extra_size = _LOCAL_HEADER.unpack_from(self._map, info.header_offset)
        start = info.header_offset + _LOCAL_HEADER.size + name_size + extra_size
        if start + info.file_size > len(self._map):
            raise ValueError(f"its member {info.filename!r} ends beyond it")
        return start, info.file_size

    def view(self, name: str) -> memoryview:
        """A member's bytes.

        Raises:
            DamagedFile: there is no such member.
        """
        if name not in self._places:
            raise DamagedFile(f"{self.path} has no member {name!r}")
        start, size = self._places[name]
        return memoryview(self._map)[start : start + size]

    def json(self, name: str) -> Any:
        """A member as JSON.

        Raises:
            DamagedFile: it is none.
        """
        try:
            return json.loads(bytes(self.view(name)))
        except ValueError as error:
            raise DamagedFile(f"{self.path}: {name} is no JSON: {error}") from error

    def _read_manifest(self, comment: bytes) -> dict[str, Any]:
        if not comment.startswith(_COMMENT):
            raise DamagedFile(f"{self.path} is a zip file, but none of tpu_compile.export")
        digest = hashlib.sha256(self.view(_MANIFEST)).hexdigest().encode()
        if comment != _COMMENT + digest:
            raise DamagedFile(f"{self.path} is damaged: its manifest is not the one that was written")
        manifest = self.json(_MANIFEST)
        if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
            raise DamagedFile(f"{self.path}: its manifest does not say what format it is in")
        if manifest["format"] > FORMAT:
            made_by = manifest.get("made_by", {})
            raise NewerFile(
                f"{self.path} has format {manifest['format']}, this version of tpu_compile reads up to {FORMAT}. "
                f"It was made by {made_by}. Upgrade tpu_compile, or export again with this version."
            )
        return manifest

    def _check(self) -> None:
        table = self.reading(lambda: {n: (m["size"], m["sha256"]) for n, m in self.manifest["members"].items()})
        if set(table) != set(self._places) - {_MANIFEST}:
            raise DamagedFile(f"{self.path} is damaged: its members are not those that were written")
        for name, (size, digest) in table.items():
            view = self.view(name)
            if len(view) != size or hashlib.sha256(view).hexdigest() != digest:
                raise DamagedFile(f"{self.path} is damaged: {name} is not what was written")

    def reading(self, read: Callable[[], Any]) -> Any:
        """``read()``, with what malformed contents raise as a DamagedFile."""
        try:
            return read()
        except _MALFORMED as error:
            raise DamagedFile(f"{self.path} does not say what it should: {type(error).__name__}: {error}") from error


def pieces(view: memoryview, size: int = 1 << 24) -> Iterator[memoryview]:
    """A large view piece by piece, for writing."""
    return (view[start : start + size] for start in range(0, len(view), size))


def encoded(value: Any) -> bytes:
    """A value as JSON, for a member."""
    return json.dumps(value, separators=(",", ":")).encode()
