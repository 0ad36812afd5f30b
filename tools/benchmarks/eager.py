"""The `tpu` device without torch.compile: what an op costs beside JAX's and torch's own, a training step in each mode.

Run it as ``python tools/benchmarks/eager.py``; compare the numbers of one run only.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.timing import in_turn


def add() -> dict[str, Callable[[], object]]:
    """``add`` of two 4x4 matrices."""
    import jax.numpy as jnp

    a, b = (torch.ones(4, 4, device="tpu") for _ in range(2))
    ja, jb = jnp.ones((4, 4)), jnp.ones((4, 4))
    ha, hb = torch.ones(4, 4), torch.ones(4, 4)
    return {"tpu": lambda: torch.add(a, b), "jax": lambda: jnp.add(ja, jb), "torch, CPU": lambda: torch.add(ha, hb)}


class Net(torch.nn.Module):
    """Two convolutions for 8x8 images of ten kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.second, self.head = torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.head(torch.nn.functional.max_pool2d(torch.relu(self.second(x)), 2).flatten(1))


def step(mode: str) -> Callable[[], None]:
    """A training step with AdamW, batch 128, whose loss is read every tenth time."""
    model = Net().to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = torch.randn(128, 1, 8, 8).to("tpu"), torch.randint(0, 10, (128,)).to("tpu")
    number = itertools.count()

    def run() -> None:
        if torch.tpu.get_mode() != mode:
            torch.tpu.set_mode(mode)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if not next(number) % 10:
            loss.item()

    for _ in range(30):
        run()
    return run


def main() -> None:
    for name, each in in_turn(add(), rounds=20, seconds=0.1).items():
        print(f"add of 4x4: {name:12} {1e6 * each:8.1f} µs")
    for name, each in in_turn({mode: step(mode) for mode in ("strict", "defer")}, rounds=12, seconds=0.1).items():
        print(f"training step: {name:9} {1e3 * each:8.2f} ms")


if __name__ == "__main__":
    main()
