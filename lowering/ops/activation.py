"""Activation functions and their backwards, kept whole: XLA fuses them, and their decompositions cost tracing time."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxlib.mlir.dialects import chlo, stablehlo

from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.complex import conjugate, logistic
from tpu_compile.lowering.registry import elementwise

aten = torch.ops.aten


def _times(x: Value, factor: float) -> Value:
    return stablehlo.multiply(x, hlo.full_like(x, factor))


@elementwise(aten.relu.default, opmath=False)
def relu(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.maximum(x, hlo.full_like(x, 0))


@elementwise(aten.threshold_backward.default, opmath=False)
def threshold_backward(ctx: LoweringContext, grad_output: Value, x: Value, threshold: Any) -> Value:
    return hlo.select(hlo.compare(x, hlo.full_like(x, threshold), "LE"), hlo.full_like(x, 0), grad_output)


@elementwise(aten.gelu.default)
def gelu(ctx: LoweringContext, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        return stablehlo.multiply(_times(x, 0.5), stablehlo.add(hlo.full_like(x, 1), stablehlo.tanh(_tanh_argument(x))))
    return stablehlo.multiply(_times(x, 0.5), chlo.erfc(_times(x, -math.sqrt(0.5))))


def _tanh_argument(x: Value) -> Value:
    cube = stablehlo.multiply(stablehlo.multiply(x, x), x)
    return _times(stablehlo.add(x, _times(cube, 0.044715)), math.sqrt(2 / math.pi))


@elementwise(aten.gelu_backward.default)
def gelu_backward(ctx: LoweringContext, grad_output: Value, x: Value, *, approximate: str = "none") -> Value:
    one = hlo.full_like(x, 1)
    if approximate == "tanh":
        t = stablehlo.tanh(_tanh_argument(x))
        inner = _times(stablehlo.add(one, _times(stablehlo.multiply(x, x), 3 * 0.044715)), math.sqrt(2 / math.pi))
        sech2 = stablehlo.subtract(one, stablehlo.multiply(t, t))
        slope = stablehlo.add(
            _times(stablehlo.add(one, t), 0.5), stablehlo.multiply(_times(x, 0.5), stablehlo.multiply(sech2, inner))
        )
        return stablehlo.multiply(grad_output, slope)
    cdf = _times(chlo.erfc(_times(x, -math.sqrt(0.5))), 0.5)
    pdf = _times(stablehlo.exponential(_times(stablehlo.multiply(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return stablehlo.multiply(grad_output, stablehlo.add(cdf, stablehlo.multiply(x, pdf)))


@elementwise(aten.silu.default)
def silu(ctx: LoweringContext, x: Value) -> Value:
    return stablehlo.multiply(x, logistic(x))


@elementwise(aten.silu_backward.default)
def silu_backward(ctx: LoweringContext, grad_output: Value, x: Value) -> Value:
    one = hlo.full_like(x, 1)
    # A TPU takes XLA's logistic for cheap, and would compute this gradient again in every product that reads it.
    spelled_out = ctx.family == "tpu" and not hlo.dtype(x).is_complex
    s = (
        stablehlo.divide(one, stablehlo.add(one, stablehlo.exponential(stablehlo.negate(x))))
        if spelled_out
        else logistic(x)
    )
    slope = stablehlo.multiply(s, stablehlo.add(one, stablehlo.multiply(x, stablehlo.subtract(one, s))))
    return stablehlo.multiply(grad_output, conjugate(slope))


@elementwise(aten.sigmoid_backward.default)
def sigmoid_backward(ctx: LoweringContext, grad_output: Value, output: Value) -> Value:
    slope = stablehlo.multiply(output, stablehlo.subtract(hlo.full_like(output, 1), output))
    return stablehlo.multiply(grad_output, conjugate(slope))


@elementwise(aten.tanh_backward.default)
def tanh_backward(ctx: LoweringContext, grad_output: Value, output: Value) -> Value:
    one = hlo.full_like(output, 1)
    slope = stablehlo.subtract(one, stablehlo.multiply(output, output))
    return stablehlo.multiply(grad_output, conjugate(slope))


@elementwise(aten.leaky_relu.default)
def leaky_relu(ctx: LoweringContext, x: Value, negative_slope: Any = 0.01) -> Value:
    return hlo.select(hlo.compare(x, hlo.full_like(x, 0), "GT"), x, _times(x, negative_slope))


@elementwise(aten.hardtanh.default, opmath=False)
def hardtanh(ctx: LoweringContext, x: Value, min_val: Any = -1, max_val: Any = 1) -> Value:
    return stablehlo.minimum(stablehlo.maximum(x, hlo.full_like(x, min_val)), hlo.full_like(x, max_val))


@elementwise(aten.elu.default)
def elu(ctx: LoweringContext, x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    negative = _times(stablehlo.exponential_minus_one(_times(x, input_scale)), alpha * scale)
    return hlo.select(hlo.compare(x, hlo.full_like(x, 0), "GT"), _times(x, scale), negative)
