"""The size cap, least recently used first, and what the commands remove, report and leave alone."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from tpu_compile.cache import CacheKey, CacheStore
from tpu_compile.errors import CacheError
from tpu_compile.stats import stats

SIZE = 10_000


def key(number: int) -> CacheKey:
    return CacheKey.of(f"program {number}", {"number": str(number)})


def fill(store: CacheStore, numbers: range, age: float = 0) -> None:
    """One entry of about SIZE bytes each; the first was used ``age`` seconds ago, each later one a second later."""
    for number in numbers:
        assert store.put(key(number), os.urandom(SIZE), compile_seconds=1, metadata={})
        when = time.time() - age + number
        os.utime(store.folder.path(key(number).digest), (when, when))


def names(store: CacheStore) -> set[int]:
    return {int(info.header.name.split()[1]) for info in store.entries()}


def test_the_cap_holds_and_the_least_recently_used_go_first(cache_dir: Path) -> None:
    fill(CacheStore(cache_dir, max_size=0), range(8), age=1000)
    store = CacheStore(cache_dir, max_size=int(8.5 * SIZE))
    assert store.get(key(0)) is not None, "a hit makes it the most recently used"
    fill(store, range(8, 10), age=0)
    kept = names(store)
    assert {0, 8, 9} <= kept and 1 not in kept and 2 not in kept
    assert sum(info.size for info in store.entries()) <= store.max_size
    assert stats()["disk_evictions"] == 10 - len(kept)


def test_a_small_cap_keeps_what_was_just_put(cache_dir: Path) -> None:
    store = CacheStore(cache_dir, max_size=int(1.1 * SIZE))
    for number in range(5):
        fill(store, range(number, number + 1), age=1000)
        assert names(store) == {number}


def test_other_processes_count(cache_dir: Path) -> None:
    """Each store only scans now and then, yet two that fill one directory stay near the cap."""
    stores = [CacheStore(cache_dir, max_size=20 * SIZE) for _ in range(2)]
    for number in range(150):
        stores[number % 2].put(key(number), os.urandom(SIZE), compile_seconds=1, metadata={})
    assert sum(info.size for info in stores[0].entries()) <= 2 * 20 * SIZE


def test_what_is_being_read_is_never_evicted(cache_dir: Path) -> None:
    store = CacheStore(cache_dir, max_size=0)
    fill(store, range(3), age=1000)
    with open(store.folder.path(key(0).digest), "rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as the store's own reader holds it
        assert store.prune(max_size=0).entries == 2
        assert names(store) == {0}
    assert store.prune(max_size=0).entries == 1


def test_readers_hold_that_lock(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CacheStore(cache_dir, max_size=0)
    fill(store, range(1))
    read, evicted = os.read, []

    def read_while_pruning(file: int, size: int) -> bytes:
        evicted.append(store.folder.evict(key(0).digest))
        return read(file, size)

    with monkeypatch.context() as patched:
        patched.setattr(os, "read", read_while_pruning)
        assert store.get(key(0)) is not None
    assert evicted and not any(evicted)


def test_readers_and_an_evictor_never_disturb_each_other(cache_dir: Path) -> None:
    store = CacheStore(cache_dir, max_size=4 * SIZE)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for number in range(10):
                store.get(key(number))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(60):
        assert store.put(key(number % 10), os.urandom(SIZE), compile_seconds=1, metadata={})
    stop.set()
    for thread in threads:
        thread.join()
    assert stats()["cache_faults"] == 0 and stats()["disk_hits"] > 0 and stats()["disk_evictions"] > 0


@pytest.mark.parametrize("jump", [-10 * 365 * 86400, 10 * 365 * 86400], ids=["back", "forward"])
def test_a_jumping_clock_neither_keeps_nor_loses_everything(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Entries used under the other clock give way to those used under this one, whichever way it jumped."""
    store = CacheStore(cache_dir, max_size=0)
    now = time.time()
    for number in range(4):
        assert store.put(key(number), os.urandom(SIZE), compile_seconds=1, metadata={})
        os.utime(store.folder.path(key(number).digest), (now - jump + number, now - jump + number))
    store.folder.scan()
    fill(store, range(4, 6), age=0)
    store.prune(max_size=int(2.5 * SIZE))
    assert names(store) == {4, 5}
    assert all(info.used <= time.time() + 60 for info in store.entries())


def test_prune_by_age(store: CacheStore) -> None:
    fill(store, range(5), age=5000)
    fill(store, range(5, 7), age=0)
    removed = store.prune(older_than=3600)
    assert removed.entries == 5 and 5 * SIZE < removed.bytes < 5.5 * SIZE
    assert names(store) == {5, 6}


def test_clear_removes_everything_but_held_locks(store: CacheStore) -> None:
    fill(store, range(3))
    (store.folder.entries / "stray").mkdir()
    (store.folder.entries / "stray" / "file").write_text("x")
    with store.compiling(key(9)):
        assert store.clear().entries == 3
        assert list(store.folder.entries.iterdir()) == []
        with open(store.folder.locks / key(9).digest) as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert CacheStore(store.folder.root / "never made").clear().entries == 0


def test_leftovers_of_killed_writers_go_after_an_hour(store: CacheStore) -> None:
    fill(store, range(1))
    young, old = (store.folder.entries / f".tmp-1-{name}" for name in ("young", "old"))
    for path in (young, old):
        path.write_bytes(b"half an entry")
    with store.compiling(key(5)):
        pass
    lock = store.folder.locks / key(5).digest
    for path in (old, lock):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    store.prune()
    assert young.exists() and not old.exists() and not lock.exists()
    assert names(store) == {0}


def test_verify_reports_every_kind_and_removes_on_request(store: CacheStore) -> None:
    fill(store, range(4))
    paths = [store.folder.path(key(number).digest) for number in range(4)]
    os.truncate(paths[0], 200)
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    paths[2].unlink()
    paths[2].mkdir()
    (store.folder.entries / "note.txt").write_text("hello")
    before = paths[3].stat().st_mtime_ns
    problems = {problem.path: (problem.kind, problem.reason) for problem in store.verify()}
    assert {path: kind for path, (kind, _) in problems.items()} == {
        paths[0]: "damaged", paths[1]: "damaged", paths[2]: "damaged", store.folder.entries / "note.txt": "stray",
    }  # fmt: skip
    assert "checksum" in problems[paths[1]][1]
    assert paths[3].stat().st_mtime_ns == before, "verifying is not using"
    assert len(store.verify(remove=True)) == 4
    assert store.verify() == [] and names(store) == {3}


def test_stats(store: CacheStore) -> None:
    assert store.stats().entries == 0 and store.stats().least_recent_use == 0
    fill(store, range(3), age=100)
    store.get(key(1))
    store.get(key(1))
    figures = store.stats()
    assert (figures.entries, figures.hits, figures.seconds_saved, figures.compile_seconds) == (3, 2, 2.0, 3.0)
    assert figures.payload_bytes == 3 * SIZE < figures.bytes
    assert abs(time.time() - 100 - figures.least_recent_use) < 60


def test_a_foreign_directory_is_an_error_for_the_commands(store: CacheStore) -> None:
    store.folder.root.mkdir()
    store.folder.entries.symlink_to("/")
    for command in (store.clear, store.prune, store.verify, store.stats):
        with pytest.raises(CacheError, match="not a directory"):
            command()
