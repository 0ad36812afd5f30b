"""A process that needs programs and "compiles" what the cache does not have.

python compile_worker.py SECONDS LOG PROGRAM... appends a line to LOG for each compile, which takes SECONDS (``inf``: it
never ends), and prints a line for each program.
"""

from __future__ import annotations

import os
import sys
import time

from tpu_compile.cache import CacheKey, open_store


def main(seconds: float, log: str, programs: list[str]) -> None:
    store = open_store()
    assert store is not None
    for program in programs:
        key = CacheKey.of(program, {"program": program})
        entry = store.get(key)
        if entry is None:
            with store.compiling(key) as entry:
                if entry is None:
                    compile_slowly(seconds, log, program)
                    store.put(key, payload(program), compile_seconds=seconds, metadata={})
        assert entry is None or entry.payload == payload(program)
        print(program, "compiled" if entry is None else "found", flush=True)


def payload(program: str) -> bytes:
    return program.encode() * 10_000


def compile_slowly(seconds: float, log: str, program: str) -> None:
    with open(log, "a") as file:
        file.write(f"{program} {os.getpid()}\n")
    time.sleep(min(seconds, 3600))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
