"""PyTorch/XLA on one network, for `bench.py --peer-python`: runs in an interpreter that has torch_xla.

    python tools/benchmarks/peer.py train-gpt2

says, as JSON, which version it is and how long the first call took; then, for each number of seconds that it reads, how
many a call took of those it made for about so long. Parameters and inputs live on PyTorch/XLA's device, the case that
suits it best.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from benchmarks import torch_models, torch_training
from benchmarks.timing import Call, per_call


def on_xla(name: str) -> Call:
    model, x = torch_models.build(name)
    compiled = torch.compile(model.to(torch_xla.device()), backend="openxla", dynamic=False)
    resident = x.to(torch_xla.device())

    def call() -> Any:
        with torch.no_grad():
            result = compiled(resident)
            torch_xla.sync()
            xm.wait_device_ops()
            return result

    return call


def training_on_xla(name: str) -> Call:
    """Forward, backward and optimizer as one lazy graph, which is cut after the step."""
    model, ids = torch_training.build(name)
    model, ids = model.to(torch_xla.device()), ids.to(torch_xla.device())
    return torch_training.own_loop(model, ids, torch_training.adamw(model), end=torch_xla.sync)


def main(name: str) -> None:
    network = name.removeprefix("train-")
    call = training_on_xla(network) if name != network else on_xla(name)
    start = time.perf_counter()
    call()
    first = time.perf_counter() - start
    print(json.dumps({"system": f"torch_xla {torch_xla.__version__}", "first": first}), flush=True)
    for line in sys.stdin:
        print(json.dumps(per_call(call, float(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
