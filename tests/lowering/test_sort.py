"""Sorting, ranks and searching: NaN last, ties, both directions, 0-dim and empty axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NAN, INF = float("nan"), float("inf")
MIXED = torch.tensor([[2.0, NAN, -INF, 0.0], [INF, 1.0, -3.0, NAN], [4.0, -1.0, 0.5, 3.0]])


@pytest.mark.parametrize("descending", [False, True])
def test_not_a_number_is_the_greatest(agrees: Any, descending: bool) -> None:
    def fn(x: torch.Tensor) -> list[Any]:
        return [torch.sort(x, dim=d, descending=descending, stable=True) for d in (0, -1)]

    agrees(fn, MIXED)
    agrees(fn, MIXED.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16], ids=str)
def test_a_stable_sort_keeps_the_order_of_equals(agrees: Any, dtype: torch.dtype) -> None:
    x = torch.randint(0, 3, (200,)).to(dtype)
    agrees(lambda x: (torch.sort(x, stable=True), torch.argsort(x, stable=True, descending=True)), x)


def test_scalars_and_empty_axes(agrees: Any) -> None:
    agrees(
        lambda x: (x.sort(), x.msort() if x.dim() else x, x.topk(1), x.kthvalue(1), x.median(0), x.mode(0)),
        torch.tensor(3.0),
    )
    agrees(lambda x: (x.sort(1), x.topk(0, 1), x.median()), torch.zeros(2, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_top_k(agrees: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[Any]:
        return [x.topk(k, dim=d, largest=largest) for k in (1, 3) for d in (0, 1) for largest in (True, False)]

    agrees(fn, (torch.randperm(20).view(4, 5) - 7).to(dtype))


def test_top_k_puts_not_a_number_first_whatever_its_sign(agrees: Any) -> None:
    x = torch.tensor([1.0, 0.0, 5.0]).index_put((torch.tensor([1]),), torch.tensor(NAN))
    agrees(lambda x: (x.topk(2), (-x).topk(2)), x)


@pytest.mark.parametrize("x", [MIXED, torch.randperm(12).view(3, 4) - 5], ids=["mixed", "integers"])
def test_ranks(agrees: Any, x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> list[Any]:
        of_axis = [f(x, d) for f in (torch.median, torch.nanmedian) for d in (0, 1)]
        return [*of_axis, x.median(), x.nanmedian(), x.kthvalue(2, 1), x.kthvalue(1, 0, keepdim=True)]

    agrees(fn, x)


def test_mode_takes_the_smallest_of_the_most_frequent(agrees: Any) -> None:
    agrees(lambda x: (x.mode(1), x.mode(0, keepdim=True)), torch.tensor([[3, 1, 3, 1], [2, 2, 5, 5], [7, 0, 9, 7]]))


@pytest.mark.parametrize("count", [5, 300], ids=["compared", "searched"])
@pytest.mark.parametrize("right", [False, True])
def test_search(agrees: Any, count: int, right: bool) -> None:
    def fn(edges: torch.Tensor, x: torch.Tensor, table: torch.Tensor, order: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.bucketize(x, edges, right=right),
            torch.searchsorted(edges, x, right=right, out_int32=True),
            torch.searchsorted(table, x, right=right, sorter=order),
            torch.searchsorted(edges, 3, right=right),
        ]

    edges, table = torch.arange(count).float(), torch.randint(0, 40, (2, count)).float()
    x = torch.tensor([[0.0, 2.0, 2.5, NAN], [-1.0, INF, 4.0, 1.0]])
    agrees(fn, edges, x, table, table.sort(-1).indices)


def test_histograms(agrees: Any) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
        edges = torch.tensor([-2.0, 0.0, 0.5, 3.0])
        return [
            torch.histc(x, 4, -1, 1),
            torch.histc(x, 5),
            tuple(torch.histogram(x, 4, weight=w, density=True)),
            tuple(torch.histogram(x, edges)),
            tuple(torch.histogramdd(x.view(10, 2), [2, 3])),
        ]

    agrees(fn, torch.randn(20), torch.rand(20))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 1), (50, 20), (150, 40)])
def test_ties_are_broken_as_eager_breaks_them(agrees: Any, n: int, k: int) -> None:
    def fn(x: torch.Tensor) -> list[Any]:
        return [x.topk(k, 1), x.to(torch.bfloat16).topk(k, 1, False, False), x.kthvalue(k, 1), x.kthvalue(n, 1)]

    agrees(fn, torch.randint(0, 4, (30, n, 2), generator=torch.Generator().manual_seed(n)))
