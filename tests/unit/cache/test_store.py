"""The store: what it counts, and that no fault of a file or directory ever reaches the caller."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_compile.cache import CacheKey, CacheStore, disk, open_store
from tpu_compile.cache.entry import PREAMBLE
from tpu_compile.config import override
from tpu_compile.errors import CacheError, CacheWarning
from tpu_compile.stats import on_event, stats

PAYLOAD = b"native code " * 500


def put(store: CacheStore, key: CacheKey, payload: bytes = PAYLOAD) -> bool:
    return store.put(key, payload, compile_seconds=2.5, metadata={"outputs": "f32[8]"})


def test_a_put_is_found_again_with_all_that_was_said_about_it(store: CacheStore, key: CacheKey) -> None:
    assert store.get(key) is None
    assert put(store, key)
    entry = store.get(key)
    assert entry is not None and entry.payload == PAYLOAD
    assert (entry.compile_seconds, entry.metadata) == (2.5, {"outputs": "f32[8]"})
    figures = stats()
    assert (figures["disk_hits"], figures["disk_misses"], figures["disk_puts"], figures["cache_faults"]) == (1, 1, 1, 0)
    assert figures["saved_seconds"] == 2.5 and figures["cache_seconds"] > 0


def test_a_name_does_not_decide(store: CacheStore, key: CacheKey) -> None:
    put(store, key)
    assert store.get(CacheKey("another name", key.parts)) is not None


def test_hits_and_last_use_are_kept_in_the_entry(store: CacheStore, key: CacheKey) -> None:
    put(store, key)
    path = store.folder.path(key.digest)
    os.utime(path, (0, 0))
    for _ in range(3):
        store.get(key)
    (info,) = store.entries()
    assert info.hits == 3 and info.used > 1e9 and info.size == path.stat().st_size
    assert info.seconds_saved == 7.5


def test_events(store: CacheStore, key: CacheKey) -> None:
    seen: list[tuple[str, object]] = []
    stop = on_event(lambda name, details: seen.append((name, details.get("compile_time_saved_sec"))))
    store.get(key)
    put(store, key)
    store.get(key)
    stop()
    store.get(key)
    prefix = "compilation_cache/cache_"
    assert seen == [(prefix + "misses", None), (prefix + "puts", None), (prefix + "hits", 2.5)]


def test_modes_are_private_under_any_umask(store: CacheStore, key: CacheKey) -> None:
    before = os.umask(0)
    try:
        put(store, key)
        with store.compiling(CacheKey.of("other", {"a": "b"})):
            pass
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [store.folder.root, *store.folder.root.rglob("*")]}
    assert set(modes.values()) == {0o700, 0o600}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())


def test_an_open_directory_of_ours_is_closed(store: CacheStore, key: CacheKey) -> None:
    store.folder.entries.mkdir(parents=True)
    store.folder.entries.chmod(0o777)
    put(store, key)
    assert stat.S_IMODE(store.folder.entries.stat().st_mode) == 0o700


def test_fast_compiles_and_giant_entries_are_not_stored(cache_dir: Path, key: CacheKey) -> None:
    with override(cache_min_compile_seconds=3.0):
        assert not put(CacheStore(cache_dir), key)
    assert not put(CacheStore(cache_dir, max_size=100), key)
    assert list(CacheStore(cache_dir).entries()) == []


def test_knobs_open_the_store(cache_dir: Path) -> None:
    found = open_store()
    assert found is not None and found.folder.root == cache_dir and found.max_size == 20 * 2**30
    assert found.remote is None and open_store() is found, "one object keeps count of sizes and remote failures"
    with override(cache=False):
        assert open_store() is None
    with override(cache_remote="memory://x", cache_remote_write=True, cache_max_size=7):
        other = open_store()
    assert other is not None and other.remote is not None and other.remote.write and other.max_size == 7


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    path.write_bytes(data)


def _older(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + struct.pack("<I", 0) + data[12:])


def _directory(path: Path) -> None:
    path.unlink()
    (path / "something").mkdir(parents=True)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _symlink(path: Path) -> None:
    outside = path.parents[2] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def _of_another_key(path: Path) -> None:
    other = CacheKey.of("other", {"a": "b"})
    put(CacheStore(path.parents[1], max_size=0), other)
    (path.parent / other.digest).rename(path)


def _text_mode_copy(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n"))


DAMAGE = [_truncate, _empty, _flip, _older, _directory, _fifo, _symlink, _of_another_key, _text_mode_copy]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__.strip("_"))
def test_a_damaged_entry_is_a_miss_with_one_warning_and_is_repaired(
    store: CacheStore, key: CacheKey, damage: Callable[[Path], None]
) -> None:
    put(store, key)
    path = store.folder.path(key.digest)
    damage(path)
    with pytest.warns(CacheWarning, match="is not used"):
        assert store.get(key) is None
    assert not os.path.lexists(path)
    assert stats()["cache_faults"] == 1
    assert put(store, key)
    entry = store.get(key)
    assert entry is not None and entry.payload == PAYLOAD
    damage(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get(key) is None, "one warning a process"
    assert stats()["cache_faults"] == 2
    with override(raise_cache_errors=True):
        put(store, key)
        damage(path)
        with pytest.raises(CacheError, match=key.digest):
            store.get(key)


def test_what_a_symlink_points_to_is_left_alone(store: CacheStore, key: CacheKey) -> None:
    put(store, key)
    path = store.folder.path(key.digest)
    _symlink(path)
    with pytest.warns(CacheWarning, match="symbolic link"):
        store.get(key)
    outside = path.parents[2] / "outside"
    assert outside.stat().st_size > len(b"") and not os.path.lexists(path)
    outside.unlink()


def test_an_entry_of_somebody_else_is_refused(
    store: CacheStore, key: CacheKey, give_away: Callable[[Path], None]
) -> None:
    put(store, key)
    give_away(store.folder.path(key.digest))
    with pytest.warns(CacheWarning, match="belongs to user"):
        assert store.get(key) is None


def test_an_entry_that_others_may_write_to_is_refused(store: CacheStore, key: CacheKey) -> None:
    put(store, key)
    store.folder.path(key.digest).chmod(0o666)
    assert store.get(key) is not None, "nobody else gets into the directory"
    store.folder.entries.chmod(0o755)
    with pytest.warns(CacheWarning, match="others may write to it"):
        assert store.get(key) is None
    assert put(store, key) and store.get(key) is not None


def test_a_directory_of_somebody_else_is_refused_and_left_alone(
    store: CacheStore, key: CacheKey, give_away: Callable[[Path], None]
) -> None:
    put(store, key)
    give_away(store.folder.entries)
    with pytest.warns(CacheWarning, match="belongs to user"):
        assert store.get(key) is None
    assert not put(store, key)
    assert store.folder.path(key.digest).exists()
    with pytest.raises(CacheError, match="belongs to user"):
        list(store.entries())


def test_a_symlink_in_place_of_the_directory_is_refused_and_not_followed(store: CacheStore, key: CacheKey) -> None:
    put(store, key)
    elsewhere = store.folder.root / "elsewhere"
    store.folder.entries.rename(elsewhere)
    store.folder.entries.symlink_to(elsewhere)
    with pytest.warns(CacheWarning, match="not a directory"):
        assert store.get(key) is None
    assert not put(store, key)
    assert [path.name for path in elsewhere.iterdir()] == [key.digest]


def test_the_cache_directory_itself_may_be_a_symlink(tmp_path: Path, key: CacheKey) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "big disk")
    store = CacheStore(tmp_path / "cache")
    assert put(store, key) and store.get(key) is not None


def test_an_unreadable_entry_is_a_miss_and_is_repaired(unprivileged: Path, key: CacheKey) -> None:
    store = CacheStore(unprivileged)
    put(store, key)
    store.folder.path(key.digest).chmod(0)
    with pytest.warns(CacheWarning, match="permission denied"):
        assert store.get(key) is None
    assert put(store, key) and store.get(key) is not None


def test_a_read_only_cache_hits_and_does_not_store(unprivileged: Path, key: CacheKey) -> None:
    store = CacheStore(unprivileged)
    put(store, key)
    store.folder.path(key.digest).chmod(0o400)
    for folder in (store.folder.entries, store.folder.root):
        folder.chmod(0o500)
    other = CacheKey.of("other", {"a": "b"})
    assert store.get(key) is not None and store.get(other) is None
    with pytest.warns(CacheWarning, match="TPU_COMPILE_CACHE_DIR") as caught, store.compiling(other) as entry:
        assert entry is None
        assert not put(store, other)
    assert len(caught) == 1, "locking and writing fail for one reason: one warning"


def test_an_unwritable_place_is_a_warning(unprivileged: Path, key: CacheKey) -> None:
    unprivileged.chmod(0o500)
    store = CacheStore(unprivileged / "cache")
    assert store.get(key) is None
    with pytest.warns(CacheWarning, match="permission denied"):
        assert not put(store, key)


def test_a_file_where_the_directory_should_be(tmp_path: Path, key: CacheKey) -> None:
    (tmp_path / "cache").write_text("a file")
    store = CacheStore(tmp_path / "cache")
    with pytest.warns(CacheWarning, match="a file is in the way") as caught, store.compiling(key) as entry:
        assert entry is None and store.get(key) is None
        assert not put(store, key)
    assert len(caught) == 1
    assert (tmp_path / "cache").read_text() == "a file"


def test_the_directory_may_vanish_at_any_time(store: CacheStore, key: CacheKey) -> None:
    put(store, key)
    store.folder.root.rename(store.folder.root.with_name("gone"))
    assert store.get(key) is None and stats()["cache_faults"] == 0
    assert put(store, key) and store.get(key) is not None


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(
    store: CacheStore, key: CacheKey, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, step, fail)
        with pytest.warns(CacheWarning, match="the disk is full"):
            assert not put(store, key)
    assert list(store.folder.entries.iterdir()) == []
    assert put(store, key)


def test_a_write_that_the_kernel_cuts_off(cache_dir: Path) -> None:
    """A real failure in mid-write: the process may not write files of more than 2000 bytes."""
    program = """
