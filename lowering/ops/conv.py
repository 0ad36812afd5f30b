"""Convolutions and their gradients, each one stablehlo.convolution in torch's order of axes (batch, channel, space)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.norm import promised
from tpu_compile.lowering.registry import lowers
from tpu_compile.lowering.windows import convolution as convolve

aten = torch.ops.aten
Ints = Sequence[int]


@dataclass(frozen=True)
class Geometry:
    """The parameters of a convolution, one entry a spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def of(spatial: int, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Geometry:
        """Lists of one entry speak for every axis."""
        stride, padding, dilation = (tuple(v) * (spatial if len(v) == 1 else 1) for v in (stride, padding, dilation))
        return Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)


def _spatial(x: Value) -> list[int]:
    return hlo.shape(x)[2:]


def _empty(*operands: Value) -> bool:
    return any(hlo.numel(v) == 0 for v in operands)


def correlate(x: Value, weight: Value, g: Geometry, sizes: Ints, out: torch.dtype) -> Value:
    """x[N, C, ...] * weight[O, C/groups, ...] -> [N, O, *sizes]; ``x`` is padded with 0 or cropped to fit ``sizes``."""
    padding = []
    for n, k, size, s, p, d in zip(_spatial(x), _spatial(weight), sizes, g.stride, g.padding, g.dilation, strict=True):
        padding.append((p, (size - 1) * s + (k - 1) * d + 1 - n - p))
    return convolve(
        x,
        weight,
        ((0, 1), (1, 0), (0, 1)),
        strides=g.stride,
        padding=padding,
        base_dilation=[1] * len(padding),
        window_dilation=g.dilation,
        feature_groups=g.groups,
        out=out,
    )


def spread(x: Value, weight: Value, g: Geometry, sizes: Ints, out: torch.dtype) -> Value:
    """The adjoint of ``correlate`` in its input: x[N, O, ...] * weight[O, C/groups, ...] -> [N, C, *sizes]."""
    kernel = hlo.reverse(weight, range(2, hlo.rank(weight)))
    o, c, *k = hlo.shape(kernel)
    if g.groups > 1:  # [O, C/g] -> [O/g, C]: each group's outputs side by side
        kernel = hlo.reshape(kernel, [g.groups, o // g.groups, c, *k])
        kernel = hlo.reshape(hlo.move_axis(kernel, 0, 1), [o // g.groups, g.groups * c, *k])
    padding = []
    for n, window, size, s, p, d in zip(_spatial(x), k, sizes, g.stride, g.padding, g.dilation, strict=True):
        low = (window - 1) * d - p
        padding.append((low, size + (window - 1) * d - ((n - 1) * s + 1) - low))
    return convolve(
        x,
        kernel,
        ((0, 1), (0, 1), (0, 1)),
        strides=[1] * len(k),
        padding=padding,
        base_dilation=g.stride,
        window_dilation=g.dilation,
        feature_groups=g.groups,
        out=out,
    )


def filter_gradient(x: Value, grad: Value, g: Geometry, kernel: Ints, out: torch.dtype) -> Value:
    """The adjoint of ``correlate`` in its filter: x[N, C, ...] * grad[N, O, ...] -> [O, C/groups, *kernel]."""
    padding = []
    for n, m, k, s, p, d in zip(_spatial(x), _spatial(grad), kernel, g.stride, g.padding, g.dilation, strict=True):
        padding.append((p, (k - 1) * d + (m - 1) * s + 1 - n - p))
    return convolve(
        x,
        grad,
        ((1, 0), (0, 1), (1, 0)),
        strides=g.dilation,
        padding=padding,
        base_dilation=[1] * len(padding),
        window_dilation=g.stride,
        batch_groups=g.groups,
        out=out,
    )


@lowers(aten.convolution.default)
def convolution(
    ctx: LoweringContext,
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Value:
    out = ctx.out
    kind = dtypes.opmath(out.dtype)
    if _empty(input, weight) or 0 in out.shape:
        result = hlo.full(0, kind, out.shape)
    else:
        geometry = Geometry.of(hlo.rank(input) - 2, stride, padding, dilation, groups)
        one = spread if transposed else correlate
        result = one(input, weight, geometry, out.shape[2:], kind)
    if bias is not None:
        result = stablehlo.add(result, hlo.broadcast_in_dim(hlo.convert(bias, kind), out.shape, [1]))
    return hlo.convert(result, out.dtype)


@lowers(aten.convolution_backward.default)
def convolution_backward(
    ctx: LoweringContext,
    grad_output: Value,
    input: Value,
    weight: Value,
    bias_sizes: Ints | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    geometry = Geometry.of(hlo.rank(input) - 2, stride, padding, dilation, groups)
    kind = dtypes.opmath(hlo.dtype(input))
    grads: list[Value | None] = [None, None, None]
    if _empty(grad_output, input, weight):
        grads = [None if s is None else hlo.full(0, kind, s.shape) for s in ctx.outs]
        output_mask = [False, False, output_mask[2]]
    if output_mask[0]:
        adjoint = correlate if transposed else spread
        grads[0] = adjoint(grad_output, weight, geometry, _spatial(input), kind)
    if output_mask[1]:
        x, grad = (grad_output, input) if transposed else (input, grad_output)
        grads[1] = filter_gradient(x, grad, geometry, _spatial(weight), kind)
    if output_mask[2]:
        axes = [i for i in range(hlo.rank(grad_output)) if i != 1]
        grads[2] = hlo.reduce(hlo.convert(grad_output, kind), axes, "add")
    return promised(ctx, *grads)
