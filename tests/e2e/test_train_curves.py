"""200 steps of ``train_step`` against eager, on real digits and on the text of this repository's README, for every
optimizer: a program must stay as near to a float64 run as eager does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from sklearn.datasets import load_digits

import tpu_compile

STEPS = 200
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-3),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, amsgrad=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, lr_decay=1e-3),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, centered=True),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=1e-3),
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(1, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8)
        self.second, self.head = torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.head(F.max_pool2d(torch.relu(self.second(x)), 2).flatten(1))


@functools.cache
def digits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = load_digits()
    images, targets = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    return [(images[i : i + 64], targets[i : i + 64]) for i in range(0, 1792, 64)]


@functools.cache
def text() -> list[tuple[torch.Tensor]]:
    """Bytes of the README, 8 rows of 64."""
    data = torch.tensor(list((Path(__file__).parents[2] / "README.md").read_bytes()[: 8 * 64 * 16]))
    return [(rows,) for rows in data.view(-1, 8, 64)]


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def next_bytes(outputs: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """Changes the learning rate at every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.998**step)


def eager(model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any) -> list[float]:
    losses, rates = [], schedule(optimizer)
    for step in range(STEPS):
        inputs, *targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), *targets)
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return losses


def compiled(model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any) -> list[float]:
    step, rates, losses = tpu_compile.train_step(model, loss_fn, optimizer), schedule(optimizer), []
    for number in range(STEPS):
        losses.append(step(*batches[number % len(batches)]).item())
        rates.step()
        if not number:
            tpu_compile.reset_stats()
    stats = tpu_compile.stats()
    assert stats["xla_compiles"] == stats["lowerings"] == 0 and stats["executions"] == STEPS - 1
    return losses


def check(make_model: Any, loss_fn: Any, name: str, batches: Any, device: str) -> None:
    torch.manual_seed(0)
    host = make_model()
    ours, truth = copy.deepcopy(host).to(device), copy.deepcopy(host).double()
    moved = [tuple(t.to(device) for t in batch) for batch in batches]
    precise = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in batches]
    make = OPTIMIZERS[name]
    got = torch.tensor(compiled(ours, loss_fn, make(ours.parameters()), moved))
    exact = torch.tensor(eager(truth, loss_fn, make(truth.parameters()), precise), dtype=torch.float64)
    want = torch.tensor(eager(host, loss_fn, make(host.parameters()), batches))
    near, far = ((losses - exact).abs().cummax(0).values for losses in (want, got))
    print(f"{name}: eager {near[-1]:.1e}, compiled {far[-1]:.1e}, loss {got[0]:.3f} to {got[-1]:.3f}")
    assert torch.all(far <= 4 * near + 1e-5), (far - near).max()
    assert got[-20:].mean() < 0.9 * got[:5].mean()


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_digits(name):
    check(Net, F.cross_entropy, name, digits(), "tpu")


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_text(name):
    """The batch is input and target at once."""
    batches = [(ids, ids) for (ids,) in text()]
    check(llama, next_bytes, name, batches, "cpu")
