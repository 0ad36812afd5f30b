"""Ops kept for what they do, not for a result. AOTAutograd threads a token through them, to keep their order."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._higher_order_ops.effects import with_effects

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers, registry

aten = torch.ops.aten
prims = torch.ops.prims


@lowers(prims._make_token.default)
def make_token(ctx: LoweringContext) -> Value:
    return hlo.full(0, ctx.out.dtype, ctx.out.shape)


@lowers(prims._sink_tokens.default)
def sink_tokens(ctx: LoweringContext, tokens: Any) -> None:
    return None


@lowers(with_effects)
def effect(ctx: LoweringContext, token: Value, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """(token, the op's results)."""
    rule = registry.get(op)
    if rule is None:
        ctx.refuse(f"{op}, which it wraps, has no rule")
    promised = ctx.outs
    ctx.out = promised[1] if len(promised) == 2 else promised[1:]
    result = rule.function(ctx, *args, **kwargs)
    return (token, *(result if isinstance(result, (tuple, list)) else [result] * (len(promised) - 1)))


@lowers(aten._linalg_check_errors.default)
def linalg_check_errors(ctx: LoweringContext, info: Value, api_name: str, *, is_matrix: bool) -> None:
    """Raises torch.linalg.LinAlgError on the host, as eager does."""
    ctx.walk.host_check(info, partial(aten._linalg_check_errors, api_name=api_name, is_matrix=is_matrix))
