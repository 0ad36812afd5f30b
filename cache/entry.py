"""One entry, one file: preamble, JSON header, payload. Everything in it is checked before anything of it is used.

    offset  bytes  field
    0       8      magic; its non-ASCII and newline bytes catch text-mode copies
    8       4      FORMAT
    12      4      length of the header
    16      8      hits; the only field ever written in place, outside both seals: any value is a valid one
    24      32     SHA-256 of the first 16 bytes and the header
    56      32     HMAC-SHA256 of the same with the user's key, or zeros
    88      ...    header: UTF-8 JSON, holding the SHA-256 and the length of what follows
    ...     ...    payload as stored (zlib, or as it is where that does not pay)

Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_compile.cache.key import FORMAT, CacheKey
from tpu_compile.errors import CacheError

MAGIC = b"\x89TPUC\r\n\x1a"
PREAMBLE = struct.Struct("<8sIIQ32s32s")
HITS_OFFSET = 16
HITS = struct.Struct("<Q")
MAX_HEADER = 64 * 2**20
_SEALED = struct.Struct("<8sII")
_NO_TAG = bytes(32)
_LEVEL = 1
"""zlib's fastest: executables shrink 5-fold at it, and decompressing costs 2 % of what PJRT needs to load them."""


class Rejected(CacheError):
    """An entry that must not be used. ``kind``: damaged, older, newer, unsigned or foreign."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.file: tuple[int, int] | None = None
        """Device and inode of the file that was read: what may be removed for it, and nothing put there since."""


@dataclass(frozen=True)
class Header:
    """What an entry says about itself. Sizes in bytes, ``created`` in seconds since the epoch."""

    name: str
    digest: str
    parts: Mapping[str, str]
    codec: str
    stored_size: int
    payload_size: int
    sha256: str
    compile_seconds: float
    created: float
    versions: Mapping[str, str]
    metadata: Mapping[str, Any]


_TYPES = {
    **dict.fromkeys(("name", "digest", "codec", "sha256"), str),
    **dict.fromkeys(("stored_size", "payload_size"), int),
    **dict.fromkeys(("compile_seconds", "created"), float),
    **dict.fromkeys(("parts", "versions", "metadata"), dict),
}


@dataclass(frozen=True)
class Entry:
    """A checked entry: the payload as it was put, and its header."""

    payload: bytes
    header: Header

    @property
    def compile_seconds(self) -> float:
        """What compiling it cost, once."""
        return self.header.compile_seconds

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the caller stored beside the payload (JSON values)."""
        return self.header.metadata


@dataclass(frozen=True)
class Preamble:
    """The fixed part of a file, checked for magic and version only."""

    header_length: int
    hits: int
    seal: bytes
    tag: bytes

    @classmethod
    def read(cls, data: bytes) -> Preamble:
        """Parse the first ``PREAMBLE.size`` bytes."""
        if len(data) < PREAMBLE.size:
            raise Rejected("damaged", f"it has {len(data)} bytes, too few for an entry")
        magic, version, header_length, hits, seal, tag = PREAMBLE.unpack_from(data)
        if magic != MAGIC:
            raise Rejected("damaged", "it is not an entry of this cache (wrong magic)")
        if version != FORMAT:
            kind = "older" if version < FORMAT else "newer"
            raise Rejected(kind, f"its format is {version}, this version writes {FORMAT}")
        if header_length > MAX_HEADER:
            raise Rejected("damaged", f"its header claims {header_length} bytes")
        return cls(header_length, hits, seal, tag)


def encode(
    key: CacheKey,
    payload: bytes,
    *,
    compile_seconds: float,
    created: float,
    versions: Mapping[str, str],
    metadata: Mapping[str, Any],
    secret: bytes = b"",
) -> list[bytes]:
    """The file of an entry, in two pieces: preamble with header, and stored payload.

    Raises:
        TypeError: metadata that JSON cannot hold.
    """
    stored = zlib.compress(payload, _LEVEL)
    codec = "zlib"
    if len(stored) > 0.9 * len(payload):
        stored, codec = payload, "none"
    header = {
        "name": key.name,
        "digest": key.digest,
        "parts": dict(key.readable),
        "codec": codec,
        "stored_size": len(stored),
        "payload_size": len(payload),
        "sha256": hashlib.sha256(stored).hexdigest(),
        "compile_seconds": float(compile_seconds),
        "created": float(created),
        "versions": {"python": sys.version.split()[0], **versions},
        "metadata": dict(metadata),
    }
    text = json.dumps(header, allow_nan=False).encode()
    sealed = _SEALED.pack(MAGIC, FORMAT, len(text)) + text
    tag = _tag(secret, sealed) if secret else _NO_TAG
    return [PREAMBLE.pack(MAGIC, FORMAT, len(text), 0, hashlib.sha256(sealed).digest(), tag) + text, stored]


