"""async_compile: the first calls run eagerly, later ones the program; nobody can tell but by the clock."""

from __future__ import annotations

import time
import traceback

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


def times_three(x):
    return x.sin() * 3


def check(call, count: int = 1) -> None:
    for _ in range(count):
        torch.testing.assert_close(call(torch.ones(3)), times_three(torch.ones(3)))


def test_what_goes_wrong_is_raised_by_every_later_call():
    """Always the same error, and no traceback that grows: the third call's is as long as the second's."""
    broken = later(times_three, xla_options={"no_such_option": "1"}, cache=False)
    errors = []
    for _ in range(3):
        with pytest.raises(tpu_compile.ConfigError, match="no_such_option") as caught:
            for _ in range(1000):
                check(broken)
                time.sleep(0.05)
        errors.append(
            (str(caught.value), len(traceback.extract_tb(caught.value.__traceback__)), caught.value.__notes__)
        )
    assert errors[1] == errors[2] and errors[0][0] == errors[1][0]
    assert len(errors[2][2]) == 1 and "suppress_errors" in errors[2][2][0]


def test_where_dynamo_suppresses_errors_the_graph_stays_eager(caplog):
    broken = later(times_three, xla_options={"no_such_option": "2"}, cache=False)
    with torch._dynamo.config.patch(suppress_errors=True):
        deadline = time.monotonic() + 120
        while not caplog.records:
            assert time.monotonic() < deadline, "never told"
            check(broken)
        check(broken, 5)
    (told,) = caplog.records
    assert "eagerly for good" in told.message and "no_such_option" in told.message


def test_so_it_does_where_dynamo_waits_for_the_compile():
    broken = torch.compile(times_three, backend="tpu", options={"xla_options": {"no_such_option": "3"}})
    with torch._dynamo.config.patch(suppress_errors=True):
        check(broken, 2)
    assert tpu_compile.stats()["executions"] == 0
