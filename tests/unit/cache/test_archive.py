"""A cache in a file: what comes in is checked, and nothing in an archive names a place to write to."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from tpu_compile.cache import CacheKey, CacheStore
from tpu_compile.cache.archive import export_archive, import_archive
from tpu_compile.config import override
from tpu_compile.errors import CacheError

SUFFIXES = [".tar", ".tar.gz", ".tgz", ".zip"]


def key(number: int) -> CacheKey:
    return CacheKey.of(f"program {number}", {"number": str(number)})


@pytest.fixture
def filled(tmp_path: Path) -> CacheStore:
    """A store with three entries, one of them with hits."""
    store = CacheStore(tmp_path / "source", max_size=0)
    for number in range(3):
        assert store.put(key(number), os.urandom(100 * number), compile_seconds=number, metadata={"n": number})
    store.get(key(1))
    return store


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_cache_travels_whole(filled: CacheStore, store: CacheStore, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"warm{suffix}"
    sent = export_archive(filled, file)
    assert sent.copied == 3 and not sent.refused
    received = import_archive(store, file)
    assert (received.copied, received.present, received.bytes, received.refused) == (3, 0, sent.bytes, {})
    for number in range(3):
        ours, theirs = store.get(key(number)), filled.get(key(number))
        assert ours is not None and theirs is not None
        assert (ours.payload, ours.header) == (theirs.payload, theirs.header)
    assert import_archive(store, file).present == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_import_begins_without_hits(filled: CacheStore, store: CacheStore, tmp_path: Path) -> None:
    import_archive(store, export(filled, tmp_path))
    assert [info.hits for info in store.entries()] == [0, 0, 0]


def export(store: CacheStore, folder: Path) -> Path:
    file = folder / "archive.tar"
    export_archive(store, file)
    return file


def test_an_unknown_suffix_is_an_error(filled: CacheStore, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"must end in .tar"):
        export_archive(filled, tmp_path / "archive.rar")
    assert not list(tmp_path.glob("*archive*"))


def test_an_unwritable_target_is_an_error(filled: CacheStore, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="Cannot write"):
        export_archive(filled, tmp_path / "absent" / "archive.tar")


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"PK\x03\x04 broken"])
def test_what_is_no_archive_is_an_error(store: CacheStore, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "archive.tar"
    file.write_bytes(content)
    with pytest.raises(CacheError, match="Cannot read"):
        import_archive(store, file)


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_truncated_archive_stores_nothing_wrong(
    filled: CacheStore, store: CacheStore, tmp_path: Path, suffix: str, cut: float
) -> None:
    file = tmp_path / f"warm{suffix}"
    export_archive(filled, file)
    os.truncate(file, int(file.stat().st_size * cut))
    try:
        import_archive(store, file)
    except CacheError as fault:
        assert str(file) in str(fault)
    assert store.verify() == []


def test_damaged_entries_are_not_sent(filled: CacheStore, store: CacheStore, tmp_path: Path) -> None:
    os.truncate(filled.folder.path(key(0).digest), 100)
    sent = export_archive(filled, tmp_path / "a.tar")
    assert sent.copied == 2 and list(sent.refused) == [key(0).digest]
    assert import_archive(store, tmp_path / "a.tar").copied == 2


def _tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


ENTRY_NAME = f"entries/{key(0).digest}"
BAD_NAMES = [
    "../../escaped",
    "/etc/escaped",
    f"../entries/{key(0).digest}",
    f"/entries/{key(0).digest}",
    f"entries/../entries/{key(0).digest}",
    f"entries/{key(0).digest}/more",
    f"locks/{key(0).digest}",
    "entries/" + key(0).digest.upper(),
    "entries/notes.txt",
    f"{ENTRY_NAME}\n",
    "",
]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_any_other_name_refuses_the_whole_archive(
    filled: CacheStore, store: CacheStore, tmp_path: Path, name: str, kind: str
) -> None:
    data = filled.folder.read_file(key(0).digest)
    file = tmp_path / f"bad.{kind}"
    if kind == "tar":
        _tar(file, (_member(ENTRY_NAME), data), (_member(name), data))
    else:
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr(ENTRY_NAME, data)
            packed.writestr(zipfile.ZipInfo(name), data)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(CacheError, match="nothing was imported"):
        import_archive(store, file)
    assert set(tmp_path.rglob("*")) == before and list(store.entries()) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE])
def test_links_and_devices_refuse_the_whole_archive(store: CacheStore, tmp_path: Path, kind: bytes) -> None:
    file = _tar(tmp_path / "bad.tar", (_member(ENTRY_NAME, kind, "/etc/passwd"), b""))
    with pytest.raises(CacheError, match="a link, folder or device"):
        import_archive(store, file)


def test_entries_that_fail_their_check_are_refused_one_by_one(
    filled: CacheStore, store: CacheStore, tmp_path: Path
) -> None:
    good, other = (filled.folder.read_file(key(number).digest) for number in (1, 2))
    names = [f"entries/{key(number).digest}" for number in range(3)]
    contents = [b"not an entry", good, other[:-1]]
    file = _tar(tmp_path / "mixed.tar", *((_member(name), data) for name, data in zip(names, contents, strict=True)))
    result = import_archive(store, file)
    assert result.copied == 1 and set(result.refused) == {key(0).digest, key(2).digest}
    assert [info.header.name for info in store.entries()] == ["program 1"]


def test_with_a_key_only_entries_signed_with_it_travel(store: CacheStore, tmp_path: Path) -> None:
    source = CacheStore(tmp_path / "source", max_size=0)
    source.put(key(0), b"unsigned", compile_seconds=1, metadata={})
    with override(cache_key="ours"):
        source.put(key(1), b"signed", compile_seconds=1, metadata={})
        assert export_archive(source, tmp_path / "signed.tar").copied == 1
    assert export_archive(source, tmp_path / "all.tar").copied == 2
    with override(cache_key="theirs"):
        assert import_archive(store, tmp_path / "signed.tar").copied == 0
    with override(cache_key="ours"):
        result = import_archive(store, tmp_path / "all.tar")
    assert result.copied == 1 and list(result.refused) == [key(0).digest]
