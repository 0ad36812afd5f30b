"""PyTorch/XLA's times on the same networks, for `bench.py --peer-python`: runs in an interpreter that has torch_xla.

Prints one JSON line. Parameters and inputs live on PyTorch/XLA's device, the case that suits it best.
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
from benchmarks.timing import Call, in_turn


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


def rows(name: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    system = f"torch_xla {torch_xla.__version__}"
    network = name.removeprefix("train-")
    trains = network != name
    call = training_on_xla(network) if trains else on_xla(name)
    start = time.perf_counter()
    call()
    first = 1e3 * (time.perf_counter() - start)
    taken = in_turn({name: call}, rounds, seconds)[name]
    torch._dynamo.reset()
    section, scale, unit = ("call overhead", 1e6, "µs") if name == "mlp" else ("steady", 1e3, "ms")
    steady, start = ("training step", "training, first step") if trains else (section, "first call, cold")
    return [
        {"section": steady, "what": network, "system": system, "value": scale * taken, "unit": unit},
        {"section": start, "what": network, "system": system, "value": first, "unit": "ms"},
    ]


if __name__ == "__main__":
    _, rounds, seconds, *names = sys.argv
    print(json.dumps([row for name in names for row in rows(name, int(rounds), float(seconds))]))
