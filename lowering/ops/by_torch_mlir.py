"""Tier 3: what torch-mlir lowers for us.

By itself only ops that are verified here: a wrong answer is worse than an op that runs on the CPU, and torch-mlir is
known to be wrong for a remainder by a negative divisor, avg_pool3d with padding and take with negative indices. Whole
graphs go that way when the user asks for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from tpu_compile.lowering import torch_mlir
from tpu_compile.lowering.context import LoweringContext, Refusal
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.program import TensorSpec
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

VERIFIED = (aten._convolution.default,)
"""Ops without a rule of ours that torch-mlir lowers right: tests/lowering/test_torch_mlir.py compares each with
eager."""


def _rule(op: Any) -> Any:
    def rule(ctx: LoweringContext, *args: Any, **kwargs: Any) -> Any:
        request, operands = torch_mlir.one_op(op, args, kwargs)
        results = torch_mlir.call(ctx, request, operands, [s for s in ctx.outs if isinstance(s, TensorSpec)])
        return tuple(results) if isinstance(ctx.out, tuple) else results[0]

    return rule


if torch_mlir.installed():
    for _op in VERIFIED:
        lowers(_op, tier="torch_mlir")(_rule(_op))


@lowers(torch_mlir.graph_call, tier="torch_mlir")
def graph_call(ctx: LoweringContext, graph_module: GraphModule, results: Any, *operands: Value) -> tuple[Value, ...]:
    try:
        request = torch_mlir.whole_graph(graph_module, results, ctx.walk.number)
        return tuple(torch_mlir.call(ctx, request, operands, ctx.outs))
    except Refusal as refusal:
        raise torch_mlir.located(refusal, graph_module) from None
