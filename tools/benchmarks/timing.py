"""Taking turns: each contender runs for a moment, then the next, round after round: a busy machine is busy for all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]


def per_call(call: Call, seconds: float) -> float:
    """Seconds a call takes, from calling it for about ``seconds``: at least twice, and the first does not count. A
    contender in another process measures itself."""
    timed_there = getattr(call, "per_call", None)
    if timed_there is not None:
        return float(timed_there(seconds))
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    repeats = max(1, int(seconds / max(once, 1e-7)))
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def in_turn(calls: Mapping[str, Call], rounds: int, seconds: float) -> dict[str, float]:
    """Seconds a call takes, for each contender: a quarter of its rounds were at least this fast.

    Not the median, because whatever else runs on the machine only ever adds, and not the fastest, which is luck.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name].append(per_call(call, seconds))
    finally:
        gc.enable()
    return {name: sorted(each)[len(each) // 4] for name, each in taken.items()}
