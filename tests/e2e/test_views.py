"""Results that are views, under symbolic sizes; and numbers that a program learns while it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpu_compile.errors import UnsupportedOp


def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n = x.shape[0] // 2
    y = x * 2
    return x[n:, 1:], x[n:].t(), y[n:], y[:n], *x[n:].split(1), x[n:] + 1


@pytest.mark.parametrize("grad", [False, True])
def test_views_of_arguments_and_of_results_lie_where_eager_has_them(agrees: Any, grad: bool) -> None:
    agrees(halves, torch.arange(12.0).reshape(4, 3).requires_grad_(grad), dynamic=True)


def test_a_view_of_an_argument_is_a_view() -> None:
    x = torch.zeros(6, 2)
    view = torch.compile(lambda x: x[x.shape[0] // 2 :], backend="tpu", dynamic=True)(x)
    x[3] = 7
    assert view[0, 0] == 7


def test_a_view_of_an_argument_that_is_written(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        view = x[x.shape[0] // 2 :]
        x.add_(1)
        return view

    agrees(fn, torch.arange(6.0), dynamic=True)


@pytest.mark.parametrize("start", [2, -3])
def test_narrow_from_a_tensor(agrees: Any, start: int) -> None:
    agrees(lambda x, t: torch.narrow(x, 1, t, 2), torch.randn(5, 6), torch.tensor(start))
    agrees(lambda x, t: torch.narrow(x, 1, t, 2) * 2, torch.randn(5, 6), torch.tensor(start))


def row(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i = t.item()
    torch._check(0 <= i < x.shape[0])
    return x[i], x[i] * 2


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_items_stay_in_the_program(agrees: Any) -> None:
    agrees(row, torch.randn(3, 4), torch.tensor(2))
    for number in (3, 2.5):
        agrees(lambda x, t: x * t.item() + torch.full((3,), t.item() * 2 - 1), torch.randn(3), torch.tensor(number))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_an_item_reaches_the_caller_and_a_size_made_of_it_is_refused() -> None:
    x, t = torch.randn(3), torch.tensor(2)
    assert torch.compile(lambda x, t: t.item(), backend="tpu", fullgraph=True)(x, t) == 2
    with pytest.raises(UnsupportedOp, match="depends on data"):
        torch.compile(lambda x, t: x.new_zeros(t.item()), backend="tpu", fullgraph=True)(x, t)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_a_clone_is_memory_of_its_own(device: str) -> None:
    """The program computes one value; a write to one of the results must not show in the other."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y, y.clone(), y.detach(), y.view(-1), y.clone()

    def written(call: Any) -> list[list[float]]:
        results = call(torch.zeros(3, device=device))
        results[0].add_(10)
        results[4].mul_(3)
        return [r.tolist() for r in results]

    assert written(torch.compile(fn, backend="tpu", fullgraph=True)) == written(fn)
