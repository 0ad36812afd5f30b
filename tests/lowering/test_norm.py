"""Normalisations against eager: running statistics, absent weights, mixed dtypes, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lowering.edges import assert_same, for_a_tpu

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(sizes))
    return torch.randn(*sizes, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_moves_its_statistics(agrees: Any, training: bool) -> None:
    agrees(nn.BatchNorm2d(3, momentum=0.3).train(training), leaf(4, 3, 5, 6), grad=True, calls=2)


def test_batch_norm_without_statistics_or_weights(agrees: Any) -> None:
    agrees(lambda x: F.batch_norm(x, None, None, training=True), leaf(4, 3, 5), grad=True)


def test_batch_norm_of_bfloat16_with_float32_weights(agrees: Any) -> None:
    agrees(nn.BatchNorm1d(3), leaf(4, 3, 5, dtype=torch.bfloat16).detach())


@pytest.mark.parametrize("mean", [0.0, 20.0])
def test_batch_norm_of_bfloat16_for_a_tpu(mean: float) -> None:
    """Both sums of one reading: where a second were needed, the mean would be subtracted before the second sum."""
    x, ones = (leaf(32, 3, 8, 8) + mean).detach().bfloat16(), torch.ones(3)
    found = for_a_tpu(lambda x, w: F.batch_norm(x, None, None, w, w, training=True, eps=1e-5), x, ones)
    want = F.batch_norm(x.double(), None, None, ones.double(), ones.double(), training=True).bfloat16()
    assert_same(found.results[0], want, ulps=1, atol=2**-8)
    assert found.stablehlo.rindex("stablehlo.reduce") < found.stablehlo.index("stablehlo.subtract")


def test_batch_norm_by_its_other_names(agrees: Any) -> None:
    x, w, m, v = leaf(4, 3, 5).detach(), leaf(3).detach(), torch.zeros(3), torch.ones(3)
    agrees(lambda *a: aten._batch_norm_with_update_functional(*a, 0.1, 1e-5), x, w, w, m, v)
    agrees(lambda *a: aten._batch_norm_no_update(*a, 0.1, 1e-5), x, w, w, m, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_group_and_rms(agrees: Any, dtype: torch.dtype) -> None:
    grad = dtype != torch.bfloat16
    x, w = leaf(4, 6, 5, dtype=dtype), leaf(5, dtype=dtype)
    agrees(lambda x, w: F.layer_norm(x, (5,), w, w), x, w, grad=grad)
    agrees(lambda x, w: F.rms_norm(x, (5,), w), x, w, grad=grad)
    agrees(lambda x, w: F.group_norm(x, 2, w, w), x, leaf(6, dtype=dtype), grad=grad)


def test_absent_weights_and_no_rows(agrees: Any) -> None:
    agrees(lambda x: F.layer_norm(x, (5,)), leaf(4, 5), grad=True)
    agrees(lambda x, w: F.layer_norm(x, (5,), w), leaf(0, 5), leaf(5), grad=True)
    agrees(lambda x: F.group_norm(x, 3), leaf(4, 6, 5), grad=True)
    agrees(lambda x: F.local_response_norm(F.instance_norm(x), 2), leaf(4, 6, 5), grad=True)


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(agrees: Any, dim: int) -> None:
    sizes = [1, 1, 1]
    sizes[dim] = 4
    agrees(lambda v, g: torch._weight_norm(v, g, dim), leaf(4, 5, 4), leaf(*sizes), grad=True)


def test_the_reciprocal_deviation_is_rounded_once() -> None:
    """Every element of a row inherits its error, and where a norm follows a norm the gradient is made of it."""
    a = torch.linspace(0.5, 2, 1001)
    x = torch.stack([a, -a], 1)  # its variance is a * a, rounded once
    compiled = torch.compile(lambda x: torch.native_layer_norm(x, (2,), None, None, 1e-5)[2], backend="tpu")
    assert torch.equal(compiled(x)[:, 0], ((a * a).double() + 1e-5).rsqrt().float())
