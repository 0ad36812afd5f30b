"""Interpolation, grids, pads and rearranged pixels against eager, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

SIZES: list[dict[str, Any]] = [
    {"scale_factor": 2},
    {"scale_factor": 1.7},
    {"scale_factor": 0.6, "recompute_scale_factor": True},
    {"size": (7, 3)},
    {"size": (1, 1)},
    {"size": (5, 6)},
]


def leaf(*sizes: int) -> torch.Tensor:
    torch.manual_seed(sum(sizes))
    return torch.randn(*sizes).requires_grad_()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("mode", "align"),
    [
        ("nearest", None),
        ("nearest-exact", None),
        ("bilinear", True),
        ("bilinear", False),
        ("bicubic", True),
        ("bicubic", False),
    ],
)
def test_images(agrees: Any, mode: str, align: bool | None, size: dict[str, Any]) -> None:
    agrees(lambda x: F.interpolate(x, mode=mode, align_corners=align, **size), leaf(2, 3, 5, 6), grad=True)


@pytest.mark.parametrize("align", [True, False])
def test_lines_and_volumes(agrees: Any, align: bool) -> None:
    agrees(lambda x: F.interpolate(x, 7, mode="linear", align_corners=align), leaf(2, 3, 5), grad=True)
    run = lambda x: F.interpolate(x, (3, 4, 9), mode="trilinear", align_corners=align)  # noqa: E731
    agrees(run, leaf(1, 2, 5, 4, 6), grad=True)
    agrees(lambda x: F.interpolate(x, scale_factor=2), leaf(1, 2, 3, 4, 5), grad=True)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("size", [(7, 3), (2, 12), (5, 6), (20, 2)], ids=str)
def test_antialiased(agrees: Any, mode: str, align: bool, size: tuple[int, int]) -> None:
    run = lambda x: F.interpolate(x, size, mode=mode, align_corners=align, antialias=True)  # noqa: E731
    agrees(run, leaf(1, 2, 15, 6), grad=True)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample(agrees: Any, mode: str, padding: str, align: bool) -> None:
    points = (leaf(2, 4, 7, 2).double() * 1.2).detach().requires_grad_()
    image = leaf(2, 3, 5, 6).double().detach().requires_grad_()
    agrees(lambda x, g: F.grid_sample(x, g, mode, padding, align), image, points, grad=True)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_points_that_are_no_numbers(agrees: Any, padding: str) -> None:
    points = leaf(2, 4, 7, 2).detach()
    points[0, 0, 0], points[0, 1, 1, 0], points[1, 1, 1] = float("nan"), float("inf"), 1e9
    agrees(
        lambda x, g: F.grid_sample(x, g, padding_mode=padding, align_corners=False), leaf(2, 3, 5, 6).detach(), points
    )


def test_grid_sample_of_a_volume(agrees: Any) -> None:
    run = lambda x, g: F.grid_sample(x, g, align_corners=False)  # noqa: E731
    agrees(run, leaf(1, 2, 3, 4, 5), leaf(1, 2, 3, 4, 3), grad=True)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_pads(agrees: Any, mode: str) -> None:
    agrees(lambda x: F.pad(x, (2, 1, 0, 3), mode=mode), leaf(2, 3, 5, 6), grad=True)
    agrees(lambda x: F.pad(x, (-1, 2, 0, -1), mode=mode), leaf(2, 3, 5, 6), grad=True)


def test_rearranged(agrees: Any) -> None:
    agrees(lambda x: F.pixel_unshuffle(F.channel_shuffle(F.pixel_shuffle(x, 2), 2), 2), leaf(2, 8, 4, 6), grad=True)
    agrees(lambda x: F.unfold(x, (2, 3), 2, 1, (1, 2)), leaf(2, 3, 8, 9), grad=True)
    agrees(lambda x: F.fold(x, (6, 7), (2, 3), 1, 1, (2, 1)), leaf(2, 12, 28), grad=True)


@pytest.mark.parametrize("space", [(7, 20), (3, 4, 5)], ids=["2d", "3d"])
def test_grid_samples_round_as_eager_in_16_bits(space: tuple[int, ...]) -> None:
    image = torch.randn(2, 3, *space).bfloat16()
    grid = (torch.rand(2, *[4] * len(space), len(space)) * 3 - 1.5).bfloat16()
    modes = ["bilinear", "nearest", *(["bicubic"] if len(space) == 2 else [])]

    def fn(image: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.grid_sample(image, grid, mode, padding, align_corners=align)
            for mode in modes
            for padding in ("zeros", "border", "reflection")
            for align in (False, True)
        ]

    torch.testing.assert_close(torch.compile(fn, backend="tpu")(image, grid), fn(image, grid), rtol=0, atol=0)
