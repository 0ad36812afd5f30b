"""The first call of a model in a process that finds everything in the cache, in this process alone; one JSON line.

    python tools/benchmarks/restart.py bert tpu

``system``: ``tpu`` (torch.compile), ``aot`` (tpu_compile.aot), or ``null``: Dynamo with a backend that does nothing,
the floor under ``tpu``. Seconds count from the model with its weights, and torch imported, to the first result;
``step`` of training, to its gradients. ``cpu`` is the process's time on all cores, which a busy machine changes less.
``bench.py --only restart`` fills a cache and starts each in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CASES = ("bert", "llama", "llama-training")
SYSTEMS = ("null", "tpu", "aot")


def restarts(case: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What fresh processes say, ``rounds`` of them for each system, in turn, after one of each has filled a cache."""
    with tempfile.TemporaryDirectory(prefix="tpu-compile-bench-") as folder:
        environment = {**os.environ, "TPU_COMPILE_CACHE_DIR": folder}
        for system in ("tpu", "aot"):
            _run(case, system, environment)
        said: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
        for _ in range(rounds):
            for system in SYSTEMS:
                said[system].append(_run(case, system, environment))
    return said


def _run(case: str, system: str, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, case, system]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"The first call of {case} on {system} failed:\n{run.stderr}")
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return report


def main(case: str, system: str) -> None:
    """Build the model, then time what a user waits for: importing us included, importing torch not."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    from benchmarks import torch_models

    name, _, training = case.partition("-")
    model, x = torch_models.build(name)
    model.train(bool(training))
    nothing = _nothing(model, x)
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.set_grad_enabled(bool(training)):
        result = _start(model, x, system, nothing)(x)
        report = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        if training and system != "null":
            result.square().mean().backward()
    report["step"] = time.perf_counter() - wall
    import tpu_compile

    print(json.dumps({**report, **tpu_compile.stats()}))


def _start(model: Any, x: Any, system: str, nothing: Callable[..., Any]) -> Callable[[Any], Any]:
    import torch

    if system == "aot":
        import tpu_compile

        started: Callable[[Any], Any] = tpu_compile.aot(model, (x,))
        return started
    if system == "tpu":
        return torch.compile(model, backend="tpu", fullgraph=True)
    return torch.compile(model, backend=lambda graph, inputs: nothing, fullgraph=True)


def _nothing(model: Any, x: Any) -> Callable[..., Sequence[Any]]:
    """A graph's stand-in: its one result, computed beforehand."""
    import torch

    with torch.no_grad():
        ready = (model(x),)
    return lambda *arguments: ready


if __name__ == "__main__":
    main(*sys.argv[1:])
