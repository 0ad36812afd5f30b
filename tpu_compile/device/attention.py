"""Which of torch's attention operators scaled_dot_product_attention becomes on this device.

torch asks only the backends that it knows for their choice (``_fused_sdp_choice``) and takes products apart on every
other: so the composite operator itself gets a kernel here, in eager code and in what is traced.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_compile.device.untraced import implement

aten = torch.ops.aten


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """[B, H, L, E], [B, K, S, E] and [B, K, S, V] to [B, H, L, V], whole where a rule has it: not with dropout, and
    not with axes that are broadcast."""
    if dropout_p or not _fits(query, key, value, enable_gqa):
        math: Any = aten._scaled_dot_product_attention_math.default
        attn_mask = _additive(attn_mask, query.dtype)
        return math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    whole: Any = aten._scaled_dot_product_fused_attention_overrideable.default
    return whole(query, key, value, attn_mask, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of truths as the numbers to add; torch's products add whatever they get."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), float("-inf"))


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> bool:
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    (batch, heads, _, _), shared = query.shape, key.shape[1]
    same = heads == shared or (grouped and heads % shared == 0)
    return bool(same and key.shape[:3] == value.shape[:3] and key.shape[0] == batch and key.shape[2] > 0)


def register(library: torch.library.Library) -> None:
    """Put the kernel before autograd, which then differentiates the operator it calls."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        implement(library, "scaled_dot_product_attention", scaled_dot_product_attention, key)
