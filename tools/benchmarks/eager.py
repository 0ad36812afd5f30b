"""The `tpu` device without torch.compile: what an op costs beside JAX's and torch's own, a training step by mode."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
import transformers

from benchmarks.report import Row
from benchmarks.timing import in_turn

STEPS = 10
"""Steps between two waits for the device: what a mode has put off belongs to its time."""

Step = Callable[[], torch.Tensor]


def add() -> dict[str, Callable[[], object]]:
    """``add`` of two 4x4 matrices."""
    import jax.numpy as jnp

    a, b = (torch.ones(4, 4, device="tpu") for _ in range(2))
    ja, jb = jnp.ones((4, 4)), jnp.ones((4, 4))
    ha, hb = torch.ones(4, 4), torch.ones(4, 4)
    return {"tpu": lambda: torch.add(a, b), "jax": lambda: jnp.add(ja, jb), "eager": lambda: torch.add(ha, hb)}


class Net(torch.nn.Module):
    """Two convolutions for 8x8 images of ten kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.second, self.head = torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        x = torch.nn.functional.max_pool2d(torch.relu(self.second(x)), 2)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def digits() -> Step:
    """A step on 128 images with AdamW; returns the loss."""
    model = Net().to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = torch.randn(128, 1, 8, 8).to("tpu"), torch.randint(0, 10, (128,)).to("tpu")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def llama() -> Step:
    """A step of a Llama with two layers on 4 x 32 tokens with AdamW; returns the loss."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 256, (4, 32)).to("tpu")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


SCRIPTS: dict[str, tuple[Callable[[], Step], bool]] = {
    "digits, each loss read": (digits, True),
    "digits, each tenth read": (digits, False),
    "small llama, each tenth read": (llama, False),
}


def in_mode(mode: str, make: Callable[[], Step], reads: bool) -> Callable[[], None]:
    """``STEPS`` steps in a mode; the loss of each is read, or of the last one only."""
    torch.tpu.set_mode(mode)
    step = make()

    def run() -> None:
        torch.tpu.set_mode(mode)
        for _ in range(STEPS - 1):
            loss = step()
            if reads:
                loss.item()
        step().item()
        torch.tpu.synchronize()

    run()
    run()
    return run


def rows(rounds: int, seconds: float) -> list[Row]:
    """Microseconds of an op, milliseconds of a training step."""
    found = [
        Row("eager op", "add of 4x4", system, 1e6 * value, "µs")
        for system, value in in_turn(add(), rounds, seconds / 5).items()
    ]
    for what, (make, reads) in SCRIPTS.items():
        runs = {mode: in_mode(mode, make, reads) for mode in ("strict", "defer")}
        times = in_turn(runs, rounds, seconds)
        found += [Row("eager step", what, mode, 1e3 * value / STEPS, "ms") for mode, value in times.items()]
    torch.tpu.set_mode("strict")
    return found
