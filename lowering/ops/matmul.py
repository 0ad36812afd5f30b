"""Matrix products. Axes are contracted where they stand: a transpose before a product is never a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.folding import batched_product, unmerged_product
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def product(a: Value, b: Value, contract: Any, batch: Any = ((), ())) -> Value:
    """A dot in the operands' dtype. Integers multiply exactly; 16-bit floats accumulate in float32, round once."""
    kind = hlo.dtype(a)
    if kind == torch.int32 and (narrow := int8_operands(a, b)):
        a, b = narrow
    return hlo.convert(hlo.dot_general(a, b, contract, batch, out=dtypes.opmath(kind)), kind)


def int8_operands(a: Value, b: Value) -> tuple[Value, Value] | None:
    """The int8 tensors that two int32 factors were converted from: their product is one of int8 with int32 sums."""
    narrow = _before_widening(a), _before_widening(b)
    return None if narrow[0] is None or narrow[1] is None else (narrow[0], narrow[1])


def _before_widening(x: Value) -> Value | None:
    if op := hlo.made_by(x, stablehlo.TransposeOp):
        inner = _before_widening(op.operand)
        return None if inner is None else hlo.transpose(inner, list(op.permutation))
    op = hlo.made_by(x, stablehlo.ConvertOp)
    return op.operand if op and hlo.dtype(op.operand) == torch.int8 else None


@lowers(aten.mm.default)
def mm(ctx: LoweringContext, x: Value, mat2: Value) -> Value:
    kind = hlo.dtype(x)
    if ctx.family == "tpu" and kind != torch.int32:
        return hlo.reshape(unmerged_product(x, mat2, kind), ctx.out.shape)
    return product(x, mat2, ((1,), (0,)))


@lowers(aten.bmm.default)
def bmm(ctx: LoweringContext, x: Value, mat2: Value) -> Value:
    kind = hlo.dtype(x)
    if ctx.family == "tpu" and kind != torch.int32:
        return batched_product(x, mat2, kind)
    return product(x, mat2, ((2,), (1,)), ((0,), (0,)))


@lowers(aten.mv.default)
def mv(ctx: LoweringContext, x: Value, vec: Value) -> Value:
    return product(x, vec, ((1,), (0,)))


@lowers(aten.dot.default)
def dot(ctx: LoweringContext, x: Value, tensor: Value) -> Value:
    return product(x, tensor, ((0,), (0,)))