Reader = Callable[[int], bytes]
"""Reads up to so many bytes, fewer only at the end: of a file, or of bytes at hand."""


def decode(data: bytes, digest: str, secret: bytes = b"") -> Entry:
    """The checked entry in ``data``, which came from a remote store or an archive.

    Raises:
        Rejected: it must not be used.
    """
    read = io.BytesIO(data).read
    header, _ = read_header(read, len(data), digest, secret)
    return Entry(read_payload(read, header), header)


def without_hits(data: bytes) -> bytes:
    """The file of an entry as it was when it was put: hits are counted where they happen."""
    return data[:HITS_OFFSET] + HITS.pack(0) + data[HITS_OFFSET + HITS.size :]


def read_header(read: Reader, size: int, digest: str, secret: bytes = b"") -> tuple[Header, int]:
    """The checked header of an entry of ``size`` bytes in all, and its number of hits."""
    preamble = Preamble.read(read(PREAMBLE.size))
    if size < PREAMBLE.size + preamble.header_length:
        raise Rejected("damaged", "it ends inside its header")
    header = _check_header(preamble, read(preamble.header_length), digest, secret)
    expected = PREAMBLE.size + preamble.header_length + header.stored_size
    if size != expected:
        raise Rejected("damaged", f"it has {size} bytes instead of {expected}")
    return header, preamble.hits


def _check_header(preamble: Preamble, text: bytes, digest: str, secret: bytes) -> Header:
    """The header, once its seal, the signature (when ``secret`` is set) and the digest it was asked for under agree."""
    sealed = _SEALED.pack(MAGIC, FORMAT, preamble.header_length) + text
    if len(text) != preamble.header_length or hashlib.sha256(sealed).digest() != preamble.seal:
        raise Rejected("damaged", "its header does not match its checksum")
    if secret and not hmac.compare_digest(_tag(secret, sealed), preamble.tag):
        state = "is not signed" if preamble.tag == _NO_TAG else "is signed with another key"
        raise Rejected("unsigned", f"it {state}, and TPU_COMPILE_CACHE_KEY is set")
    header = _parse(text)
    if header.digest != digest:
        raise Rejected("damaged", f"it belongs to key {header.digest[:12]}")
    return header


def read_payload(read: Reader, header: Header) -> bytes:
    """The payload as it was put: checked first, decompressed after, never beyond its declared size."""
    stored = read(header.stored_size)
    if len(stored) != header.stored_size or hashlib.sha256(stored).hexdigest() != header.sha256:
        raise Rejected("damaged", "its payload does not match its checksum")
    if header.codec not in ("none", "zlib"):
        raise Rejected("newer", f"its payload is compressed with {header.codec!r}")
    payload = stored if header.codec == "none" else _decompress(stored, header.payload_size)
    if len(payload) != header.payload_size:
        raise Rejected("damaged", f"its payload does not have the {header.payload_size} bytes it claims")
    return payload


def _decompress(stored: bytes, size: int) -> bytes:
    """At most ``size + 1`` bytes: a signature says who wrote an entry, not that it fits into memory."""
    try:
        return zlib.decompressobj().decompress(stored, size + 1)
    except zlib.error as error:
        raise Rejected("damaged", f"its payload cannot be decompressed: {error}") from None


def _parse(text: bytes) -> Header:
    """The header's fields, each of its declared type."""
    try:
        fields = json.loads(text)
        header = Header(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise Rejected("damaged", f"its header cannot be read: {error}") from None
    wrong = [name for name, kind in _TYPES.items() if not isinstance(fields[name], kind)]
    wrong = wrong or [name for name in ("stored_size", "payload_size") if fields[name] < 0]
    wrong = wrong or ["parts"] * (not all(isinstance(value, str) for value in header.parts.values()))
    if wrong:
        raise Rejected("damaged", f"its header makes no sense: {', '.join(wrong)}")
    return header


def _tag(secret: bytes, sealed: bytes) -> bytes:
    return hmac.digest(secret, sealed, "sha256")
