"""async_compile: the first calls run eagerly, later ones the program; nobody can tell but by the clock."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import tpu_compile


def later(fn, **options):
    return torch.compile(fn, backend="tpu", fullgraph=True, options={"async_compile": True, **options})


def until_compiled(call) -> None:
    """Call until a program runs."""
    deadline = time.monotonic() + 120
    while not tpu_compile.stats()["executions"]:
        assert time.monotonic() < deadline, "never compiled"
        call()
        time.sleep(0.02)


def test_the_first_call_does_not_wait_and_state_goes_on():
    torch.manual_seed(0)
    ours, eager = (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)) for _ in range(2))
    eager.load_state_dict(ours.state_dict())
    compiled = later(ours)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(6, 4)
            torch.testing.assert_close(compiled(x), eager(x))
        assert tpu_compile.stats()["eager_calls"] >= 1

        def call() -> None:
            x = torch.randn(6, 4)
            torch.testing.assert_close(compiled(x), eager(x))

        until_compiled(call)
        call()
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())


def test_gradients_and_sizes_that_vary():
    layer = nn.Linear(4, 2)
    compiled = torch.compile(layer, backend="tpu", dynamic=True, options={"async_compile": True})

    def call(rows: int = 3) -> None:
        layer.zero_grad()
        compiled(torch.ones(rows, 4)).square().sum().backward()
        got = layer.weight.grad.clone()
        layer.zero_grad()
        layer(torch.ones(rows, 4)).square().sum().backward()
        torch.testing.assert_close(got, layer.weight.grad)

    until_compiled(call)
    for rows in (5, 3, 7):
        call(rows)


def test_draws_wait_and_follow_the_seed():
    drop = later(nn.Dropout(0.5).train())
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(drop(torch.ones(64)))
    assert torch.equal(*results) and tpu_compile.stats()["eager_calls"] == 0


def test_what_goes_wrong_reaches_a_later_call():
    broken = later(lambda x: x.sin() * 3, xla_options={"no_such_option": "1"}, cache=False)
    with pytest.raises(tpu_compile.ConfigError, match="no_such_option"):
        for _ in range(1000):
            torch.testing.assert_close(broken(torch.ones(3)), torch.ones(3).sin() * 3)
            time.sleep(0.05)
