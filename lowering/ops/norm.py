"""Softmax, layer and group normalisation and their gradients, kept whole. Statistics of 16-bit floats are float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.reduction import moments
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def keep(x: Value, dims: Sequence[int], combiner: str) -> Value:
    """Reduce ``dims`` and broadcast the result back over them."""
    others = [i for i in range(hlo.rank(x)) if i not in dims]
    return hlo.broadcast_in_dim(hlo.reduce(x, dims, combiner), hlo.shape(x), others)


def _softmax_parts(x: Value, dim: int) -> tuple[Value, Value, list[int]]:
    """(x - max, exp of it, axes)."""
    dims = [dim % hlo.rank(x)] if hlo.rank(x) else []
    shifted = stablehlo.subtract(x, keep(x, dims, "maximum"))
    return shifted, stablehlo.exponential(shifted), dims


@lowers(aten._softmax.default)
def softmax(ctx: LoweringContext, x: Value, dim: int, half_to_float: bool) -> Value:
    _, powers, dims = _softmax_parts(hlo.convert(x, dtypes.opmath(hlo.dtype(x))), dim)
    return hlo.convert(stablehlo.divide(powers, keep(powers, dims, "add")), ctx.out.dtype)


@lowers(aten._safe_softmax.default)
def safe_softmax(ctx: LoweringContext, x: Value, dim: int, dtype: Any = None) -> Value:
    """A row of -inf gives zeros, not NaN."""
    x = hlo.convert(x, dtypes.opmath(ctx.out.dtype))
    dims = [dim % hlo.rank(x)] if hlo.rank(x) else []
    masked = hlo.compare(keep(x, dims, "maximum"), hlo.full_like(x, float("-inf")), "EQ")
    _, powers, _ = _softmax_parts(x, dim)
    result = stablehlo.divide(powers, keep(powers, dims, "add"))
    return hlo.convert(hlo.select(masked, hlo.full_like(x, 0), result), ctx.out.dtype)


@lowers(aten._log_softmax.default)
def log_softmax(ctx: LoweringContext, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted, powers, dims = _softmax_parts(hlo.convert(x, dtypes.opmath(hlo.dtype(x))), dim)
    return hlo.convert(stablehlo.subtract(shifted, stablehlo.log(keep(powers, dims, "add"))), ctx.out.dtype)


@lowers(aten._softmax_backward_data.default)
def softmax_backward(ctx: LoweringContext, grad_output: Value, output: Value, dim: int, input_dtype: Any) -> Value:
    kind = dtypes.opmath(hlo.dtype(output))
    grad, y = hlo.convert(grad_output, kind), hlo.convert(output, kind)
    dims = [dim % hlo.rank(y)] if hlo.rank(y) else []
    product = stablehlo.multiply(grad, y)
    result = stablehlo.subtract(product, stablehlo.multiply(y, keep(product, dims, "add")))
    return hlo.convert(result, ctx.out.dtype)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(ctx: LoweringContext, grad_output: Value, output: Value, dim: int, input_dtype: Any) -> Value:
    kind = dtypes.opmath(hlo.dtype(output))
    grad, y = hlo.convert(grad_output, kind), hlo.convert(output, kind)
    dims = [dim % hlo.rank(y)] if hlo.rank(y) else []
    spread = stablehlo.multiply(stablehlo.exponential(y), keep(grad, dims, "add"))
    return hlo.convert(stablehlo.subtract(grad, spread), ctx.out.dtype)


# ---- layer norm


def weighted(x: Value, weight: Value | None, bias: Value | None, dims: Sequence[int]) -> Value:
    """``x * weight + bias``, both laid along ``dims``."""
    kind = hlo.dtype(x)
    if weight is not None:
        x = stablehlo.multiply(x, hlo.broadcast_in_dim(hlo.convert(weight, kind), hlo.shape(x), dims))
    if bias is not None:
        x = stablehlo.add(x, hlo.broadcast_in_dim(hlo.convert(bias, kind), hlo.shape(x), dims))
    return x


def rstd_of(ctx: LoweringContext, spread: Value, eps: float) -> Value:
    """``rsqrt(spread + eps)``, one number a row. XLA's CPU code for it is up to 2.4 units off and leans to one side,
    which every element of a row inherits; where float64 is at hand, it is rounded once."""
    wide = hlo.convert(spread, torch.float64) if ctx.family == "cpu" else spread
    return hlo.convert(stablehlo.rsqrt(stablehlo.add(wide, hlo.full_like(wide, eps))), hlo.dtype(spread))


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    ctx: LoweringContext,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, ...]:
    x = hlo.convert(input, dtypes.opmath(hlo.dtype(input)))
    rank = hlo.rank(x)
    return promised(ctx, *normalised(ctx, x, list(range(rank - len(normalized_shape), rank)), weight, bias, eps))


def normalised(
    ctx: LoweringContext, x: Value, dims: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    """(result, mean, reciprocal standard deviation) of normalising over ``dims``."""
    spread, average = moments(x, dims, 0)
    scale = rstd_of(ctx, spread, eps)
    centred = stablehlo.subtract(x, hlo.broadcast(average, hlo.shape(x)))
    normed = stablehlo.multiply(centred, hlo.broadcast(scale, hlo.shape(x)))
    return weighted(normed, weight, bias, dims), average, scale


@lowers(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    ctx: LoweringContext,
    grad_out: Value,
    input: Value,
    normalized_shape: Sequence[int],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    kind = dtypes.opmath(hlo.dtype(input))
    grad, x, average, scale = (hlo.convert(v, kind) for v in (grad_out, input, mean, rstd))
    sizes, rank = hlo.shape(x), hlo.rank(x)
    outer, inner = list(range(rank - len(normalized_shape))), list(range(rank - len(normalized_shape), rank))
    spread = hlo.broadcast(scale, sizes)
    normed = stablehlo.multiply(stablehlo.subtract(x, hlo.broadcast(average, sizes)), spread)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        pulled = weighted(grad, weight, None, inner)
        count = 1
        for i in inner:
            count *= sizes[i]
        first = keep(pulled, inner, "add")
        second = stablehlo.multiply(normed, keep(stablehlo.multiply(pulled, normed), inner, "add"))
        mean_part = stablehlo.divide(stablehlo.add(first, second), hlo.full_like(x, max(count, 1)))
        grad_x = stablehlo.multiply(stablehlo.subtract(pulled, mean_part), spread)
    if output_mask[1] and weight is not None:
        grad_weight = hlo.reduce(stablehlo.multiply(grad, normed), outer, "add")
    if output_mask[2] and bias is not None:
        grad_bias = hlo.reduce(grad, outer, "add")
    return promised(ctx, grad_x, grad_weight, grad_bias)


def promised(ctx: LoweringContext, *values: Value | None) -> tuple[Value | None, ...]:
    """Each value in the dtype and shape promised for it; None where nothing is promised."""
    return tuple(
        None if spec is None or value is None else hlo.reshape(hlo.convert(value, spec.dtype), spec.shape)
        for spec, value in zip(ctx.outs, values, strict=True)
    )


# ---- weight norm


def norm_but(x: Value, dim: int) -> Value:
    """The Euclidean norm over all axes but ``dim``, kept as size 1."""
    others = [i for i in range(hlo.rank(x)) if i != dim % hlo.rank(x)]
    kept = [1 if i in others else n for i, n in enumerate(hlo.shape(x))]
    return hlo.reshape(stablehlo.sqrt(hlo.reduce(stablehlo.multiply(x, x), others, "add")), kept)


@lowers(aten._weight_norm_interface.default)
def weight_norm_interface(ctx: LoweringContext, v: Value, g: Value, dim: int = 0) -> tuple[Value | None, ...]:
    kind = dtypes.opmath(hlo.dtype(v))
    wide = hlo.convert(v, kind)
    norms = norm_but(wide, dim)
    scale = stablehlo.divide(hlo.convert(g, kind), norms)
    return promised(ctx, stablehlo.multiply(wide, hlo.broadcast(scale, hlo.shape(v))), norms)


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_interface_backward(
    ctx: LoweringContext, grad_w: Value, saved_v: Value, saved_g: Value, saved_norms: Value, dim: int
) -> tuple[Value | None, ...]:
    kind = dtypes.opmath(hlo.dtype(saved_v))
    grad, v, g, norms = (hlo.convert(x, kind) for x in (grad_w, saved_v, saved_g, saved_norms))
    sizes, at = hlo.shape(v), dim % hlo.rank(v)
    others = [i for i in range(len(sizes)) if i != at]
    pull = hlo.reshape(hlo.reduce(stablehlo.multiply(grad, v), others, "add"), hlo.shape(norms))
    of_g = stablehlo.divide(pull, norms)
    scale = stablehlo.divide(g, norms)
    along = stablehlo.divide(of_g, norms)
    across = stablehlo.subtract(grad, stablehlo.multiply(v, hlo.broadcast(along, sizes)))
    return promised(ctx, stablehlo.multiply(across, hlo.broadcast(scale, sizes)), of_g)


# ---- group norm


@lowers(aten.native_group_norm.default)
def native_group_norm(
    ctx: LoweringContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Value, ...]:
    y, mean, rstd = ctx.outs
    x = hlo.convert(input, dtypes.opmath(hlo.dtype(input)))
    grouped = hlo.reshape(x, [N, group, (C // group) * HxW])
    spread, average = moments(grouped, [2], 0)
    scale = rstd_of(ctx, spread, eps)
    sizes = hlo.shape(grouped)
    normed = stablehlo.multiply(stablehlo.subtract(grouped, hlo.broadcast(average, sizes)), hlo.broadcast(scale, sizes))
    result = weighted(hlo.reshape(normed, hlo.shape(x)), weight, bias, [1])
    return (
        hlo.convert(result, y.dtype),
        hlo.convert(hlo.reshape(average, mean.shape), mean.dtype),
        hlo.convert(hlo.reshape(scale, rstd.shape), rstd.dtype),
    )