@lowers(aten.addmm.default)
def addmm(ctx: LoweringContext, x: Value, mat1: Value, mat2: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    if ctx.family == "tpu" and (beta, alpha) == (1, 1) and hlo.rank(x) == 1:
        return _linear(ctx, x, mat1, mat2)
    return _add_product(ctx, x, mat1, mat2, ((1,), (0,)), ((), ()), beta, alpha)


def _linear(ctx: LoweringContext, bias: Value, x: Value, weight: Value) -> Value:
    """``x @ weight + bias`` on the axes that the rows of ``x`` were made of.

    In 16 bits the bias is added to the rounded product, as in JAX and torch_xla: a TPU would widen each bias in an
    operation of its own, which costs more than many a product. ``excess_precision`` rounds once, for nothing.
    """
    result = unmerged_product(x, weight, ctx.out.dtype)
    if hlo.shape(result)[-1:] != list(ctx.out.shape[1:]):  # the columns were made of several axes
        result = hlo.reshape(result, ctx.out.shape)
    return hlo.reshape(stablehlo.add(result, hlo.broadcast(bias, hlo.shape(result))), ctx.out.shape)


@lowers(aten.addmv.default)
def addmv(ctx: LoweringContext, x: Value, mat: Value, vec: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _add_product(ctx, x, mat, vec, ((1,), (0,)), ((), ()), beta, alpha)


@lowers(aten.baddbmm.default)
def baddbmm(ctx: LoweringContext, x: Value, batch1: Value, batch2: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _add_product(ctx, x, batch1, batch2, ((2,), (1,)), ((0,), (0,)), beta, alpha)


@lowers(aten.addbmm.default)
def addbmm(ctx: LoweringContext, x: Value, batch1: Value, batch2: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    if hlo.dtype(x).itemsize > 2 or not hlo.numel(batch1) or ctx.family != "cpu":
        return _add_product(ctx, x, batch1, batch2, ((0, 2), (0, 1)), ((), ()), beta, alpha)
    # torch's CPU kernel adds one matrix after the other to a 16-bit result
    products = hlo.dot_general(batch1, batch2, ((2,), (1,)), ((0,), (0,)), out=torch.float32)
    count, *sizes = hlo.shape(products)
    if alpha != 1:
        products = stablehlo.multiply(products, hlo.full_like(products, alpha))
    start = hlo.broadcast(hlo.convert(x, torch.float32), sizes)
    if beta != 1:  # with beta 0 x is not read
        start = stablehlo.multiply(start, hlo.full_like(start, beta)) if beta else hlo.full(0, torch.float32, sizes)

    def add(i: Value, products: Value, total: Value) -> list[Value]:
        zero = hlo.scalar(0, torch.int32)
        term = hlo.reshape(hlo.dynamic_slice(products, [i, zero, zero], [1, *sizes]), sizes)
        total = hlo.convert(hlo.convert(stablehlo.add(total, term), ctx.out.dtype), torch.float32)
        return [stablehlo.add(i, hlo.scalar(1, torch.int32)), products, total]

    carries = [hlo.scalar(0, torch.int32), products, start]
    total = hlo.while_(carries, lambda i, *_: hlo.compare(i, hlo.scalar(count, torch.int32), "LT"), add)[2]
    return hlo.convert(total, ctx.out.dtype)


@lowers(aten._addmm_activation.default)
def addmm_activation(
    ctx: LoweringContext,
    x: Value,
    mat1: Value,
    mat2: Value,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    use_gelu: bool = False,
) -> Value:
    kind = dtypes.opmath(ctx.out.dtype)
    linear = hlo.convert(_add_product(ctx, x, mat1, mat2, ((1,), (0,)), ((), ()), beta, alpha), kind)
    return hlo.convert(
        gelu_value(linear) if use_gelu else stablehlo.maximum(linear, hlo.full_like(linear, 0)), ctx.out.dtype
    )


def gelu_value(x: Value) -> Value:
    """``x * P(a normal is below x)``."""
    half = stablehlo.multiply(x, hlo.full_like(x, 0.5))
    return stablehlo.multiply(half, chlo.erfc(stablehlo.multiply(x, hlo.full_like(x, -math.sqrt(0.5)))))


def _add_product(
    ctx: LoweringContext, x: Value, a: Value, b: Value, contract: Any, batch: Any, beta: Any, alpha: Any
) -> Value:
    """``beta * x + alpha * (a @ b)``, rounded once; with beta 0 ``x`` is not read, NaN or not."""
    out = ctx.out
    kind = dtypes.opmath(out.dtype)
    result = hlo.dot_general(a, b, contract, batch, out=kind)
    if alpha != 1:
        result = stablehlo.multiply(result, hlo.full_like(result, alpha))
    if beta != 0:
        term = hlo.convert(x, kind)
        if beta != 1:
            term = stablehlo.multiply(term, hlo.full_like(term, beta))
        result = stablehlo.add(result, hlo.broadcast(term, out.shape))
    return hlo.convert(result, out.dtype)


# ---- three factors


@lowers(aten._trilinear.default)
def trilinear(
    ctx: LoweringContext,
    i1: Value,
    i2: Value,
    i3: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """``(i1 * i2 * i3).sum(sumdim)``, each factor unsqueezed at its ``expand`` axes, as two dots."""
    out = ctx.out
    kind = dtypes.opmath(out.dtype)
    rank = hlo.rank(i1) + len(expand1)
    axes = [[a for a in range(rank) if a not in set(e)] for e in (expand1, expand2, expand3)]
    kept = [a for a in range(rank) if a not in set(sumdim)]
    first, labels = contract_pair(i1, axes[0], i2, axes[1], {*kept, *axes[2]}, kind)
    narrow = hlo.convert(first, out.dtype)
    result, labels = contract_pair(narrow, labels, i3, axes[2], set(kept), kind)
    return hlo.reshape(hlo.convert(hlo.transpose(result, [labels.index(a) for a in kept]), out.dtype), out.shape)


def contract_pair(
    a: Value, a_axes: Sequence[int], b: Value, b_axes: Sequence[int], keep: set[int], kind: torch.dtype
) -> tuple[Value, list[int]]:
    """The product of two tensors with labelled axes, summed over labels not in ``keep``; and the result's labels."""
    a, a_labels = _sum_alone(a, list(a_axes), {*keep, *b_axes})
    b, b_labels = _sum_alone(b, list(b_axes), {*keep, *a_axes})
    shared = [x for x in a_labels if x in b_labels]
    batch, summed = [x for x in shared if x in keep], [x for x in shared if x not in keep]
    numbers = [([a_labels.index(x) for x in group], [b_labels.index(x) for x in group]) for group in (summed, batch)]
    result = hlo.dot_general(a, b, numbers[0], numbers[1], out=kind)
    return result, batch + [x for x in (*a_labels, *b_labels) if x not in shared]


def _sum_alone(x: Value, labels: list[int], needed: set[int]) -> tuple[Value, list[int]]:
    drop = [i for i, label in enumerate(labels) if label not in needed]
    return hlo.reduce(x, drop, "add"), [label for label in labels if label in needed]
