"""The first call of one network on one system, in this process alone; prints one JSON line.

    python tools/benchmarks/first_call.py bert tpu

`bench.py` starts it twice for each row: with empty cache folders, then again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CACHES = {
    "tpu": {"TPU_COMPILE_CACHE_DIR": "{}"},
    "inductor": {"TORCHINDUCTOR_CACHE_DIR": "{}"},
    "jax": {
        "JAX_COMPILATION_CACHE_DIR": "{}",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    },
}
"""Where each system keeps what it compiled, and what makes it keep everything."""


def cold_and_warm(name: str, system: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two fresh processes say, the first with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="tpu-compile-bench-") as folder:
        settings = {key: value.format(folder) for key, value in CACHES.get(system, {}).items()}
        command = [sys.executable, __file__, name, system]
        environment = {**os.environ, **settings}
        runs = (subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2))
        first, second = (_parsed(run, name, system) for run in runs)
    return first, second


def _parsed(run: subprocess.CompletedProcess[str], name: str, system: str) -> dict[str, Any]:
    if run.returncode:
        raise SystemExit(f"The first call of {name} on {system} failed:\n{run.stderr}")
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return report


def main(name: str, system: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import tpu_compile
    from benchmarks import contenders, jax_models, torch_models

    model, x = torch_models.build(name)
    if system == "jax":
        call = contenders.on_jax(model, x, jax_models.MODELS[name])
    else:
        call = contenders.on_torch(model, x, system)
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    report = {"seconds": seconds, **(tpu_compile.stats() if system == "tpu" else {})}
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
