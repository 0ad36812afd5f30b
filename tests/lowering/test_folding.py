"""Products on the axes that their operands were made of: what a TPU is given, run here."""

from __future__ import annotations

import math

import pytest
import torch

import tpu_compile
from tests.lowering.edges import for_a_tpu

EINSUMS = {
    "experts": ("tw,ewi->eti", (6, 4), (3, 4, 5)),
    "experts back": ("eti,eiw->tw", (3, 6, 5), (3, 5, 4)),
    "heads": ("bqhd,bkhd->bhqk", (2, 5, 3, 4), (2, 6, 3, 4)),
    "mixed": ("bhqk,bkhd->bqhd", (2, 3, 5, 6), (2, 6, 3, 4)),
    "two summed": ("abcd,dbe->ace", (2, 3, 4, 5), (5, 3, 6)),
    "size one": ("abc,bcd->ad", (1, 3, 1), (3, 1, 4)),
    "order of sums differs": ("abcd,cbe->ade", (2, 3, 4, 5), (4, 3, 6)),
    "empty": ("ab,bc->ac", (0, 3), (3, 4)),
}


@pytest.mark.parametrize("name", EINSUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_einsum_for_a_tpu(name, dtype):
    equation, *shapes = EINSUMS[name]
    a, b = (torch.arange(math.prod(s)).reshape(s).remainder(7).sub(3).to(dtype) for s in shapes)

    def product(a, b):
        return torch.einsum(equation, a, b)

    (result,) = for_a_tpu(product, a, b).results
    torch.testing.assert_close(result, product(a.double(), b.double()).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 3, 4), (5, 4), (2, 3, 1, 4), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 6])
def test_linear_for_a_tpu(sizes, bias, width):
    x, weight = (torch.arange(math.prod(s)).reshape(s).remainder(7).sub(3.0) for s in (sizes, (width, 4)))
    arguments = [x, weight, torch.arange(width) + 1.0][: 2 + bias]
    (result,) = for_a_tpu(torch.nn.functional.linear, *arguments).results
    assert torch.equal(result, torch.nn.functional.linear(*arguments))


def test_rows_of_a_linear_layer_stay_apart():
    traced = tpu_compile.trace(torch.nn.functional.linear, torch.ones(2, 3, 4), torch.ones(6, 4), torch.ones(6))
    assert "(tensor<2x3x4xf32>, tensor<6x4xf32>) -> tensor<2x3x6xf32>" in traced.lower("tpu").as_text()


def test_heads_are_merged_and_tokens_stay_apart():
    def project(x, weight):
        return torch.nn.functional.linear(x.transpose(1, 2).reshape(2, 5, 12), weight)

    x, weight = torch.randn(2, 3, 5, 4), torch.randn(6, 12)
    found = for_a_tpu(project, x, weight)
    assert "(tensor<2x5x12xf32>, tensor<6x12xf32>) -> tensor<2x5x6xf32>" in found.stablehlo
    torch.testing.assert_close(found.results[0], project(x, weight))


def test_axes_are_contracted_where_they_stand():
    x, weights = torch.ones(6, 4), torch.ones(3, 4, 5)
    traced = tpu_compile.trace(lambda x, w: torch.einsum("tw,ewi->eti", x, w), x, weights)
    text = traced.lower("tpu").as_text()
    assert "(tensor<3x4x5xf32>, tensor<6x4xf32>) -> tensor<3x5x6xf32>" in text
