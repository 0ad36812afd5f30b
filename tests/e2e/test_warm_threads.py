"""Threads that compile at the same time: they wait for each other only where they want the same program."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tpu_compile import executables, stages
from tpu_compile.executables import Compiled, options_in_force


def test_a_slow_compile_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = stages.trace(torch.sin, torch.ones(3)).lower().program
    quick = stages.trace(torch.cos, torch.ones(3)).lower().program
    started, let_go = threading.Event(), threading.Event()
    made: list[str] = []
    true_way = executables._load_or_compile

    def load_or_compile(program: Any, *rest: Any) -> Compiled:
        if program.digest == slow.digest:
            made.append("slow")
            started.set()
            assert let_go.wait(60)
        return true_way(program, *rest)

    monkeypatch.setattr(executables, "_load_or_compile", load_or_compile)
    options, runtime = options_in_force(), executables.Runtime()
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(runtime.executable, slow, options)
        assert started.wait(60)
        second = threads.submit(runtime.executable, replace(slow, name="again"), options)
        assert threads.submit(runtime.executable, quick, options).result(60).origin in ("xla", "disk")
        assert not first.done() and not second.done()
        let_go.set()
        assert first.result(60).executable is second.result(60).executable
    assert made == ["slow"], "the second thread waited and took what the first had made"
    assert second.result().origin == "memory"


def test_threads_that_trace_at_once_leave_torch_as_it_was() -> None:
    from torch._functorch._aot_autograd import autograd_cache

    import tpu_compile
    from tpu_compile.warm import autograd

    functions = [
        lambda x: torch.sin(x) * 2,
        lambda x: torch.cos(x) * 3,
        lambda x: torch.exp(x) * 4,
        lambda x: torch.tanh(x) * 5,
    ]

    def work(function: Any) -> torch.Tensor:
        return torch.compile(function, backend="tpu")(torch.ones(3)) - tpu_compile.aot(function, (torch.ones(3),))(
            torch.ones(3)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(not difference.any() for difference in threads.map(work, functions))
    assert tpu_compile.stats()["tracing_puts"] > 4
    assert autograd_cache.autograd_cache_key is autograd._true_key
    assert "iterate_over_candidates" not in vars(autograd_cache.AOTAutogradCache)


def test_functions_of_one_name_are_kept_apart() -> None:
    import tpu_compile

    for function in (lambda x: torch.sin(x) * 2, lambda x: torch.cos(x) * 2, lambda x: torch.sin(x) * 3):
        x = torch.ones(3)
        torch.testing.assert_close(tpu_compile.aot(function, (x,))(x), function(x))


def test_a_failed_compile_lets_the_next_thread_try(monkeypatch: pytest.MonkeyPatch) -> None:
    program = stages.trace(torch.sin, torch.ones(3)).lower().program
    true_way, attempts = executables._load_or_compile, []

    def load_or_compile(*arguments: Any) -> Compiled:
        attempts.append(threading.get_ident())
        if len(attempts) == 1:
            raise RuntimeError("the first one fails")
        return true_way(*arguments)

    monkeypatch.setattr(executables, "_load_or_compile", load_or_compile)
    runtime = executables.Runtime()
    with pytest.raises(RuntimeError, match="the first one fails"):
        runtime.executable(program, options_in_force())
    assert runtime.executable(program, options_in_force()).executable is not None
