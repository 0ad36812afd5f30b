"""The thread that runs deferred sequences."""

from __future__ import annotations

import threading
import time

import pytest

from tpu_compile.device.background import MOST_WAITING, Background


def test_jobs_run_in_order_and_an_error_is_told_once():
    background, ran = Background(), []

    def fail() -> None:
        raise ValueError("a job")

    background.submit(lambda: ran.append(1))
    background.submit(fail)
    background.submit(lambda: ran.append(2))
    with pytest.raises(ValueError, match="a job"):
        background.drain()
    background.submit(lambda: ran.append(3))
    background.drain()
    assert ran == [1, 3]
    background.close()


def test_who_asks_for_jobs_runs_ahead_only_so_far():
    background, gate, asked = Background(), threading.Event(), []

    def ask() -> None:
        for number in range(2 * MOST_WAITING):
            background.submit(gate.wait)
            asked.append(number)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 30
    while len(asked) < MOST_WAITING and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert MOST_WAITING <= len(asked) <= MOST_WAITING + 1
    gate.set()
    thread.join()
    background.close()
    assert len(asked) == 2 * MOST_WAITING


def test_closing_runs_what_waits_and_what_comes_later():
    background, ran = Background(), []
    background.submit(lambda: ran.append("before"))
    background.close()
    background.submit(lambda: ran.append("after"))
    background.drain()
    assert ran == ["before", "after"]
