"""A plain training script on real data, on the device in every mode and compiled, against the CPU."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

import tpu_compile

EPOCHS, BATCH = 3, 128


class Net(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 16, 3, padding=1)
        self.drop, self.head = torch.nn.Dropout(dropout), torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        x = torch.nn.functional.max_pool2d(torch.relu(self.second(x)), 2)
        return self.head(self.drop(x.flatten(1)))


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


@pytest.fixture(autouse=True)
def _strict_afterwards() -> Iterator[None]:
    yield
    torch.tpu.set_mode("strict")


def train(
    digits: tuple[torch.Tensor, torch.Tensor], device: str, mode: str = "strict", *, dropout: float = 0.0
) -> tuple[list[float], float]:
    """Three epochs with a checkpoint and a resume after the first; returns the losses and the accuracy."""
    if device == "tpu":
        torch.tpu.set_mode(mode.removeprefix("compiled "))
    torch.manual_seed(0)
    model = Net(dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    forward: Any = torch.compile(model, backend="tpu") if mode.startswith("compiled") else model
    images, targets = (t[:1536].to(device) for t in digits)
    torch.manual_seed(1)
    losses = []
    for epoch in range(EPOCHS):
        for at in range(0, len(images), BATCH):
            optimizer.zero_grad()
            logits = forward(images[at : at + BATCH])
            loss = torch.nn.functional.cross_entropy(logits, targets[at : at + BATCH])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if not epoch:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            state = torch.load(file, map_location=device)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    model.eval()
    with torch.no_grad():
        right = model(digits[0][1536:].to(device)).argmax(1).cpu() == digits[1][1536:]
    return losses, right.float().mean().item()


@pytest.mark.parametrize("mode", ["strict", "debug", "defer", "compiled strict"])
def test_the_loss_curve_is_the_cpus(digits, mode):
    want, got = train(digits, "cpu"), train(digits, "tpu", mode)
    torch.testing.assert_close(got[0], want[0], rtol=2e-3, atol=2e-3)
    assert abs(got[1] - want[1]) < 0.02 and got[0][-1] < got[0][0] / 2
    assert tpu_compile.stats()["fallback_ops"] == 0


def test_with_dropout_all_modes_draw_the_same(digits):
    want = train(digits, "tpu", dropout=0.3)
    for mode in ("debug", "defer", "compiled strict"):
        got = train(digits, "tpu", mode, dropout=0.3)
        torch.testing.assert_close(got[0], want[0], rtol=2e-3, atol=2e-3)


MANY_STEPS = """
import gc, json, resource, sys
import torch

def resident():
    # Bytes this process has in memory, or had at most where the system does not say.
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

model = torch.nn.Linear(8, 8).to("tpu")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(4, 8).to("tpu")
for part in range(3):
    for step in range(400):
        optimizer.zero_grad()
        loss = model(x * (1 + step / 1000)).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
    gc.collect()
    stats = torch.tpu.memory_stats()
    print(json.dumps([stats["allocated_bytes.all.current"], stats["allocation.all.current"], resident()]))
"""


@pytest.mark.parametrize("mode", ["strict", "defer"])
def test_memory_stays_flat(mode, run_python):
    """Many steps leave no buffers, no cells and no growing process behind."""
    done = run_python(MANY_STEPS, {"TPU_COMPILE_EAGER_MODE": mode})
    _, before, after = map(json.loads, done.stdout.splitlines())
    assert before[:2] == after[:2] and after[2] - before[2] < 2 * 2**20, done.stdout
