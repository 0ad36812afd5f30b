"""Several processes and threads, and death at any moment: nothing lost, nothing wrong, nothing compiled twice."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tpu_compile.cache import CacheKey, CacheStore
from tpu_compile.config import override
from tpu_compile.errors import CacheWarning
from tpu_compile.stats import stats

HERE = Path(__file__).parent
Process = subprocess.Popen[str]


def start(script: str, *arguments: object) -> Process:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: Process, timeout: float = 60) -> list[str]:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0 and not err, err
    return out.splitlines()


def kill(process: Process) -> None:
    process.kill()
    process.communicate(timeout=10)


def compiles(log: Path) -> Counter[str]:
    """How often each program was compiled."""
    return Counter(line.split()[0] for line in log.read_text().splitlines())


def spin_until(condition: object, timeout: float = 20) -> None:
    """Wait until ``condition()`` holds; fail after ``timeout`` seconds."""
    assert callable(condition)
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_eight_processes_compile_each_of_five_programs_once(tmp_path: Path, cache_dir: Path) -> None:
    programs = [f"program{number}" for number in range(5)]
    log = tmp_path / "log"
    workers = [
        start("compile_worker.py", 0.2, log, *random.Random(seed).sample(programs, len(programs))) for seed in range(8)
    ]
    said = [line for worker in workers for line in finish(worker)]
    assert compiles(log) == dict.fromkeys(programs, 1)
    assert Counter(line.split()[1] for line in said) == {"compiled": 5, "found": 35}
    assert {info.header.name for info in CacheStore(cache_dir).entries()} == set(programs)


def test_a_waiter_outlives_a_killed_owner(tmp_path: Path) -> None:
    log = tmp_path / "log"
    owner = start("compile_worker.py", "inf", log, "p")
    spin_until(log.exists)
    waiters = [start("compile_worker.py", 0.1, log, "p") for _ in range(3)]
    time.sleep(0.5)
    assert compiles(log) == {"p": 1}, "they wait"
    kill(owner)
    said = [line for waiter in waiters for line in finish(waiter)]
    assert sorted(said) == ["p compiled", "p found", "p found"]
    assert compiles(log) == {"p": 2}


def test_an_owner_that_hangs_only_costs_the_time_limit(tmp_path: Path, store: CacheStore) -> None:
    log = tmp_path / "log"
    owner = start("compile_worker.py", "inf", log, "p")
    try:
        spin_until(log.exists)
        key = CacheKey.of("p", {"program": "p"})
        began = time.monotonic()
        impatient, warned = override(cache_lock_timeout=0.3), pytest.warns(CacheWarning, match="still compiles p")
        with impatient, warned, store.compiling(key) as entry:
            assert entry is None
            assert store.put(key, b"x", compile_seconds=1, metadata={})
        assert 0.3 <= time.monotonic() - began < 20
    finally:
        kill(owner)


def test_threads_compile_once(store: CacheStore, key: CacheKey) -> None:
    compiled: list[int] = []

    def need() -> None:
        if store.get(key) is None:
            with store.compiling(key) as entry:
                if entry is None:
                    compiled.append(1)
                    time.sleep(0.2)
                    store.put(key, b"payload", compile_seconds=0.2, metadata={})
                else:
                    assert entry.payload == b"payload"

    threads = [threading.Thread(target=need) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(compiled) == 1
    assert stats()["disk_hits"] == 15 and stats()["disk_waits"] == 15 and stats()["cache_faults"] == 0


def test_a_failed_compile_frees_the_lock_and_stores_nothing(store: CacheStore, key: CacheKey) -> None:
    with pytest.raises(RuntimeError, match="XLA said no"), store.compiling(key):
        raise RuntimeError("XLA said no")
    with override(cache_lock_timeout=0.0), store.compiling(key) as entry:
        assert entry is None
    assert list(store.entries()) == [] and stats()["cache_faults"] == 0


def test_different_programs_do_not_wait_for_each_other(store: CacheStore, key: CacheKey) -> None:
    with override(cache_lock_timeout=0.0), store.compiling(key), store.compiling(CacheKey.of("other", {})) as entry:
        assert entry is None
    assert stats()["disk_waits"] == 0


def test_the_entry_of_an_owner_that_lives_on_is_taken_at_once(store: CacheStore, key: CacheKey) -> None:
    """It is there before the lock is free: who waits need not wait for the lock."""
    with store.compiling(key):
        store.put(key, b"payload", compile_seconds=1, metadata={})
        with store.compiling(key) as entry:
            assert entry is not None and entry.payload == b"payload"


def test_without_working_locks_everybody_compiles(
    store: CacheStore, key: CacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    def no_locks(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(FileLock, "acquire", no_locks)
    with pytest.warns(CacheWarning, match="Cannot lock"), store.compiling(key) as entry:
        assert entry is None
        assert store.put(key, b"x", compile_seconds=1, metadata={})
    assert store.get(key) is not None


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.full)], ids=["small", "full"])
def test_death_at_random_moments(kills: int, cache_dir: Path) -> None:
    """kill -9 among two writers that read, write, evict and remove; what they leave is checked by another process."""
    rng = random.Random(kills)
    writers = [start("killed_writer.py", seed) for seed in range(2)]
    found, torn = 0, 0
    try:
        for number in range(kills):
            victim = writers.pop(0)
            assert victim.stdout is not None and victim.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.1))
            assert victim.poll() is None, victim.communicate()
            kill(victim)
            writers.append(start("killed_writer.py", number + 2))
            if number % 10 == 9:
                for writer in writers:
                    kill(writer)
                left = finish(start("killed_writer.py", "check"))[0].split()
                found, torn = found + int(left[0]), int(left[1])
                writers = [start("killed_writer.py", number + seed) for seed in (1000, 1001)]
    finally:
        for writer in writers:
            kill(writer)
    print(f"{kills} kills, {torn} of them left a file half written: {found} entries survived, none damaged")
