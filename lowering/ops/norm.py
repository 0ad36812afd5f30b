"""Softmax and the normalisations, forward and backward, kept whole. Statistics of 16-bit floats are float32, as torch keeps them."""

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


def _weighted(x: Value, weight: Value | None, bias: Value | None, dims: Sequence[int]) -> Value:
    """``x * weight + bias``, both laid along ``dims``."""
    kind = hlo.dtype(x)
    if weight is not None:
        x = stablehlo.multiply(x, hlo.broadcast_in_dim(hlo.convert(weight, kind), hlo.shape(x), dims))
    if bias is not None:
        x = stablehlo.add(x, hlo.broadcast_in_dim(hlo.convert(bias, kind), hlo.shape(x), dims))
    return x


def _rstd(spread: Value, eps: float) -> Value:
    return stablehlo.rsqrt(stablehlo.add(spread, hlo.full_like(spread, eps)))


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    ctx: LoweringContext, input: Value, normalized_shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, ...]:
    y, mean, rstd = ctx.outs
    x = hlo.convert(input, dtypes.opmath(hlo.dtype(input)))
    rank = hlo.rank(x)
    dims = list(range(rank - len(normalized_shape), rank))
    spread, average = moments(x, dims, 0)
    scale = _rstd(spread, eps)
    normed = stablehlo.multiply(stablehlo.subtract(x, hlo.broadcast(average, hlo.shape(x))), hlo.broadcast(scale, hlo.shape(x)))
    return (
        hlo.convert(_weighted(normed, weight, bias, dims), y.dtype),
        hlo.convert(hlo.reshape(average, mean.shape), mean.dtype),
        hlo.convert(hlo.reshape(scale, rstd.shape), rstd.dtype),
    )


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
        weighted = _weighted(grad, weight, None, inner)
        count = 1
        for i in inner:
            count *= sizes[i]
        first = keep(weighted, inner, "add")
        second = stablehlo.multiply(normed, keep(stablehlo.multiply(weighted, normed), inner, "add"))
        mean_part = stablehlo.divide(stablehlo.add(first, second), hlo.full_like(x, max(count, 1)))
        grad_x = stablehlo.multiply(stablehlo.subtract(weighted, mean_part), spread)
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


# ---- batch norm


def _channel(v: Value, like: Value) -> Value:
    return hlo.broadcast_in_dim(v, hlo.shape(like), [1])


def _batch_norm(
    ctx: LoweringContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running: tuple[Value, Value] | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value, list[Value]]:
    """(y, saved mean, saved rstd, new running statistics)."""
    kind = dtypes.opmath(hlo.dtype(input))
    x = hlo.convert(input, kind)
    dims = [i for i in range(hlo.rank(x)) if i != 1]
    channels = [hlo.shape(x)[1]]
    updated: list[Value] = []
    if training:
        spread, average = (hlo.reshape(v, channels) for v in moments(x, dims, 0))
        scale = _rstd(spread, eps)
        if running is not None:
            count = hlo.numel(x) // max(channels[0], 1)
            unbiased = stablehlo.multiply(spread, hlo.full_like(spread, count / max(count - 1, 1)))
            for old, new in zip(running, (average, unbiased), strict=True):
                before = stablehlo.multiply(hlo.convert(old, kind), hlo.full_like(new, 1 - momentum))
                after = stablehlo.add(before, stablehlo.multiply(new, hlo.full_like(new, momentum)))
                updated.append(hlo.convert(after, hlo.dtype(old)))
    else:
        assert running is not None
        average, spread = (hlo.convert(v, kind) for v in running)
        scale = _rstd(spread, eps)
        updated = list(running)
    y = stablehlo.multiply(stablehlo.subtract(x, _channel(average, x)), _channel(scale, x))
    return hlo.convert(_weighted(y, weight, bias, [1]), ctx.outs[0].dtype), average, scale, updated


@lowers(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_legit_functional(
    ctx: LoweringContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    running = (running_mean, running_var)
    y, average, scale, updated = _batch_norm(ctx, input, weight, bias, running, training, momentum, eps)
    saved = [hlo.convert(v, s.dtype) if hlo.shape(v) == list(s.shape) else hlo.full(0, s.dtype, s.shape) for v, s in zip((average, scale), ctx.outs[1:3], strict=True)]
    return y, *saved, *updated


@lowers(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_legit_no_stats(
    ctx: LoweringContext, input: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, eps: float
) -> tuple[Value, ...]:
    y, average, scale, _ = _batch_norm(ctx, input, weight, bias, None, True, momentum, eps)
    return y, hlo.convert(average, ctx.outs[1].dtype), hlo.convert(scale, ctx.outs[2].dtype)


@lowers(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_legit_no_training(
    ctx: LoweringContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    y, *_ = _batch_norm(ctx, input, weight, bias, (running_mean, running_var), False, momentum, eps)
    return y, *(hlo.full(0, s.dtype, s.shape) for s in ctx.outs[1:])


@lowers(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    ctx: LoweringContext,
    grad_out: Value,
    input: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    kind = dtypes.opmath(hlo.dtype(input))
    grad, x = hlo.convert(grad_out, kind), hlo.convert(input, kind)
    dims = [i for i in range(hlo.rank(x)) if i != 1]
    if train:
        assert save_mean is not None and save_invstd is not None
        average, scale = hlo.convert(save_mean, kind), hlo.convert(save_invstd, kind)
    else:
        assert running_mean is not None and running_var is not None
        average, scale = hlo.convert(running_mean, kind), _rstd(hlo.convert(running_var, kind), eps)
    normed = stablehlo.multiply(stablehlo.subtract(x, _channel(average, x)), _channel(scale, x))
    grad_sum = hlo.reduce(grad, dims, "add")
    grad_dot = hlo.reduce(stablehlo.multiply(grad, normed), dims, "add")
    factor = scale if weight is None else stablehlo.multiply(scale, hlo.convert(weight, kind))
    centred = grad
    if train:
        count = hlo.full_like(grad_sum, max(hlo.numel(x) // max(hlo.shape(x)[1], 1), 1))
        centred = stablehlo.subtract(centred, _channel(stablehlo.divide(grad_sum, count), x))
        centred = stablehlo.subtract(centred, stablehlo.multiply(normed, _channel(stablehlo.divide(grad_dot, count), x)))
    return promised(ctx, stablehlo.multiply(centred, _channel(factor, x)), grad_dot, grad_sum)


# ---- group norm


@lowers(aten.native_group_norm.default)
def native_group_norm(
    ctx: LoweringContext, input: Value, weight: Value | None, bias: Value | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Value, ...]:
    y, mean, rstd = ctx.outs
    x = hlo.convert(input, dtypes.opmath(hlo.dtype(input)))
    grouped = hlo.reshape(x, [N, group, (C // group) * HxW])
    spread, average = moments(grouped, [2], 0)
    scale = _rstd(spread, eps)
    sizes = hlo.shape(grouped)
    normed = stablehlo.multiply(stablehlo.subtract(grouped, hlo.broadcast(average, sizes)), hlo.broadcast(scale, sizes))
    result = _weighted(hlo.reshape(normed, hlo.shape(x)), weight, bias, [1])
    return (
        hlo.convert(result, y.dtype),
        hlo.convert(hlo.reshape(average, mean.shape), mean.dtype),
        hlo.convert(hlo.reshape(scale, rstd.shape), rstd.dtype),
    )
