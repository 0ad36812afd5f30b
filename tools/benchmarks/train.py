"""One training step of AdamW, by system: milliseconds in turn in one process; in a process for each, the first step
with nothing cached, and memory.

    python tools/benchmarks/train.py gpt2 tpu

prints one JSON line: seconds of the first step, and the most bytes that building the model and three steps took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch._dynamo

import tpu_compile
from benchmarks import first_call, torch_training, train_jax
from benchmarks.report import Row
from benchmarks.timing import Call, in_turn

AGREE = 2e-4
"""Largest relative difference of the losses of the first steps."""
SYSTEMS = ("eager", "inductor", "tpu", "tpu, own loop", "jax", "jax, like optax")
FEW = ("inductor", "tpu", "jax")
"""Those that ``--quick`` starts processes of."""
SLOW = {"gpt2-small": ("tpu", "jax", "jax, like optax")}
"""Networks that not every system trains here."""


def make(name: str, system: str) -> tuple[Call, Any]:
    """A call that makes a step and returns its loss; what tells XLA's memory analysis, where there is one program."""
    model, ids = torch_training.build(name)
    if system.startswith("jax"):
        return train_jax.step(name, system, model, ids)
    if system.startswith("tpu"):
        model, ids = model.to("tpu"), ids.to("tpu")
        optimizer = torch_training.adamw(model)
        if system == "tpu":
            step = tpu_compile.train_step(model, torch_training.loss_fn, optimizer)
            return lambda: step(ids, ids).item(), lambda: step.trace(ids, ids).lower().compile().memory_analysis()
        compiled = partial(torch.compile, backend="tpu", dynamic=False)
        return torch_training.own_loop(model, ids, optimizer, compiled, compiled), None
    optimizer = torch_training.adamw(model, fused=True)
    if system == "inductor":
        compiled = partial(torch.compile, backend="inductor", dynamic=False)
        return torch_training.own_loop(model, ids, optimizer, compiled), None
    return torch_training.own_loop(model, ids, optimizer), None


def rows(name: str, rounds: int, seconds: float, peers: Mapping[str, Call]) -> list[Row]:
    """Milliseconds a step takes, and the bytes that its program needs."""
    calls: dict[str, Call] = {}
    analyses: dict[str, Any] = {}
    for system in SLOW.get(name, SYSTEMS):
        calls[system], analyses[system] = make(name, system)
    losses = {system: [call() for _ in range(3)] for system, call in calls.items()}
    agreed = losses.get("eager", losses["jax"])
    for system, got in losses.items():
        if not np.allclose(got, agreed, rtol=AGREE):
            raise SystemExit(f"training {name} on {system}: losses {got}, expected {agreed}")
    times = in_turn({**calls, **peers}, rounds, seconds)
    needed = {system: _needed(analysis()) for system, analysis in analyses.items() if analysis}
    torch._dynamo.reset()
    found = [Row("training step", name, system, 1e3 * value, "ms") for system, value in times.items()]
    return found + [Row("training, memory", name, system, n / 2**20, "MiB") for system, n in needed.items()]


def _needed(memory: Any) -> int:
    """Bytes of arguments, results and temporaries, those that share memory counted once."""
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return int(total - memory.alias_size_in_bytes)


def in_processes(name: str, systems: tuple[str, ...]) -> list[Row]:
    """Milliseconds of the first step with nothing cached; what a process takes that finds everything in its cache: to
    compile takes memory too."""
    found = []
    for system in systems:
        first, then = _cold_and_warm(name, system)
        found.append(Row("training, first step", name, system, 1e3 * first["seconds"], "ms"))
        found.append(Row("training, process", name, system, then["bytes"] / 2**20, "MiB"))
    return sorted(found, key=lambda row: row.section)


def _cold_and_warm(name: str, system: str) -> list[dict[str, Any]]:
    kind = next((known for known in first_call.CACHES if system.startswith(known)), "")
    said: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tpu-compile-bench-") as folder:
        settings = {key: value.format(folder) for key, value in first_call.CACHES.get(kind, {}).items()}
        for _ in range(2):
            command = [sys.executable, __file__, name, system]
            run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
            if run.returncode:
                raise SystemExit(f"The first step of {name} on {system} failed:\n{run.stderr}")
            said.append(json.loads(run.stdout.splitlines()[-1]))
    return said


def main(name: str, system: str) -> None:
    """What is imported is not counted; the model and the optimizer's state are."""
    before = _memory("VmRSS")
    call, _ = make(name, system)
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    call()
    call()
    print(json.dumps({"seconds": seconds, "bytes": _memory("VmHWM") - before}))


def _memory(field: str) -> int:
    """Bytes, from the kernel's account of this process. What ``resource`` calls the most includes the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main(*sys.argv[1:])
