"""A process that never stops using the cache, to be killed at any moment: python killed_writer.py SEED

It reads, compiles, writes, evicts and removes among 12 programs; "ready": it has written. ``check`` in place
of SEED checks what the killed ones left: every entry sound, every payload right, every lock free, all of it usable;
and prints how many entries and temporary files it found.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from tpu_compile.cache import CacheKey, CacheStore
from tpu_compile.config import override
from tpu_compile.stats import stats

PROGRAMS = 12
CAP = 300_000


def payload(number: int) -> bytes:
    """Half noise and half not, so that both are stored: 1 kB to 100 kB."""
    size = 1000 + 9000 * number
    return random.Random(number).randbytes(size) if number % 2 else bytes([number]) * size


def key(number: int) -> CacheKey:
    return CacheKey.of(f"program {number}", {"number": str(number)})


def main(seed: int) -> None:
    rng = random.Random(seed)
    store = CacheStore(Path(os.environ["TPU_COMPILE_CACHE_DIR"]), max_size=CAP)
    first = rng.randrange(PROGRAMS)
    assert store.put(key(first), payload(first), compile_seconds=1, metadata={})
    print("ready", flush=True)
    while True:
        number = rng.randrange(PROGRAMS)
        entry = store.get(key(number))
        assert entry is None or entry.payload == payload(number)
        if entry is None:
            with store.compiling(key(number)) as entry:
                if entry is None:
                    store.put(key(number), payload(number), compile_seconds=1, metadata={})
        elif rng.random() < 0.2:
            store.prune(max_size=CAP // 2)
        elif rng.random() < 0.2:
            store.folder.remove(key(number).digest)


def check() -> None:
    store = CacheStore(Path(os.environ["TPU_COMPILE_CACHE_DIR"]), max_size=CAP)
    problems = store.verify()
    assert not problems, problems
    found, torn = 0, len(list(store.folder.entries.glob(".tmp-*")))
    for number in range(PROGRAMS):
        entry = store.get(key(number))
        found += entry is not None
        assert entry is None or entry.payload == payload(number)
        with override(cache_lock_timeout=0.0), store.compiling(key(number)) as entry:
            assert entry is None or entry.payload == payload(number)
        assert store.put(key(number), payload(number), compile_seconds=1, metadata={})
    assert sum(file.size for file in store.folder.scan()) <= CAP
    assert stats()["cache_faults"] == 0
    print(found, torn)


if __name__ == "__main__":
    check() if sys.argv[1] == "check" else main(int(sys.argv[1]))
