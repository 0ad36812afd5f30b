"""Scatters: repeated indices, every reduction, with and without the old value, smaller indices, 0-dim tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]
REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")
INDEX = torch.tensor([[0, 2, 0], [1, 1, 3]])


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(1, 6, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("include_self", [False, True])
def test_scatter_reduce(agrees: Any, dtype: torch.dtype, include_self: bool) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, src: torch.Tensor) -> list[torch.Tensor]:
        return [x.scatter_reduce(d, i, src, r, include_self=include_self) for r in REDUCTIONS for d in (0, 1)]

    agrees(fn, values((4, 4), dtype), INDEX, values((3, 4), dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64], ids=str)
def test_scatter_and_scatter_add(agrees: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, src: torch.Tensor, scalar: torch.Tensor) -> list[torch.Tensor]:
        zero = i[0, 0] * 0
        return [
            x.scatter_add(0, i, src),
            x.scatter(1, i[:, 1:], src[:2, 1:3]),
            x.scatter(-1, i, 1),
            x.scatter(0, i[:0], src),
            scalar.scatter(0, zero, 2),
            scalar.scatter_add(0, zero, scalar),
        ]

    agrees(fn, values((4, 4), dtype), INDEX, values((3, 4), dtype), values((), dtype))


def test_not_a_number_wins(agrees: Any) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, src: torch.Tensor) -> list[torch.Tensor]:
        return [x.scatter_reduce(0, i, src, r, include_self=s) for r in ("amax", "amin") for s in (True, False)]

    nan = float("nan")
    agrees(fn, torch.tensor([1.0, nan, 2.0]), torch.tensor([0, 0, 1, 2]), torch.tensor([nan, 5.0, 1.0, 3.0]))


@pytest.mark.filterwarnings("ignore:scatter_reduce.. is in beta:UserWarning")
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients(agrees: Any, reduce: str) -> None:
    x, src = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    agrees(lambda x, i, src: x.scatter_reduce(0, i, src, reduce), x, INDEX, src, grad=True)


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_one_index_for_each_slice(agrees: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, src: torch.Tensor) -> list[torch.Tensor]:
        reduced = [
            x.index_reduce(1, i, src, r, include_self=s) for r in ("prod", "mean", "amax") for s in (True, False)
        ]
        return [x.index_add(1, i, src, alpha=3), x.index_copy(1, i[:2], src[:, :2]), x.index_fill(1, i, 9), *reduced]

    agrees(fn, values((3, 4), dtype), torch.tensor([3, 0, 3]), values((3, 3), dtype))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segments(agrees: Any, reduce: str) -> None:
    def fn(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(x, reduce, lengths=lengths, unsafe=True)

    agrees(fn, torch.randn(6, 2, requires_grad=True), torch.tensor([2, 1, 3]), grad=True)