import os, resource, signal
from tpu_compile.cache import CacheKey, open_store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
store = open_store()
print(store.put(CacheKey.of("m", {"a": "b"}), os.urandom(10**5), compile_seconds=1, metadata={}))
print(os.listdir(store.folder.entries))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False", "[]"]
    assert "CacheWarning: Cannot write to the cache" in done.stderr


def test_a_stale_nfs_handle_is_read_again(store: CacheStore, key: CacheKey, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, key)
    read, failures = os.read, [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]

    def stale_once(file: int, size: int) -> bytes:
        if failures:
            raise failures.pop()
        return read(file, size)

    monkeypatch.setattr(os, "read", stale_once)
    assert store.get(key) is not None
    failures += [OSError(errno.ESTALE, "stale"), OSError(errno.ESTALE, "stale")]
    with pytest.warns(CacheWarning, match="Cannot read"):
        assert store.get(key) is None


def test_a_passing_trouble_does_not_remove_a_good_entry(
    store: CacheStore, key: CacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, key)

    def too_many_open_files(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as broken, pytest.warns(CacheWarning):
        broken.setattr(disk.os, "open", too_many_open_files)
        assert store.get(key) is None
    assert store.get(key) is not None


def test_a_repaired_entry_is_not_removed_by_who_saw_the_damage_first(store: CacheStore, key: CacheKey) -> None:
    put(store, key)
    path = store.folder.path(key.digest)
    seen = path.stat()
    put(store, key)
    store.folder.remove(key.digest, only=(seen.st_dev, seen.st_ino))
    assert store.get(key) is not None


def test_discard(store: CacheStore, key: CacheKey) -> None:
    put(store, key)
    with pytest.warns(CacheWarning, match="was removed: PJRT said no"):
        store.discard(key, "PJRT said no")
    assert store.get(key) is None


def test_an_entry_signed_otherwise_is_never_loaded_and_never_removed(store: CacheStore, key: CacheKey) -> None:
    put(store, key)
    with override(cache_key="ours"):
        with pytest.warns(CacheWarning, match="is not signed"):
            assert store.get(key) is None
        assert store.folder.path(key.digest).exists()
        put(store, key)
        assert store.get(key) is not None
    with override(cache_key="theirs"):
        assert store.get(key) is None
    assert store.get(key) is not None, "without a key a signature is not asked for"


def test_no_secret_in_the_file(store: CacheStore, key: CacheKey) -> None:
    with override(cache_key="correct horse battery staple"):
        put(store, key)
    assert b"battery" not in store.folder.path(key.digest).read_bytes()


def test_a_header_alone_tells_a_listing_all(store: CacheStore, key: CacheKey) -> None:
    """Damage in the payload does not show there; damage in the header takes the entry out of the list."""
    put(store, key)
    path = store.folder.path(key.digest)
    _flip(path)
    assert len(list(store.entries())) == 1
    path.write_bytes(path.read_bytes()[: PREAMBLE.size + 5])
    assert list(store.entries()) == []
