"""Attention against eager: masks of every kind, rows that see nothing, shared key heads, and the fused module paths."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lowering.edges import for_a_tpu

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(sizes))
    return torch.randn(*sizes, dtype=torch.float64).to(dtype).requires_grad_()


def operands(heads: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [leaf(2, 3, 5, 8, dtype=dtype), leaf(2, heads, 6, 8, dtype=dtype), leaf(2, heads, 6, 8, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_dtypes(agrees: Any, dtype: torch.dtype, causal: bool) -> None:
    run = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    agrees(run, *operands(dtype=dtype), grad=dtype.itemsize > 2)


def hiding() -> torch.Tensor:
    """Which keys each query sees; query 2 sees none."""
    seen = torch.arange(60).view(2, 1, 5, 6) % 3 != 0
    seen[:, :, 2] = False
    return seen


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float", "shared", "finite"])
def test_masks(agrees: Any, kind: str, grad: bool) -> None:
    seen = hiding()
    number = torch.zeros(2, 1, 5, 6).masked_fill(~seen, float("-inf"))
    finite = number.clamp(min=torch.finfo(torch.float32).min)
    mask = {"bool": seen, "float": number, "shared": torch.linspace(-1, 1, 30).view(5, 6), "finite": finite}[kind]
    q, k, v = operands() if grad else [t.detach() for t in operands()]
    agrees(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), q, k, v, mask, grad=grad)


def test_a_mask_that_learns(agrees: Any) -> None:
    run = lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m)  # noqa: E731
    agrees(run, *operands(), leaf(2, 3, 5, 6), grad=True)


def test_shared_key_heads(agrees: Any) -> None:
    run = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)  # noqa: E731
    agrees(run, *operands(heads=1), grad=True)
    agrees(run, *(t.detach() for t in operands(heads=1)))


@pytest.mark.parametrize("sizes", [(5, 6), (2, 1, 5, 6), (2, 4, 5, 6)], ids=str)
def test_shared_key_heads_and_masks(agrees: Any, sizes: tuple[int, ...]) -> None:
    run = lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True)  # noqa: E731
    q, k, v = leaf(2, 4, 5, 8), leaf(2, 2, 6, 8), leaf(2, 2, 6, 3)
    agrees(run, q, k, v, leaf(*sizes), grad=True)
    seen = torch.arange(leaf(*sizes).numel()).view(sizes) % 3 != 0
    agrees(run, q.detach(), k.detach(), v.detach(), seen)


def test_other_shapes(agrees: Any) -> None:
    run = lambda q, k, v: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    agrees(run, leaf(2, 5, 8), leaf(2, 6, 8), leaf(2, 6, 8), grad=True)
    agrees(run, leaf(2, 3, 5, 8), leaf(2, 3, 6, 8), leaf(2, 3, 6, 4), grad=True)


PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    "masks", [{}, {"key_padding_mask": PADDED}, {"attn_mask": CAUSAL}], ids=["no", "keys", "queries"]
)
@pytest.mark.parametrize("weights", [True, False])
def test_fused_multihead_attention(agrees: Any, masks: dict[str, torch.Tensor], weights: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():
        agrees(lambda x: attention(x, x, x, need_weights=weights, **masks), leaf(2, 5, 8).detach())


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_fused_encoder_layer(agrees: Any, norm_first: bool, activation: str) -> None:
    options: dict[str, Any] = {"activation": activation, "norm_first": norm_first, "batch_first": True}
    layer = nn.TransformerEncoderLayer(8, 2, 16, **options).eval()
    with torch.no_grad():
        agrees(layer, leaf(2, 5, 8).detach())
        agrees(lambda x: layer(x, src_key_padding_mask=PADDED), leaf(2, 5, 8).detach())


def gradients(*arguments: torch.Tensor, causal: bool = False) -> tuple[torch.Tensor, ...]:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True).sin().sum()

    return torch.func.grad(loss, argnums=(0, 1, 2))(*arguments)


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_gradients_for_a_tpu(kind: str) -> None:
    """What a TPU is given, run here: the gradient computes the softmax again and reads no logarithm of sums."""
    number = torch.zeros(2, 1, 5, 6).masked_fill(~hiding(), float("-inf"))
    masks = {"bool": [hiding()], "float": [number]}.get(kind, [])
    arguments = [*(t.detach() for t in (leaf(2, 4, 5, 8), leaf(2, 2, 6, 8), leaf(2, 2, 6, 8))), *masks]
    run = partial(gradients, causal=kind == "causal")
    found = for_a_tpu(run, *arguments)
    for got, want in zip(found.results, run(*arguments), strict=True):
        torch.testing.assert_close(got, want)
    assert " log(" not in found.hlo
