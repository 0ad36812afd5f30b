"""200 steps of ``train_step`` (20 in the fast suite) against eager, on real digits and on the text of this repository's
README, for every optimizer: a program must stay as near to a float64 run as eager does.

What float32 noise is, a single run does not say: one rounding decides which side of a maximum or a ReLU wins, and the
curve leaves the exact one from there on. So eager runs with the rows of each batch in several orders, none of which is
more right than another."""

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

FAST = 20
ORDERS = 3
STEPS = 200
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-3),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, amsgrad=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, lr_decay=1e-3),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, centered=True),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=1e-2),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads of eager's small ops, waiting for one another on a busy machine, take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def eager(
    model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any, steps: int
) -> list[float]:
    losses, rates = [], schedule(optimizer)
    for step in range(steps):
        inputs, *targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), *targets)
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return losses


def compiled(
    model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any, steps: int
) -> list[float]:
    step, rates, losses = tpu_compile.train_step(model, loss_fn, optimizer), schedule(optimizer), []
    for number in range(steps):
        losses.append(step(*batches[number % len(batches)]).item())
        rates.step()
        if not number:
            tpu_compile.reset_stats()
    stats = tpu_compile.stats()
    assert stats["xla_compiles"] == stats["lowerings"] == 0 and stats["executions"] == steps - 1
    return losses


def reordered(batches: Any, number: int) -> Any:
    """The rows of each batch in another order; as they are for number 0."""
    rows = len(batches[0][0])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(number)) if number else torch.arange(rows)
    return [tuple(t[order] for t in batch) for batch in batches]


def check(make_model: Any, loss_fn: Any, name: str, batches: Any, device: str, steps: int = STEPS) -> None:
    torch.manual_seed(0)
    host = make_model()
    ours, truth = copy.deepcopy(host).to(device), copy.deepcopy(host).double()
    moved = [tuple(t.to(device) for t in batch) for batch in batches]
    precise = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in batches]
    make = OPTIMIZERS[name]
    got = torch.tensor(compiled(ours, loss_fn, make(ours.parameters()), moved, steps))
    exact = torch.tensor(eager(truth, loss_fn, make(truth.parameters()), precise, steps), dtype=torch.float64)
    nears = []
    for number in range(ORDERS):
        model = copy.deepcopy(host)
        want = torch.tensor(eager(model, loss_fn, make(model.parameters()), reordered(batches, number), steps))
        nears.append((want - exact).abs().cummax(0).values)
    near, far = torch.stack(nears).amax(0), (got - exact).abs().cummax(0).values
    print(f"{name}: eager {near[-1]:.1e}, compiled {far[-1]:.1e}, loss {got[0]:.3f} to {got[-1]:.3f}")
    assert torch.all(far <= 4 * near + 1e-5), (far - near).max()
    tail = steps // 10
    assert got[-tail:].mean() < (1 - 0.1 * steps / STEPS) * got[:5].mean()


def test_a_few_steps():
    """Images on the device, text on the CPU."""
    check(Net, F.cross_entropy, "momentum", digits(), "tpu", FAST)
    check(llama, next_bytes, "AdamW", [(ids, ids) for (ids,) in text()], "cpu", FAST)


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
