"""Pooling against eager: positions, ties, NaN, rows of -inf, windows that hang over, and what goes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.edges import for_a_tpu

aten = torch.ops.aten


def leaf(*sizes: int) -> torch.Tensor:
    torch.manual_seed(sum(sizes))
    return torch.randn(*sizes).requires_grad_()


def awkward(*sizes: int) -> torch.Tensor:
    """Ties, NaN and -inf."""
    torch.manual_seed(0)
    x, chance = torch.randint(-3, 4, sizes).float(), torch.rand(sizes)
    return x.masked_fill(chance < 0.15, float("nan")).masked_fill(chance > 0.8, float("-inf"))


WINDOWS = [
    (3, 2, 1, 1, True),
    ((3, 2), (2, 1), (1, 0), (1, 2), False),
    (3, 1, 1, 2, True),
    (2, 3, 1, 1, True),
    (5, 2, 2, 2, True),
    (7, 3, 3, 1, True),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_max_and_its_gradient(agrees: Any, window: tuple[Any, ...]) -> None:
    agrees(lambda x: F.max_pool2d(x, *window, return_indices=True), leaf(2, 3, 13, 11), grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_max_and_its_gradient_for_a_tpu(window: tuple[Any, ...], dtype: torch.dtype) -> None:
    """One operation each, where positions are not asked for. Which of equal maxima takes the gradient, XLA chooses."""

    def gradient(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x, weight: (F.max_pool2d(x, *window) * weight).sum())(x, weight)

    torch.manual_seed(0)
    x = torch.randperm(143).view(1, 1, 13, 11).to(dtype)
    weight = torch.rand_like(F.max_pool2d(x, *window))
    found = for_a_tpu(gradient, x, weight)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.results[0], gradient(x.double(), weight.double()).to(dtype), rtol=2 * eps, atol=0)
    assert ("select_and_scatter" in found.stablehlo) == (window[3] == 1)
    pooled = for_a_tpu(lambda x: F.max_pool2d(x, *window), x)
    assert torch.equal(pooled.results[0], F.max_pool2d(x, *window))
    assert " iota(" not in pooled.hlo


@pytest.mark.parametrize("window", [*WINDOWS, (40, 3, 5, 1, False)], ids=str)
def test_max_of_awkward_values(agrees: Any, window: tuple[Any, ...]) -> None:
    size = (1, 2, 50, 44) if window[0] == 40 else (2, 3, 13, 11)
    agrees(lambda x: F.max_pool2d(x, *window, return_indices=True), awkward(*size))


def test_max_of_long_windows_goes_back(agrees: Any) -> None:
    agrees(lambda x: F.max_pool2d(x, (40, 35), 3, 5), leaf(1, 2, 50, 44), grad=True)


def test_max_of_integers(agrees: Any) -> None:
    agrees(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), torch.arange(-40, 40).view(1, 2, 5, 8) % 7)


def test_max_in_other_dimensions(agrees: Any) -> None:
    agrees(lambda x: F.max_pool1d(x, 3, 2, 1, 1, True), leaf(2, 3, 12), grad=True)
    agrees(lambda x: F.max_pool3d(x, (2, 3, 2), 2, 1, return_indices=True), leaf(2, 3, 5, 6, 7), grad=True)
    agrees(lambda x: F.max_pool2d(x, 2), leaf(3, 5, 6), grad=True)
    agrees(lambda x: F.max_pool2d(x, 2), leaf(0, 3, 5, 6), grad=True)


def unpooled(x: torch.Tensor) -> torch.Tensor:
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, indices, 2)


def test_unpool(agrees: Any) -> None:
    agrees(unpooled, leaf(2, 3, 8, 8), grad=True)


@pytest.mark.parametrize(
    "window",
    [
        (3, 2, 1, True, True, None),
        (3, 2, 1, True, False, None),
        ((3, 2), (1, 3), (1, 0), False, False, None),
        (4, 3, 2, True, True, 7),
        (2, 4, 0, False, True, None),
    ],
    ids=str,
)
def test_average(agrees: Any, window: tuple[Any, ...]) -> None:
    agrees(lambda x: F.avg_pool2d(x, *window), leaf(2, 3, 12, 11), grad=True)


def test_average_in_other_dimensions(agrees: Any) -> None:
    agrees(lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), leaf(3, 12), grad=True)
    agrees(lambda x: F.avg_pool3d(x, (2, 3, 2), 2, 1, True, False), leaf(2, 3, 5, 6, 7), grad=True)
    agrees(lambda x: F.avg_pool2d(x, 3, 2, 1), torch.arange(-40, 40).view(1, 2, 5, 8))


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (26, 22), (20, 3), (None, 4)], ids=str)
def test_adaptive(agrees: Any, size: tuple[Any, ...]) -> None:
    agrees(lambda x: F.adaptive_avg_pool2d(x, size), leaf(2, 3, 13, 11), grad=True)
    agrees(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), leaf(2, 3, 13, 11), grad=True)
    agrees(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), awkward(2, 3, 13, 11))


def test_a_nan_stays_in_its_windows(agrees: Any) -> None:
    agrees(lambda x: F.adaptive_avg_pool2d(x, (5, 4)), awkward(2, 3, 13, 11))


@pytest.mark.parametrize(("kernel", "size"), [((2, 2), (4, 5)), ((3, 2), (1, 7)), ((2, 2), (9, 8))], ids=str)
def test_fractional(agrees: Any, kernel: tuple[int, int], size: tuple[int, int]) -> None:
    drawn = torch.tensor([[[0.1, 0.9], [0.5, 0.3], [0.99, 0.0]]]).expand(2, 3, 2)
    run = lambda x, r: aten.fractional_max_pool2d(x, kernel, size, r)  # noqa: E731
    agrees(run, leaf(2, 3, 10, 9), drawn, grad=True)
