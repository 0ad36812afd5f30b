"""Ranges, fills and index triangles against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lowering.edges import assert_same, compiled


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_whole_ranges(dtype: torch.dtype) -> None:
    def fn() -> list[torch.Tensor]:
        return [
            *(torch.linspace(0, 7, n, dtype=dtype) for n in (0, 1, 4, 9)),
            torch.linspace(2.5, 7.9, 5, dtype=dtype),
            torch.arange(1.7, 9.3, 1.6, dtype=dtype),
            torch.arange(0.5, 5, dtype=dtype),
        ]

    assert_same(compiled(fn), fn())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_ranges(dtype: torch.dtype) -> None:
    def fn() -> list[torch.Tensor]:
        return [
            torch.linspace(-2.3, 7.7, 101, dtype=dtype),
            torch.arange(0, 100, 0.7, dtype=dtype),
            torch.logspace(0, 2, 9, dtype=dtype),
        ]

    assert_same(compiled(fn), fn(), ulps=1)


def test_float64_ranges_keep_their_digits() -> None:
    got = compiled(lambda: torch.linspace(0.1, 0.3, 5, dtype=torch.float64))
    assert_same(got, torch.linspace(0.1, 0.3, 5, dtype=torch.float64), ulps=2)


def test_float_ranges_end_where_they_should() -> None:
    got = compiled(lambda: (torch.linspace(0.1, 0.3, 1000), torch.linspace(5, -5, 1), torch.arange(0, 1, 0.1)))
    assert got[0][-1] == torch.tensor(0.3) and got[0][0] == torch.tensor(0.1) and got[1].tolist() == [5.0]
    torch.testing.assert_close(got[2], torch.arange(0, 1, 0.1))


@pytest.mark.parametrize("make", [torch.tril_indices, torch.triu_indices])
def test_triangles(make: Callable[..., Any]) -> None:
    shapes = [(r, c, o) for r in (0, 1, 5) for c in (0, 1, 7) for o in (-6, -3, -1, 0, 1, 3, 9)]

    def fn() -> list[torch.Tensor]:
        return [make(r, c, o) for r, c, o in shapes]

    assert_same(compiled(fn), fn())
    torch._dynamo.reset()
    assert_same(compiled(lambda: make(3000, 2500, -700, dtype=torch.int32)), make(3000, 2500, -700, dtype=torch.int32))


def test_fills_wrap_and_convert() -> None:
    x = torch.zeros(3, dtype=torch.uint8)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.full_like(x, 200),
            x.new_full((2,), 3.7),
            torch.full((2,), True),
            torch.full((2,), 1 + 2j),
            x.fill_(7) + 250,
        ]

    assert_same(compiled(fn, x.clone()), fn(x.clone()))
