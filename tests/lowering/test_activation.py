"""Activations and their gradients against eager, and losses that round as torch's kernels do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.edges import compiled

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
