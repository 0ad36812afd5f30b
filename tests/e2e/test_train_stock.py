"""Stock loops: forward, backward and optimizer are one executable each; a step of the user's own; the budget knob."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.utils.checkpoint import checkpoint

import tpu_compile
from tpu_compile import compiler


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(24, 16), torch.randint(0, 5, (24,))


def close(ours: nn.Module, host: nn.Module) -> None:
    for got, want in zip(ours.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-5, atol=1e-5)


def test_forward_backward_and_optimizer_are_one_execution_each():
    model = net()
    host = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, host))
    forward, update = torch.compile(model, backend="tpu"), torch.compile(optimizer.step, backend="tpu")
    for number in range(5):
        if number == 3:
            tpu_compile.reset_stats()
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        update()
        other.zero_grad()
        F.cross_entropy(host(x), y).backward()
        other.step()
        for group in (*optimizer.param_groups, *other.param_groups):
            group["lr"] *= 0.9
    stats = tpu_compile.stats()
    assert stats["executions"] == 3 * 2 and stats["lowerings"] == stats["xla_compiles"] == 0
    close(model, host)


def test_a_plain_loop_on_the_device_is_three_executions_a_step():
    host = net()
    model = copy.deepcopy(host).to("tpu")
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, host))
    loss_of = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="tpu")
    update = torch.compile(optimizer.step, backend="tpu")
    batches = [batch() for _ in range(4)]
    moved = [tuple(t.to("tpu") for t in each) for each in batches]
    one = torch.ones((), device="tpu")
    for number, ((x, y), (ours, targets)) in enumerate(zip(batches, moved, strict=True)):
        if number == 1:
            tpu_compile.reset_stats()
        optimizer.zero_grad()
        loss_of(ours, targets).backward(one)
        update()
        other.zero_grad()
        F.cross_entropy(host(x), y).backward()
        other.step()
    stats = tpu_compile.stats()
    assert stats["executions"] == 3 * 3 and stats["lowerings"] == stats["xla_compiles"] == 0, stats["executions"]
    assert stats["fallback_ops"] == stats["copied_arguments"] == 0
    close(model, host)


def test_a_schedule_that_recompiles_is_told_how_not_to():
    def train(lr):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        update = torch.compile(optimizer.step, backend="tpu")
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            update()
            optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.warns(tpu_compile.TpuCompileWarning, match="train_step"):
        train(0.1)
    torch._dynamo.reset()
    tpu_compile.reset_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(torch.tensor(0.1))
    assert tpu_compile.stats()["graphs"] <= 2


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_a_step_of_the_users_own(device):
    host = net()
    model = copy.deepcopy(host).to(device)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, host))
    update = tpu_compile.functional_step(optimizer)

    def loss_of(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    @torch.compile(backend="tpu", fullgraph=True)
    def step(x, y, numbers):
        params = {name: p.detach() for name, p in model.named_parameters()}
        grads, loss = grad_and_value(loss_of)(params, x, y)
        update(list(grads.values()), numbers)
        return loss

    for number in range(4):
        if number == 1:
            tpu_compile.reset_stats()
        x, y = batch()
        loss = step(x.to(device), y.to(device), update.numbers())
        other.zero_grad()
        want = F.cross_entropy(host(x), y)
        want.backward()
        other.step()
        assert loss.item() == pytest.approx(want.item(), abs=1e-5)
        for group in (*optimizer.param_groups, *other.param_groups):
            group["lr"] *= 0.9
    stats = tpu_compile.stats()
    assert stats["executions"] == 3 and stats["lowerings"] == 0
    close(model, host)
    assert {s["step"].item() for s in optimizer.state.values()} == {4}


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x


def backward_needs(checkpointed: bool = False, **options) -> tuple[int, int, torch.Tensor]:
    """Bytes that the backward is given, those and what it works with, and a gradient."""
    torch.manual_seed(0)
    model, x = Blocks(checkpointed), torch.randn(512, 32)
    with compiler.record() as recorder:
        torch.compile(model, backend="tpu", fullgraph=True, options=options)(x).square().mean().backward()
    memory = recorder.lowerings[-1].compiled.executable.memory_analysis()
    gradient = model.blocks[0][0].weight.grad
    assert gradient is not None
    given = memory.argument_size_in_bytes
    return given, given + memory.temp_size_in_bytes, gradient


def test_a_compiled_backward_computes_again_what_it_may_not_keep():
    kept, needed, want = backward_needs()
    by_region, by_budget = backward_needs(True), backward_needs(activation_memory_budget=0.2)
    assert by_region[0] < 0.7 * kept and by_region[1] < 0.7 * needed, (by_region[:2], kept, needed)
    assert by_budget[0] < 0.7 * kept, (by_budget[:2], kept, needed)
    for *_, gradient in (by_region, by_budget):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-6)
    for wrong in ("0", 0.0, 1.5, float("nan")):
        with pytest.raises(tpu_compile.ConfigError), tpu_compile.override(activation_memory_budget=wrong):
            pass
