"""FlexAttention: the score and mask functions act on the whole score matrix, which XLA fuses into the softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.flex_attention import math_attention

from tpu_compile.lowering import hlo
from tpu_compile.lowering.composite import lower_traced
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers


@lowers(torch.ops.higher_order.flex_attention)
def flex_attention(
    ctx: LoweringContext,
    query: Value,
    key: Value,
    value: Value,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    kernel_options: Any,
    score_mod_other_buffers: Any = (),
    mask_mod_other_buffers: Any = (),
) -> tuple[Value, ...]:
    """(result, logarithm of the sums, largest scores), the latter two to the base 2. Block sizes are hints: unused."""
    promised = ctx.outs
    buffers = tuple(score_mod_other_buffers), tuple(mask_mod_other_buffers)
    results = lower_traced(ctx, math_attention, query, key, value, score_mod, tuple(block_mask), scale, {}, *buffers)
    return tuple(hlo.convert(r, spec.dtype) for r, spec in zip(results, promised, strict=True))
