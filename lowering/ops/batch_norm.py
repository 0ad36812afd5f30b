"""Batch normalisation and its gradient, under all of torch's names for it. Statistics of 16-bit floats are float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.norm import promised, rstd_of, weighted
from tpu_compile.lowering.ops.reduction import moments
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten


def _channel(v: Value, like: Value) -> Value:
    return hlo.broadcast_in_dim(v, hlo.shape(like), [1])


@dataclass(frozen=True)
class Normed:
    """What one normalisation gives: the result and, per channel, the statistics it used."""

    y: Value
    mean: Value
    variance: Value
    rstd: Value


def normalise(
    ctx: LoweringContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running: tuple[Value, Value] | None,
    eps: float,
) -> Normed:
    """``input`` normalised by the running statistics, or by the batch's own for None."""
    kind = dtypes.opmath(hlo.dtype(input))
    x = hlo.convert(input, kind)
    if running is None:
        one_pass = ctx.family == "tpu" and hlo.dtype(input) == torch.bfloat16
        spread, average = (_moments_in_one_pass if one_pass else _moments)(x)
    else:
        average, spread = (hlo.convert(v, kind) for v in running)
    scale = rstd_of(ctx, spread, eps)
    if running is None:
        y = stablehlo.multiply(stablehlo.subtract(x, _channel(average, x)), _channel(scale, x))
        y = weighted(y, weight, bias, [1])
    else:
        factor, term = linear_terms(average, scale, weight, bias)
        y = stablehlo.add(stablehlo.multiply(x, _channel(factor, x)), _channel(term, x))
    return Normed(hlo.convert(y, ctx.outs[0].dtype), average, spread, scale)


def _moments(x: Value) -> tuple[Value, Value]:
    """(variance, mean) of each channel."""
    dims = [i for i in range(hlo.rank(x)) if i != 1]
    spread, average = (hlo.reshape(v, [hlo.shape(x)[1]]) for v in moments(x, dims, 0))
    return spread, average


def _moments_in_one_pass(x: Value) -> tuple[Value, Value]:
    """``_moments`` of what was bfloat16: a TPU sums both in the fusion that makes ``x``, where a second pass reads it
    from HBM again. What cancels between the sums is in bits that float32 has beyond the 8 of the data."""
    dims = [i for i in range(hlo.rank(x)) if i != 1]
    count = hlo.numel(x) // max(hlo.shape(x)[1], 1)
    average, squares = (
        stablehlo.divide(total, hlo.full_like(total, count))
        for total in (hlo.reduce(v, dims, "add") for v in (x, stablehlo.multiply(x, x)))
    )
    spread = stablehlo.subtract(squares, stablehlo.multiply(average, average))
    return stablehlo.maximum(spread, hlo.full_like(spread, 0)), average


def linear_terms(average: Value, scale: Value, weight: Value | None, bias: Value | None) -> tuple[Value, Value]:
    """Per channel, the factor and the term that evaluation comes down to."""
    kind = hlo.dtype(scale)
    factor = scale if weight is None else stablehlo.multiply(scale, hlo.convert(weight, kind))
    term = stablehlo.negate(stablehlo.multiply(average, factor))
    return factor, term if bias is None else stablehlo.add(hlo.convert(bias, kind), term)


def moved(
    ctx: LoweringContext, input: Value, running: tuple[Value, Value], new: Normed, momentum: float
) -> list[Value]:
    """The running statistics moved towards those of the batch, whose variance counts as a sample's."""
    count = hlo.numel(input) // max(hlo.shape(input)[1], 1)
    unbiased = stablehlo.multiply(new.variance, hlo.full_like(new.variance, count / max(count - 1, 1)))
    result = []
    for old, value, spec in zip(running, (new.mean, unbiased), ctx.outs[-2:], strict=True):
        before = stablehlo.multiply(hlo.convert(old, hlo.dtype(value)), hlo.full_like(value, 1 - momentum))
        after = stablehlo.add(before, stablehlo.multiply(value, hlo.full_like(value, momentum)))
        result.append(hlo.convert(after, spec.dtype))
    return result


def saved(ctx: LoweringContext, normed: Normed) -> list[Value]:
    """The statistics kept for the gradient; empty in evaluation, where torch keeps none."""
    return [
        hlo.convert(v, s.dtype) if hlo.shape(v) == list(s.shape) else hlo.full(0, s.dtype, s.shape)
        for v, s in zip((normed.mean, normed.rstd), ctx.outs[1:3], strict=True)
    ]


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
    normed = normalise(ctx, input, weight, bias, None if training else running, eps)
    updated = moved(ctx, input, running, normed, momentum) if training else running
    return normed.y, *saved(ctx, normed), *(hlo.convert(v, s.dtype) for v, s in zip(updated, ctx.outs[3:], strict=True))


@lowers(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update_functional(
    ctx: LoweringContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    normed = normalise(ctx, input, weight, bias, None, eps)
    updated = moved(ctx, input, (running_mean, running_var), normed, momentum)
    return normed.y, *saved(ctx, normed), _reserve(ctx), *updated


def _reserve(ctx: LoweringContext) -> Value:
    """cuDNN's scratch space: empty."""
    return hlo.full(0, ctx.outs[3].dtype, ctx.outs[3].shape)


@lowers(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    ctx: LoweringContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    normed = normalise(ctx, input, weight, bias, running, eps)
    return normed.y, *saved(ctx, normed), _reserve(ctx)


@lowers(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_legit_no_stats(
    ctx: LoweringContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    normed = normalise(ctx, input, weight, bias, None, eps)
    return normed.y, *saved(ctx, normed)


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
    normed = normalise(ctx, input, weight, bias, (running_mean, running_var), eps)
    return normed.y, *saved(ctx, normed)


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
        average, scale = hlo.convert(running_mean, kind), rstd_of(ctx, hlo.convert(running_var, kind), eps)
    normed = stablehlo.multiply(stablehlo.subtract(x, _channel(average, x)), _channel(scale, x))
    grad_sum = hlo.reduce(grad, dims, "add")
    grad_dot = hlo.reduce(stablehlo.multiply(grad, normed), dims, "add")
    factor = scale if weight is None else stablehlo.multiply(scale, hlo.convert(weight, kind))
    centred = grad
    if train:
        count = hlo.full_like(grad_sum, max(hlo.numel(x) // max(hlo.shape(x)[1], 1), 1))
        centred = stablehlo.subtract(centred, _channel(stablehlo.divide(grad_sum, count), x))
        centred = stablehlo.subtract(
            centred, stablehlo.multiply(normed, _channel(stablehlo.divide(grad_dot, count), x))
        )
    return promised(ctx, stablehlo.multiply(centred, _channel(factor, x)), grad_dot, grad_sum)


@lowers(aten.batch_norm_backward.default)
def batch_norm_backward(
    ctx: LoweringContext,
    grad_out: Value,
    input: Value,
    weight: Value,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_var: Value | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Value,
) -> tuple[Value | None, ...]:
    return native_batch_norm_backward(
        ctx, grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )
