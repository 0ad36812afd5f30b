"""The cache key: labelled parts, one digest over all of them, and the difference between two keys in user terms."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

FORMAT = 1
"""Version of the digest and of the entry file. A change to either raises it: older entries become misses."""


@dataclass(frozen=True)
class CacheKey:
    """What decides a compiled program. ``name`` is for people and is not hashed; ``digest`` is sha256 over ``parts``.

    ``parts`` are sorted by label. A text part is stored readably in the entry, a bytes part only as size and hash.
    """

    name: str
    parts: tuple[tuple[str, str | bytes], ...]
    readable: Mapping[str, str] = field(init=False, repr=False, compare=False)
    digest: str = field(init=False, compare=False)

    @classmethod
    def of(cls, name: str, parts: Mapping[str, str | bytes]) -> CacheKey:
        """A key from parts in any order.

        Raises:
            TypeError: a part that is neither text nor bytes (its ``str()`` could hide a difference or an address).
        """
        for label, value in parts.items():
            if not isinstance(label, str) or not isinstance(value, (str, bytes)):
                raise TypeError(f"key part {label!r} is {type(value).__name__}; parts are text or bytes")
        return cls(name, tuple(sorted(parts.items())))

    def __post_init__(self) -> None:
        readable = {label: value if isinstance(value, str) else summarize(value) for label, value in self.parts}
        object.__setattr__(self, "readable", readable)
        object.__setattr__(self, "digest", _digest(self.parts, readable))

    def diff(self, other: CacheKey | Mapping[str, str]) -> list[str]:
        """What separates this key from ``other``, a key or a stored one's ``readable`` parts; one line each."""
        from tpu_compile.cache.explain import differences

        return differences(self.readable, other.readable if isinstance(other, CacheKey) else other)


def summarize(value: bytes) -> str:
    """How a bytes part is written in an entry and hashed into the digest: ``sha256:<hex>:<size>``."""
    return f"sha256:{hashlib.sha256(value).hexdigest()}:{len(value)}"


def _digest(parts: tuple[tuple[str, str | bytes], ...], readable: Mapping[str, str]) -> str:
    """sha256 over labelled parts. Each field carries its length and kind, so that no two part lists read the same."""
    total = hashlib.sha256(b"tpu-compile cache key" + struct.pack("<I", FORMAT))
    for label, value in parts:
        for item in _fields(label, value, readable[label]):
            total.update(struct.pack("<Q", len(item)) + item)
    return total.hexdigest()


def _fields(label: str, value: str | bytes, readable: str) -> Iterator[bytes]:
    yield label.encode("utf-8", "surrogatepass")
    yield b"text" if isinstance(value, str) else b"bytes"
    yield readable.encode("utf-8", "surrogatepass")
