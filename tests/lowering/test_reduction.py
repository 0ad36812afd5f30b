"""Reductions: every form of ``dim``, NaN and empty axes, dtypes, norms of every order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NAN, INF = float("nan"), float("inf")
MIXED = torch.tensor([[1.0, NAN, 3.0, 3.0], [INF, 2.0, -1.0, NAN], [-INF, 0.0, -0.0, 5.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool], ids=str)
def test_every_form_of_dim(agrees: Any, dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[Any]:
        forms: tuple[Any, ...] = (0, -1, (0, 2), (), None)
        sums = [f(x, d, k) for f in (torch.sum, torch.nansum) for d in forms for k in (False, True)]
        extremes = [f(x, d, k) for f in (torch.amax, torch.amin) for d in ((0, 2), -1, ()) for k in (False, True)]
        return [
            *sums,
            *extremes,
            x.prod(),
            x.prod(1),
            x.any(1),
            x.all((0, 1)),
            x.count_nonzero((0, 1)),
            x.sum(1, dtype=torch.float64),
        ]

    agrees(fn, torch.randint(0, 4, (2, 3, 4)).to(dtype))


def test_the_first_not_a_number_wins(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> list[Any]:
        of_axis = [f(x, d) for f in (torch.max, torch.min, torch.argmax, torch.argmin) for d in (0, 1)]
        return [
            *of_axis,
            x.argmax(),
            x.argmin(),
            x.max(),
            x.min(),
            x.amax(1),
            torch.aminmax(x, dim=0),
            x.nansum(1),
            x.nanmean(0),
        ]

    agrees(fn, MIXED)
    agrees(lambda x: [f(x, d) for f in (torch.max, torch.min) for d in (0, 1)], torch.tensor([[3, 1, 3], [0, 3, 0]]))


def test_moments(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> list[Any]:
        corrected = [
            f(x, d, correction=c) for f in (torch.var, torch.std) for d in (0, None, (0, 2)) for c in (0, 1, 2)
        ]
        return [
            *corrected,
            torch.var_mean(x, 1),
            torch.std_mean(x, (0, 1), keepdim=True),
            x.mean((0, 1)),
            x.logsumexp((0, 1)),
        ]

    agrees(fn, torch.randn(3, 4, 5, requires_grad=True), grad=True)
    wide = torch.randn(4, 3, dtype=torch.complex64)
    agrees(lambda x: (x.var(0), *(torch.view_as_real(t) for t in (x.mean(), x.logsumexp(0)))), wide)


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom is:UserWarning")
def test_nothing_to_reduce(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(1), x.prod(1), x.mean(1), x.any(1), x.all(1), x.logsumexp(1), x.var(1), x.norm(dim=1), x.amax(0)]

    agrees(fn, torch.zeros(2, 0))


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, -1, INF, -INF])
def test_vector_norms(agrees: Any, order: float) -> None:
    def fn(x: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        norm = torch.linalg.vector_norm
        return [*(norm(t, order, d) for t in (x, z) for d in (0, (0, 1), None)), norm(x, order, dtype=torch.float64)]

    agrees(fn, torch.randn(3, 4), torch.randn(3, 4, dtype=torch.complex64))


@pytest.mark.parametrize("order", [1, 2, 3, INF])
def test_gradients_of_norms(agrees: Any, order: float) -> None:
    agrees(lambda x: torch.linalg.vector_norm(x, order, 1), torch.randn(3, 4, requires_grad=True), grad=True)


def test_matrix_norms(agrees: Any) -> None:
    agrees(lambda x: [torch.linalg.matrix_norm(x, o) for o in ("fro", 1, -1, INF, -INF)], torch.randn(2, 3, 4))


def test_hashes(agrees: Any) -> None:
    agrees(
        lambda x, i: (torch.hash_tensor(x), torch.hash_tensor(x, 1), torch.hash_tensor(i)),
        torch.randn(3, 4),
        torch.arange(-3, 4),
    )
