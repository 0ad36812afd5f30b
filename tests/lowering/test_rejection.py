"""Poisson, binomial and gamma numbers: their first two moments, the edges, the seed, and the gradient of a gamma."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

N = 20_000

Case = tuple[Callable[..., torch.Tensor], tuple[float, ...], float, float]
CASES: dict[str, Case] = {
    "poisson small": (torch.poisson, (0.5,), 0.5, 0.5),
    "poisson large": (torch.poisson, (60.0,), 60.0, 60.0),
    "binomial small": (torch.binomial, (10.0, 0.3), 3.0, 2.1),
    "binomial large": (torch.binomial, (200.0, 0.7), 140.0, 42.0),
    "gamma below 1": (torch._standard_gamma, (0.3,), 0.3, 0.3),
    "gamma above 1": (torch._standard_gamma, (7.0,), 7.0, 7.0),
}


@pytest.mark.parametrize("name", CASES)
def test_moments(name: str) -> None:
    fn, parameters, mean, variance = CASES[name]
    torch.manual_seed(3)
    sample = torch.compile(fn, backend="tpu", fullgraph=True)(*(torch.full((N,), p) for p in parameters)).double()
    assert abs(sample.mean() - mean) < 5 * (variance / N) ** 0.5
    assert abs(sample.var() / variance - 1) < 0.1


def test_edges_and_the_seed() -> None:
    def fn(rate: torch.Tensor) -> list[torch.Tensor]:
        fives = torch.full((100,), 5.0)
        edges = torch.binomial(fives, torch.zeros(100)), torch.binomial(fives, torch.ones(100))
        return [torch.poisson(torch.zeros_like(rate)), *edges, torch.poisson(rate), torch.poisson(rate)]

    compiled = torch.compile(fn, backend="tpu", fullgraph=True)
    rate = torch.full((100,), 4.0, dtype=torch.bfloat16)
    torch.manual_seed(1)
    none, low, high, first, second = compiled(rate)
    assert not none.any() and not low.any() and (high == 5).all() and first.dtype == torch.bfloat16
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(compiled(rate)[3], first)


def test_a_gamma_is_differentiable() -> None:
    alpha = torch.full((N,), 2.0, requires_grad=True)
    sample = torch.compile(torch._standard_gamma, backend="tpu", fullgraph=True)(alpha)
    sample.sum().backward()
    assert alpha.grad is not None
    want = torch._standard_gamma_grad(alpha.detach(), sample.detach())
    torch.testing.assert_close(alpha.grad, want, rtol=1e-3, atol=1e-4)
