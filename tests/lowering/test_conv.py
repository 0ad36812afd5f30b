"""Convolutions and their gradients against eager: strides, paddings, dilations, groups in which a side can be off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tpu_compile

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(sizes))
    return torch.randn(*sizes, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(agrees: Any, dtype: torch.dtype) -> None:
    operands = leaf(2, 4, 9, 10, dtype=dtype), leaf(6, 4, 3, 3, dtype=dtype), leaf(6, dtype=dtype)
    agrees(lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), *operands, grad=dtype != torch.bfloat16)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        ((2, 4, 11, 10), (6, 2, 3, 3), {"stride": (2, 1), "padding": (1, 2), "dilation": (2, 1), "groups": 2}),
        ((2, 4, 8, 9), (4, 1, 3, 3), {"padding": 1, "groups": 4}),
        ((1, 2, 4, 4), (3, 2, 2, 2), {"padding": 5}),
        ((1, 2, 11, 14), (3, 2, 3, 2), {"stride": 4}),
        ((2, 4, 11), (6, 4, 4), {"padding": "same", "dilation": 3}),
        ((4, 11), (6, 4, 4), {"stride": 3}),
        ((2, 4, 5, 6, 7), (6, 4, 2, 3, 3), {"stride": 2, "padding": (1, 0, 1)}),
        ((0, 2, 4, 4), (3, 2, 2, 2), {}),
    ],
    ids=["grouped", "depthwise", "padding-beyond-kernel", "leftover", "same-even", "unbatched", "3d", "empty"],
)
def test_forms(agrees: Any, x: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any]) -> None:
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(weight)]
    agrees(lambda x, w: conv(x, w, **options), leaf(*x), leaf(*weight), grad=True)


ONE_CHANNEL = {
    "one channel": ((3, 1, 8, 7), (5, 1, 3, 3), {"padding": 1}),
    "strided": ((2, 1, 9, 11), (4, 1, 2, 4), {"stride": (2, 3), "padding": (2, 0), "dilation": (1, 2)}),
    "leftover": ((2, 1, 10), (3, 1, 4), {"stride": 4}),
    "3d": ((1, 1, 4, 5, 6), (2, 1, 2, 1, 3), {"padding": (0, 4, 1), "stride": 2}),
}


@pytest.mark.parametrize("name", ONE_CHANNEL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_filters_of_one_channel(agrees: Any, name: str, dtype: torch.dtype) -> None:
    """On a CPU they are matrix products, not convolutions."""
    x, weight, options = ONE_CHANNEL[name]
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(weight)]
    operands = leaf(*x, dtype=dtype), leaf(*weight, dtype=dtype), leaf(weight[0], dtype=dtype)
    agrees(lambda x, w, b: conv(x, w, b, **options), *operands, grad=dtype == torch.float32)
    if dtype == torch.float32:
        text = tpu_compile.trace(lambda x, w: conv(x, w, **options), *operands[:2]).lower().as_text()
        assert "stablehlo.convolution" not in text and "stablehlo.dot_general" in text


@pytest.mark.parametrize(("size", "kernel"), [(2048, 3), (16, 5)], ids=["large image", "many taps"])
def test_filters_of_one_channel_that_stay_convolutions(size: int, kernel: int) -> None:
    """As a product, what the taps meet is in memory at once: ``kernel**2`` images."""
    text = tpu_compile.trace(F.conv2d, torch.ones(1, 1, size, size), torch.ones(2, 1, kernel, kernel)).lower().as_text()
    assert "stablehlo.convolution" in text


@pytest.mark.parametrize(
    ("stride", "output_padding", "dilation", "groups"), [(2, 1, 1, 1), (2, 1, 2, 2), (1, 2, 3, 1), (3, 0, 1, 2)]
)
def test_transposed(agrees: Any, stride: int, output_padding: int, dilation: int, groups: int) -> None:
    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, w, b, stride, 1, output_padding, groups, dilation)

    agrees(run, leaf(2, 4, 5, 6), leaf(4, 3, 3, 3), leaf(3 * groups), grad=True)


def test_transposed_padding_beyond_the_kernel(agrees: Any) -> None:
    agrees(lambda x, w: F.conv_transpose2d(x, w, padding=3), leaf(1, 2, 9, 9), leaf(2, 3, 3, 3), grad=True)


def test_integers(agrees: Any) -> None:
    x, w = torch.arange(-16, 16).view(1, 2, 4, 4), torch.arange(24).view(3, 2, 2, 2)
    agrees(lambda x, w: F.conv2d(x, w), x, w)


def test_only_the_filter_needs_a_gradient(agrees: Any) -> None:
    agrees(lambda x, w: F.conv2d(x, w), leaf(2, 3, 6, 6).detach(), leaf(4, 3, 3, 3), grad=True)


def test_transposed_convolutions_with_much_output_padding_round_as_eager_in_16_bits() -> None:
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((2, 4, 5, 6), (4, 3, 3, 2), (6,)))

    def fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv_transpose2d(
            x, weight, bias, stride=(2, 1), padding=(1, 0), output_padding=(1, 1), groups=2, dilation=(3, 2)
        )

    assert torch.equal(torch.compile(fn, backend="tpu")(x, weight, bias), fn(x, weight, bias))
