"""Cumulative ops: dtypes, NaN, ties, long and empty axes, gradients; and programs that do not grow with the tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64], ids=str)
def test_sums_and_products(agrees: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, scalar: torch.Tensor, empty: torch.Tensor) -> list[torch.Tensor]:
        results = [f(t, d) for f in (torch.cumsum, torch.cumprod) for t in (x, empty) for d in (0, -1)]
        return [*results, scalar.cumsum(0), x.cumsum(1, dtype=torch.complex128)]

    x = torch.randint(0, 3, (3, 4))
    agrees(fn, x.to(dtype), x[0, 0].to(dtype), x[:0].to(dtype))


def test_extremes_stand_where_they_last_stood(agrees: Any) -> None:
    x = torch.tensor(
        [[1.0, 3.0, 3.0, NAN, 5.0, NAN], [-INF, -INF, 2.0, 2.0, 1.0, 2.0], [0.0, -1.0, -1.0, 0.0, INF, INF]]
    )
    agrees(lambda x: [f(x, d) for f in (torch.cummax, torch.cummin) for d in (0, 1)], x)
    agrees(lambda x: (x.cummax(0), x.cummin(1)), x.nan_to_num(0, 9, -9).to(torch.int64))
    agrees(lambda x: (x.cummax(0), x.cummin(0)), torch.tensor(2.0))


def test_logcumsumexp(agrees: Any) -> None:
    x = torch.tensor([[-INF, -INF, 1.0, 90.0], [100.0, -100.0, INF, 0.0], [0.0, NAN, 1.0, 2.0]])
    agrees(lambda x: (x.logcumsumexp(0), x.logcumsumexp(1)), x)
    agrees(lambda x: torch.view_as_real(x.logcumsumexp(1)), torch.randn(2, 5, dtype=torch.complex64))


def test_long_axes(agrees: Any) -> None:
    agrees(lambda x: (x.cumsum(0), x.cummax(0)), torch.randint(-9, 10, (5000,)))


def test_gradients(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.cumsum(1), x.cumprod(0), x.cummax(1).values, x.logcumsumexp(1), x.diff(dim=1), torch.trapezoid(x)]

    agrees(fn, torch.randn(3, 5, requires_grad=True), grad=True)
