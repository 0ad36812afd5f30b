"""The file format: what was put comes back, and nothing that differs from it in any bit is ever used."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
import zlib
from typing import Any

import pytest

from tpu_compile.cache import CacheKey, Entry
from tpu_compile.cache.entry import HITS, HITS_OFFSET, MAGIC, PREAMBLE, Rejected, decode, encode
from tpu_compile.cache.key import FORMAT

KEY = CacheKey.of("add", {"program": b"\0\1", "arguments": "f32[2]"})
PAYLOADS = {"text": b"abc" * 1000, "noise": os.urandom(300), "one byte": b"x", "empty": b""}


def _file(payload: bytes = PAYLOADS["noise"], secret: bytes = b"", key: CacheKey = KEY) -> bytes:
    about: dict[str, Any] = {"compile_seconds": 1.5, "created": 1e9, "versions": {"jaxlib": "0"}}
    return b"".join(encode(key, payload, **about, metadata={"outputs": [1]}, secret=secret))


def _forged(**changes: Any) -> bytes:
    """An entry whose header says something else, with its seal made to fit."""
    data = _file()
    length = PREAMBLE.unpack_from(data)[2]
    header = {**json.loads(data[PREAMBLE.size : PREAMBLE.size + length]), **changes}
    return _sealed(json.dumps(header).encode(), data[PREAMBLE.size + length :])


def _sealed(text: bytes, payload: bytes) -> bytes:
    start = struct.pack("<8sII", MAGIC, FORMAT, len(text))
    return start + bytes(8) + hashlib.sha256(start + text).digest() + bytes(32) + text + payload


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_what_was_put_comes_back(payload: bytes) -> None:
    entry = decode(_file(payload), KEY.digest)
    assert isinstance(entry, Entry) and entry.payload == payload
    assert (entry.compile_seconds, entry.metadata, entry.header.created) == (1.5, {"outputs": [1]}, 1e9)
    assert entry.header.parts == KEY.readable and entry.header.name == "add"
    assert "python" in entry.header.versions and entry.header.versions["jaxlib"] == "0"


def test_compression_only_where_it_pays() -> None:
    assert decode(_file(PAYLOADS["text"]), KEY.digest).header.codec == "zlib"
    assert decode(_file(PAYLOADS["noise"]), KEY.digest).header.codec == "none"


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_every_shorter_file_is_refused(payload: bytes) -> None:
    data = _file(payload)
    for length in range(len(data)):
        with pytest.raises(Rejected):
            decode(data[:length], KEY.digest)


@pytest.mark.parametrize("extra", [b"\0", b"junk" * 100])
def test_a_longer_file_is_refused(extra: bytes) -> None:
    with pytest.raises(Rejected, match="bytes instead of"):
        decode(_file() + extra, KEY.digest)


@pytest.mark.parametrize("secret", [b"", b"secret"], ids=["unsigned", "signed"])
def test_every_flipped_bit_is_noticed(secret: bytes) -> None:
    """But for the hit counter, and the signature when nobody asks for it: there any value is a valid one."""
    data = _file(secret=secret)
    free = range(HITS_OFFSET, HITS_OFFSET + HITS.size)
    unused = range(0) if secret else range(PREAMBLE.size - 32, PREAMBLE.size)
    for bit in range(len(data) * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        if bit // 8 in free or bit // 8 in unused:
            assert decode(bytes(broken), KEY.digest, secret).payload == PAYLOADS["noise"]
        else:
            with pytest.raises(Rejected):
                decode(bytes(broken), KEY.digest, secret)


@pytest.mark.parametrize(("version", "kind"), [(FORMAT - 1, "older"), (FORMAT + 1, "newer")])
def test_another_format_is_refused(version: int, kind: str) -> None:
    data = bytearray(_file())
    data[8:12] = struct.pack("<I", version)
    with pytest.raises(Rejected, match=f"its format is {version}") as caught:
        decode(bytes(data), KEY.digest)
    assert caught.value.kind == kind


def test_an_entry_under_another_key_is_refused() -> None:
    with pytest.raises(Rejected, match=f"belongs to key {KEY.digest[:12]}"):
        decode(_file(), CacheKey.of("add", {"arguments": "f32[3]"}).digest)


@pytest.mark.parametrize(
    "changes",
    [
        {"stored_size": "300"},
        {"stored_size": -1},
        {"payload_size": -1},
        {"payload_size": None},
        {"parts": {"arguments": 1}},
        {"parts": []},
        {"metadata": "x"},
        {"sha256": 3},
        {"surprise": 1},
        {"codec": "lzma"},
        {"payload_size": 299},
        {"created": "yesterday"},
    ],
    ids=str,
)
def test_a_well_sealed_header_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Rejected):
        decode(_forged(**changes), KEY.digest)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_a_well_sealed_header_that_is_no_header_is_refused(text: bytes) -> None:
    with pytest.raises(Rejected):
        decode(_sealed(text, b""), KEY.digest)


@pytest.mark.parametrize("stored", [zlib.compress(bytes(10**7)), b"no zlib stream", zlib.compress(b"short")])
def test_a_payload_that_decompresses_to_something_else_is_refused(stored: bytes) -> None:
    """Also one that would fill the memory: decompression stops one byte after the declared size."""
    header = dataclasses.asdict(decode(_file(), KEY.digest).header)
    header |= {"codec": "zlib", "stored_size": len(stored), "payload_size": 1000}
    header["sha256"] = hashlib.sha256(stored).hexdigest()
    with pytest.raises(Rejected, match="payload"):
        decode(_sealed(json.dumps(header).encode(), stored), KEY.digest)


def test_signatures() -> None:
    signed, unsigned = _file(secret=b"ours"), _file()
    assert decode(signed, KEY.digest, b"ours").payload == decode(signed, KEY.digest).payload
    for data, secret, state in ((unsigned, b"ours", "is not signed"), (signed, b"theirs", "signed with another key")):
        with pytest.raises(Rejected, match=state) as caught:
            decode(data, KEY.digest, secret)
        assert caught.value.kind == "unsigned"


def test_a_signature_cannot_be_moved_to_another_entry() -> None:
    signed, other = _file(secret=b"ours"), bytearray(_file(b"another payload"))
    other[PREAMBLE.size - 32 : PREAMBLE.size] = signed[PREAMBLE.size - 32 : PREAMBLE.size]
    with pytest.raises(Rejected, match="signed with another key"):
        decode(bytes(other), KEY.digest, b"ours")


def test_metadata_must_be_json() -> None:
    with pytest.raises(TypeError):
        encode(KEY, b"", compile_seconds=1, created=0, versions={}, metadata={"x": object()})
