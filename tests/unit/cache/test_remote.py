"""The shared level: read through, written behind, and never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tpu_compile.cache import CacheKey, CacheStore
from tpu_compile.cache.remote import Remote
from tpu_compile.config import override
from tpu_compile.errors import CacheError, CacheWarning
from tpu_compile.stats import stats

PAYLOAD = b"native code " * 500


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty remote, once in memory and once in a folder."""
    if request.param == "file":
        yield f"file://{tmp_path}/remote"
        return
    yield "memory://bucket/cache/"
    fsspec.filesystem("memory").store.clear()


def open_store(folder: Path, url: str, *, write: bool = False) -> CacheStore:
    return CacheStore(folder, 0, Remote(url, write=write))


def put(store: CacheStore, key: CacheKey) -> None:
    assert store.put(key, PAYLOAD, compile_seconds=2.0, metadata={})
    if store.remote:
        assert store.remote.flush(10)


def remote_files(url: str) -> dict[str, bytes]:
    files, root = fsspec.core.url_to_fs(url)
    return {path.rsplit("/", 1)[1]: files.cat_file(path) for path in files.find(root)}


def test_what_one_machine_writes_another_finds(tmp_path: Path, url: str, key: CacheKey) -> None:
    put(open_store(tmp_path / "ci", url, write=True), key)
    assert stats()["remote_puts"] == 1 and list(remote_files(url)) == [key.digest]
    user = open_store(tmp_path / "user", url)
    entry = user.get(key)
    assert entry is not None and entry.payload == PAYLOAD and entry.compile_seconds == 2.0
    assert (stats()["remote_hits"], stats()["disk_hits"], stats()["saved_seconds"]) == (1, 0, 2.0)
    assert user.get(key) is not None
    assert (stats()["remote_hits"], stats()["disk_hits"]) == (1, 1), "it is kept locally"


def test_a_reader_never_writes(tmp_path: Path, url: str, key: CacheKey) -> None:
    put(open_store(tmp_path / "ci", url, write=True), key)
    other = CacheKey.of("other", {"a": "b"})
    user = open_store(tmp_path / "user", url)
    assert user.get(other) is None
    put(user, other)
    assert list(remote_files(url)) == [key.digest]
    assert (stats()["remote_misses"], stats()["disk_misses"]) == (1, 1)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "of another key"])
def test_a_damaged_remote_entry_is_a_miss_and_the_writer_repairs_it(
    tmp_path: Path, url: str, key: CacheKey, damage: str
) -> None:
    writer = open_store(tmp_path / "ci", url, write=True)
    put(writer, key)
    files, root = fsspec.core.url_to_fs(url)
    path = f"{root.rstrip('/')}/entries/{key.digest}"
    data = files.cat_file(path)
    broken = {"truncated": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "of another key": data}[damage]
    missed = key if damage != "of another key" else CacheKey.of("other", {"a": "b"})
    files.pipe_file(f"{root.rstrip('/')}/entries/{missed.digest}", broken)
    user = open_store(tmp_path / "user", url)
    with pytest.warns(CacheWarning, match="is not used"):
        assert user.get(missed) is None
    assert list(user.entries()) == []
    put(writer, missed)
    assert user.get(missed) is not None


def test_with_a_key_only_entries_signed_with_it_are_loaded(tmp_path: Path, url: str, key: CacheKey) -> None:
    writer = open_store(tmp_path / "ci", url, write=True)
    put(writer, key)
    user = open_store(tmp_path / "user", url)
    with override(cache_key="ours"):
        with pytest.warns(CacheWarning, match="is not signed"):
            assert user.get(key) is None
        put(writer, key)
        assert user.get(key) is not None


class _Trouble(Exception):
    """What a storage library of its own would raise."""


def _break(remote: Remote | None, monkeypatch: pytest.MonkeyPatch, work: Any) -> list[int]:
    assert remote is not None
    calls: list[int] = []

    def open_files() -> Any:
        calls.append(1)
        return work()

    monkeypatch.setattr(remote, "_open", open_files)
    return calls


def _raise() -> Any:
    raise _Trouble("503 slow down")


def test_after_three_failures_it_is_left_alone(
    tmp_path: Path, url: str, key: CacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "user", url)
    calls = _break(store.remote, monkeypatch, _raise)
    with pytest.warns(CacheWarning, match="503 slow down") as caught:
        for _ in range(10):
            assert store.get(key) is None
    assert len(calls) == 3 and len(caught) == 1 and stats()["cache_faults"] == 3


