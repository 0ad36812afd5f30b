"""What a call costs the caller on `tpu` tensors, beside what PJRT itself takes on the same buffers.

Calls are asynchronous: each is timed until it returns, and waited for before the next contender has its turn.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks import contenders
from benchmarks.report import Row
from tpu_compile import tracing
from tpu_compile.device import resident
from tpu_compile.device.contents import contents
from tpu_compile.device.storage import cell_of

SLACK = 25e-6
"""Seconds that a call may take beyond a backend that does nothing and 1.3 times PJRT's own call."""


class Chain(torch.nn.Module):
    """Adds ``count - 1`` small parameters to its input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(4)) for _ in range(count - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        for part in self.parts:
            x = x + part
        return x


class Gpt(torch.nn.Module):
    """12 layers, 148 parameters, one token."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            n_embd=8, n_layer=12, n_head=1, vocab_size=16, n_positions=8, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = transformers.GPT2LMHeadModel(config).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x).logits
        return logits


CASES: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    "1 argument": lambda: (Chain(1), torch.randn(4)),
    "100 arguments": lambda: (Chain(100), torch.randn(4)),
    "gpt": lambda: (Gpt(), torch.zeros(1, 1, dtype=torch.int64)),
}


def rows(rounds: int) -> list[Row]:
    """Microseconds a call takes, by contender."""
    found = []
    for name, make in CASES.items():
        transformers.logging.set_verbosity_error()
        model, x = make()
        times = _times(model.to("tpu"), x.to("tpu"), rounds)
        found += [Row("dispatch", name, system, 1e6 * value, "µs") for system, value in times.items()]
        torch._dynamo.reset()
    return found


def _times(model: torch.nn.Module, x: torch.Tensor, rounds: int) -> dict[str, float]:
    plan, given = _plan(model, x)
    bare, buffers = plan.executable._loaded.execute_sharded, given
    ours, nothing = _compiled(model, "tpu"), _compiled(model, contenders.null_aot)
    calls = {"tpu": lambda: ours(x), "null AOT": lambda: nothing(x), "PJRT": lambda: bare(buffers)}
    taken: dict[str, list[float]] = {system: [] for system in calls}
    with torch.no_grad():
        gc.disable()
        for turn in range(20 * rounds):
            for system, call in calls.items():
                start = time.perf_counter()
                call()
                if turn > 20:
                    taken[system].append(time.perf_counter() - start)
                plan._client.ready(plan.executable.execute(buffers))
        gc.enable()
    times = {system: sorted(each)[len(each) // 4] for system, each in taken.items()}
    return {**times, "limit": times["null AOT"] + 1.3 * times["PJRT"] + SLACK}


def _compiled(model: torch.nn.Module, backend: Any) -> Any:
    """Compiled under code of its own: Dynamo goes through all entries of a code object at each call."""
    return torch.compile(tracing._fresh_copy(model), backend=backend, fullgraph=True, dynamic=False)


def _plan(model: torch.nn.Module, x: torch.Tensor) -> tuple[Any, list[Any]]:
    """The plan that a call runs, and the buffers that it passes to PJRT."""
    seen: list[tuple[Any, list[Any]]] = []
    original = resident.ResidentPlan.__call__

    def spy(self: Any, arguments: Any) -> Any:
        tensors = [arguments[position] for position in self.program.arguments]
        seen.append((self, [contents(cell_of(t)) for t in tensors]))  # type: ignore[arg-type]
        return original(self, arguments)

    resident.ResidentPlan.__call__ = spy  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            _compiled(model, "tpu")(x)
    finally:
        resident.ResidentPlan.__call__ = original  # type: ignore[method-assign]
    return seen[-1]
