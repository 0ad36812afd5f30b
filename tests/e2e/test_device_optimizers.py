"""torch's optimizers on the `tpu` device: the steps are the CPU's, and few programs make one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tpu_compile


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.detach().cpu(), want.detach().cpu(), rtol=tolerance, atol=tolerance)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD Adafactor".split()},
    "SGD, momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam, amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW, maximize": {"maximize": True},
    "Adam, one by one": {"foreach": False},
    "SGD, fused": {"fused": True, "momentum": 0.9, "weight_decay": 0.1},
    "Adam, fused": {"fused": True},
    "AdamW, fused": {"fused": True, "amsgrad": True},
    "Adagrad, fused": {"fused": True},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_the_cpu(name):
    """Five steps under a schedule: no more programs are compiled after the second."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    inputs = [torch.randn(5, 8) for _ in range(5)]
    trained = []
    for device in ("cpu", "tpu"):
        mine = copy.deepcopy(model).to(device)
        kind = getattr(torch.optim, name.split(",")[0])
        optimizer = kind(mine.parameters(), **{"lr": 0.05, **OPTIMIZERS[name]})
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step, x in enumerate(inputs):
            if step == 2:
                before = tpu_compile.stats()
            optimizer.zero_grad()
            mine(x.to(device)).square().mean().backward()
            optimizer.step()
            schedule.step()
        trained.append(mine)
    after = tpu_compile.stats()
    for w, g in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        close(g, w, 2e-5)
    assert after["fallback_ops"] == 0
    if name not in ("RAdam", "Adafactor"):  # which take another branch later on
        assert after["lowerings"] == before["lowerings"]


def test_optimizers_that_ask_for_a_closure_or_for_matrices():
    torch.manual_seed(0)
    start, x = torch.nn.Linear(4, 4, bias=False), torch.randn(5, 4)
    for kind, options in ((torch.optim.LBFGS, {"lr": 0.5, "max_iter": 5}), (torch.optim.Muon, {"lr": 0.1})):
        trained = []
        for device in ("cpu", "tpu"):
            model, given = copy.deepcopy(start).to(device), x.to(device)
            optimizer = kind(model.parameters(), **options)

            def loss(model: Any = model, given: Any = given, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                value = model(given).square().mean()
                value.backward()
                return value

            for _ in range(2):
                if kind is not torch.optim.LBFGS:
                    loss()
                optimizer.step(*([loss] if kind is torch.optim.LBFGS else []))
            trained.append(model.weight)
        close(trained[1], trained[0], 1e-4)
    assert tpu_compile.stats()["fallback_ops"] == 0


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("SGD", {}, 1),
        ("SGD", {"fused": True, "momentum": 0.9}, 1),
        ("Adam", {}, 8),
        ("AdamW", {"foreach": True}, 8),
        ("AdamW", {"fused": True}, 2),  # it also counts its steps, on the device
        ("Adagrad", {"fused": True}, 2),
        ("RMSprop", {}, 5),
    ],
    ids=["SGD", "SGD_fused", "Adam", "AdamW_foreach", "AdamW_fused", "Adagrad_fused", "RMSprop"],
)
@pytest.mark.parametrize("count", [3, 30])
def test_a_step_is_few_programs_however_many_parameters(name, options, most, count):
    parameters = [torch.nn.Parameter(torch.ones(4, 3, device="tpu")) for _ in range(count)]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.ones(4, 3, device="tpu")
    for _ in range(3):
        before = tpu_compile.stats()["executions"]
        optimizer.step()
    assert tpu_compile.stats()["executions"] - before <= most


@pytest.mark.parametrize(("name", "most"), [("Rprop", 1), ("ASGD", 2)])
def test_a_deferred_step_is_few_programs_where_torch_takes_one_parameter_after_another(name, most):
    """Run at once, such a step is several programs for each parameter: torch has no list of them to hand over."""
    with torch.tpu.mode("defer"):
        parameters = [torch.nn.Parameter(torch.ones(4, 3, device="tpu")) for _ in range(5)]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones(4, 3, device="tpu")
        for _ in range(4):
            torch.tpu.synchronize()
            before = tpu_compile.stats()
            optimizer.step()
            torch.tpu.synchronize()
    after = tpu_compile.stats()
    assert after["executions"] - before["executions"] <= most and after["lowerings"] == before["lowerings"]


def test_gradients_are_clipped():
    model = torch.nn.Linear(3, 4).to("tpu")
    model(torch.randn(2, 3, device="tpu")).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm.is_tpu
    close(torch.cat([p.grad.flatten() for p in model.parameters()]).norm(), torch.tensor(0.1), 1e-4)


def test_a_scaler_skips_steps_that_overflow():
    model = torch.nn.Linear(3, 4).to("tpu")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("tpu")
    for factor, moves in ((1.0, True), (float("inf"), False)):
        before = model.weight.detach().cpu().clone()
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3, device="tpu")).sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight.cpu(), before) != moves
    assert scaler.get_scale() == 2.0**15