def test_a_success_starts_the_count_anew(
    tmp_path: Path, url: str, key: CacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "user", url)
    remote = store.remote
    assert remote is not None
    with pytest.warns(CacheWarning):
        for _ in range(5):
            with monkeypatch.context() as broken:
                _break(remote, broken, _raise)
                store.get(key)
                store.get(key)
            store.get(key)
    assert stats()["cache_faults"] == 10


def test_a_remote_that_hangs_costs_the_time_limit(
    tmp_path: Path, url: str, key: CacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "user", url)
    release = threading.Event()
    _break(store.remote, monkeypatch, release.wait)
    began = time.monotonic()
    with override(cache_remote_timeout=0.2), pytest.warns(CacheWarning, match="no answer within 0.2 s"):
        assert store.get(key) is None
    assert time.monotonic() - began < 9
    release.set()


def test_writing_never_waits_for_the_remote(
    tmp_path: Path, url: str, key: CacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "ci", url, write=True)
    release = threading.Event()

    def wait_then_fail() -> Any:
        release.wait(20)
        return _raise()

    _break(store.remote, monkeypatch, wait_then_fail)
    began = time.monotonic()
    assert store.put(key, PAYLOAD, compile_seconds=1, metadata={})
    assert time.monotonic() - began < 9 and store.get(key) is not None
    assert store.remote is not None and not store.remote.flush(0.1)
    with pytest.warns(CacheWarning, match="Cannot write to the remote cache"):
        release.set()
        assert store.remote.flush(20)
    assert stats()["remote_puts"] == 0


def test_too_many_waiting_writes_stay_local(
    tmp_path: Path, url: str, key: CacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpu_compile.cache.remote._MOST_PENDING", 2)
    store = open_store(tmp_path / "ci", url, write=True)
    assert store.remote is not None
    release, begun, files = threading.Event(), threading.Event(), store.remote._open()

    def wait() -> Any:
        begun.set()
        release.wait(20)
        return files

    _break(store.remote, monkeypatch, wait)
    assert store.put(key, PAYLOAD, compile_seconds=1, metadata={}) and begun.wait(20)
    with pytest.warns(CacheWarning, match="slower than the compiler"):
        for number in range(3):
            assert store.put(CacheKey.of("m", {"n": str(number)}), PAYLOAD, compile_seconds=1, metadata={})
    release.set()
    assert store.remote.flush(10) and len(remote_files(url)) == 3


@pytest.mark.parametrize("bad", ["nosuchscheme://x/y", "nosuchscheme://", "http://[broken"])
def test_a_url_that_makes_no_sense_is_a_warning(tmp_path: Path, key: CacheKey, bad: str) -> None:
    store = open_store(tmp_path / "user", bad)
    with pytest.warns(CacheWarning, match="Cannot read the remote cache"):
        assert store.get(key) is None
    put(store, key)
    assert store.get(key) is not None


def test_without_fsspec_it_says_what_to_install(tmp_path: Path, key: CacheKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    store = open_store(tmp_path / "user", "memory://x")
    with pytest.warns(CacheWarning, match="pip install fsspec"):
        assert store.get(key) is None


def test_faults_are_errors_where_the_user_wants_that(
    tmp_path: Path, url: str, key: CacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_COMPILE_RAISE_CACHE_ERRORS", "1")
    store = open_store(tmp_path / "ci", url, write=True)
    assert store.remote is not None
    _break(store.remote, monkeypatch, _raise)
    with pytest.raises(CacheError, match="503"):
        store.get(key)
    store.put(key, PAYLOAD, compile_seconds=1, metadata={})
    with pytest.raises(CacheError, match="503"):
        store.remote.flush(10)
    assert store.remote.flush(10)


def test_the_last_writes_happen_at_exit_and_in_forked_children(tmp_path: Path) -> None:
    program = """
import os, sys
from tpu_compile.cache import CacheKey, open_store
store = open_store()
put = lambda name: store.put(CacheKey.of(name, {"name": name}), b"x" * 10**6, compile_seconds=1, metadata={})
put("parent")
store.remote.flush(10)
child = os.fork()
if child == 0:
    put("child")
    os._exit(0 if store.remote.flush(10) else 1)
assert os.waitpid(child, 0)[1] == 0
put("last")
"""
    remote = tmp_path / "remote"
    environment = {**os.environ, "TPU_COMPILE_CACHE_REMOTE": f"file://{remote}", "TPU_COMPILE_CACHE_REMOTE_WRITE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names = {CacheKey.of(name, {"name": name}).digest for name in ("parent", "child", "last")}
    assert {path.name for path in (remote / "entries").iterdir()} == names
