"""Which of torch's attention kernels scaled_dot_product_attention calls on this device."""

from __future__ import annotations

from typing import Any

from torch.nn.attention import SDPBackend


def choice(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> int:
    """``_fused_sdp_choice``: the fused one has a rule, but not with dropout."""
    return int(SDPBackend.MATH.value if dropout_p else SDPBackend.OVERRIDEABLE.value)
