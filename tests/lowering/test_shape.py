"""Views, windows, diagonals, strides and pads against eager, with the layouts and amounts that op_db does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tpu_compile.errors import UnsupportedOp


def test_diagonals(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        axes = ((0, 1), (1, 0), (-1, 0))
        taken = [x.diagonal(o, a, b).contiguous() for o in (-4, -1, 0, 2, 5) for a, b in axes]
        put = [x.diagonal_scatter(torch.ones_like(x.diagonal(o, a, b)), o, a, b) for o in (-1, 0, 2) for a, b in axes]
        return [*taken, *put, x.diag_embed(-1, 0, 2)]

    agrees(fn, torch.randn(4, 3, 5, requires_grad=True), grad=True)


def test_a_diagonal_keeps_negative_zero_and_not_a_number(agrees: Any) -> None:
    x = torch.tensor([[-0.0, float("nan")], [1.0, float("inf")]])
    agrees(lambda x: torch.signbit(x.diagonal()), x)
    agrees(lambda x: x.diagonal() * 1, x)


def test_windows(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.unfold(d, n, s).contiguous() for d in (0, -1) for n, s in ((1, 1), (3, 1), (2, 3), (6, 2))]

    agrees(fn, torch.randn(6, 7, requires_grad=True), grad=True)


def strided(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.as_strided(x, (2, 3), (1, 2)) * 1,
        torch.as_strided(x, (4,), (2,), 1) * 1,
        x.as_strided((6,), (1,)) * 1,
    ]


def test_as_strided_follows_memory(agrees: Any) -> None:
    agrees(strided, torch.randn(3, 4))
    agrees(strided, torch.randn(3, 4).t())
    agrees(lambda x: strided(x.t() + 1), torch.randn(3, 4))
    agrees(lambda x, s: x.as_strided_scatter(s, (2, 2), (4, 1), 1), torch.randn(3, 4).t(), torch.randn(2, 2))


def test_as_strided_beyond_the_tensor_is_refused() -> None:
    gaps = torch.randn(4, 6)[:, :2]
    with pytest.raises(UnsupportedOp, match="not the tensor's own"):
        torch.compile(lambda x: torch.as_strided(x, (8,), (1,)) * 1, backend="tpu", fullgraph=True)(gaps)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_pads(agrees: Any, mode: str) -> None:
    def lines(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.pad(x, amount, mode=mode) for amount in ((1, 2), (-1, 2), (2, -1))]

    def planes(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.pad(x, amount, mode=mode) for amount in ((1, 0, 2, 1), (-1, 1, 0, -2), (2, 2, 2, 2))]

    agrees(lines, torch.randn(2, 5, 6, requires_grad=True), grad=True)
    agrees(planes, torch.randn(2, 2, 5, 6, requires_grad=True), grad=True)


def test_constant_pads(agrees: Any) -> None:
    agrees(lambda x: [F.pad(x, p, value=3) for p in ((1, 2), (-1, 2), (-2, -1, 1, -1), (0, 0))], torch.randn(4, 5))
    agrees(lambda x: F.pad(x, (1, -1)), torch.tensor([True, False, True]))


def test_scatters_into_slices(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        ranges = ((0, 6, 1), (1, 5, 2), (-4, None, 3), (4, 2, 1))
        sliced = [x.slice_scatter(torch.ones_like(x[a:b:s]), 0, a, b, s) for a, b, s in ranges]
        return [*sliced, x.select_scatter(x[:, 0] * 2, 1, -1)]

    agrees(fn, torch.randn(6, 3, requires_grad=True), grad=True)


def test_rolls_flips_and_repeats(agrees: Any) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        rolled = [x.roll(5), x.roll((-1, 7), (0, 2)), x.roll((1, 1), (0, 0)), x.flip((0, -1)), x.rot90(3, (0, 2))]
        return [*rolled, x.repeat(2, 1, 0, 2), x.tile(3), x.repeat_interleave(2, 1), torch.cat([x, x.int(), x > 0], 1)]

    agrees(fn, torch.randn(2, 3, 4))
    agrees(lambda x: (x.flip(()), x.roll(2), x.repeat(2, 2), x.tile(2)), torch.tensor(1.5))
