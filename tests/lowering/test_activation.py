"""Activations and their gradients against eager, and losses that round as torch's kernels do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tpu_compile
from tests.lowering.edges import compiled, for_a_tpu

aten = torch.ops.aten
ACTIVATIONS = {
    **{
        name: getattr(F, name)
        for name in """relu relu6 gelu silu mish softplus hardswish hardsigmoid hardtanh elu selu
        celu logsigmoid softsign tanhshrink softshrink hardshrink leaky_relu""".split()
    },
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.5, -1.0),
    "elu_alpha": lambda x: F.elu(x, alpha=0.7),
    "rrelu": lambda x: F.rrelu(x, training=False),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype)),
    "glu": lambda x: F.glu(x[:64]),
}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradient(fn: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = fn(x)
    weight = torch.linspace(1, 2, out.numel()).reshape(out.shape).to(out.dtype)
    return out, torch.autograd.grad(out, x, weight)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_activations_and_gradients(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-8, 8, 62), torch.tensor([0.0, 30.0])]).to(dtype)
    tolerance = TOLERANCE[dtype]

    def every(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([fn(x) for fn in ACTIVATIONS.values()])

    for got, want in zip(
        gradient(torch.compile(every, backend="tpu", fullgraph=True), x), gradient(every, x), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_functional_gradient_of_silu_rounds_once(dtype: torch.dtype) -> None:
    def slope(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: (F.silu(x) * weight).sum())(x)

    x, weight = torch.linspace(-8, 8, 64).to(dtype), torch.linspace(1, 2, 64).to(dtype)
    traced = tpu_compile.trace(slope, x, weight)
    assert traced.graph_module.graph.find_nodes(op="call_function", target=aten.silu_backward.default)
    got, want = traced.lower().compile()(x, weight), slope(x.double(), weight.double())
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 8)


def test_the_gradient_of_silu_for_a_tpu() -> None:
    """XLA's logistic is spelled out: what is cheap by name would be computed again in every product that reads it."""
    x = torch.linspace(-100, 100, 65)
    found = for_a_tpu(aten.silu_backward, torch.ones(65), x)
    torch.testing.assert_close(found.results[0], aten.silu_backward(torch.ones(65), x))
    assert "logistic" not in found.stablehlo


def test_what_reads_parts_of_a_functional_gradient_of_silu_keeps_them() -> None:
    """The second gradient of it."""

    def curve(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: torch.func.grad(lambda x: F.silu(x).sum())(x).sum())(x)

    x = torch.linspace(-8, 8, 64).bfloat16()
    torch.testing.assert_close(compiled(curve, x), curve(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_soft_margin_loss_overflows_where_torch_does(dtype: torch.dtype) -> None:
    x, target = torch.tensor([12.0, -3.0, 0.5, 2.0]).to(dtype), torch.tensor([-1.0, 1.0, 1.0, -1.0]).to(dtype)
    for reduction in ("none", "mean", "sum"):
        torch._dynamo.reset()
        want = F.soft_margin_loss(x, target, reduction=reduction)
        got = compiled(lambda x, t, r=reduction: F.soft_margin_loss(x, t, reduction=r), x, target)
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_soft_margin_loss_of_nothing() -> None:
    empty = torch.zeros(0)
    assert compiled(F.soft_margin_loss, empty, empty).isnan()
