"""The barrier that keeps recomputations apart from what they repeat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.recompute import barrier as barrier_op
from tpu_compile.lowering.registry import lowers


@lowers(barrier_op)
def barrier(ctx: LoweringContext, xs: Sequence[Value]) -> tuple[Value, ...]:
    """XLA's CPU compiler drops optimization barriers before it merges what is equal. There, a choice between the value
    and zero, by a bit of the last one (the gradient) that is always set, which XLA does not see through."""
    if ctx.family != "cpu":
        return tuple(hlo.optimization_barrier(xs))
    last = xs[-1]
    if not all(hlo.shape(last)):
        return tuple(xs)
    first = hlo.reshape(hlo.slice_(last, [0] * hlo.rank(last), [1] * hlo.rank(last)), [])
    number = hlo.convert(hlo.compare(first, first, "EQ"), torch.int32)
    always = hlo.compare(stablehlo.or_(number, hlo.scalar(1, torch.int32)), hlo.scalar(0, torch.int32), "NE")
    held = [hlo.select(hlo.broadcast(always, hlo.shape(x)), x, hlo.full_like(x, 0)) for x in xs[:-1]]
    return (*held, last)
