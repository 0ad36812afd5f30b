"""Convolutions and their gradients, each one stablehlo.convolution in torch's order of axes (batch, channel, space)."""

from __future__ import annotations

import itertools
import math
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


_MOST_TAPS = 9
_MOST_MET = 1 << 24
"""Elements that the taps meet together: they are in memory at once."""


def _few_taps(ctx: LoweringContext, weight: Value, groups: int, out: Ints, kind: torch.dtype) -> bool:
    """Whether XLA's convolution for CPUs is the slower way: 300 µs instead of 100 for 128 images of 8x8 in one channel.
    A sum of shifted products takes 20, but XLA fuses it into each of its users and computes it in all of them."""
    if ctx.family != "cpu" or groups != 1 or not kind.is_floating_point:
        return False
    _, channels, *kernel = hlo.shape(weight)
    taps = math.prod(kernel)
    return channels == 1 and taps <= _MOST_TAPS and taps * out[0] * math.prod(out[2:]) <= _MOST_MET


def by_taps(x: Value, weight: Value, g: Geometry, sizes: Ints, out: torch.dtype) -> Value:
    """``correlate`` of one channel as a product with what each of the filter's elements meets."""
    outputs, _, *kernel = hlo.shape(weight)
    spans = [(size - 1) * s + 1 for size, s in zip(sizes, g.stride, strict=True)]
    reach = zip(_spatial(x), kernel, spans, g.padding, g.dilation, strict=True)
    high = [span + (k - 1) * d - n - p for n, k, span, p, d in reach]
    x = hlo.pad(x, 0, [0, 0, *g.padding], [0, 0, *high])
    batch = hlo.shape(x)[0]
    met = []
    for place in itertools.product(*map(range, kernel)):
        start = [0, 0, *(i * d for i, d in zip(place, g.dilation, strict=True))]
        limit = [batch, 1, *(b + span for b, span in zip(start[2:], spans, strict=True))]
        met.append(hlo.slice_(x, start, limit, [1, 1, *g.stride]))
    weight = hlo.reshape(weight, [outputs, math.prod(kernel)])
    product = hlo.dot_general(weight, hlo.concatenate(met, 1), ((1,), (1,)), ((), ()), out=out)
    return hlo.move_axis(product, 0, 1)


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


def by_columns(x: Value, weight: Value, g: Geometry, sizes: Ints) -> Value:
    """``spread`` as torch's CPU computes it where oneDNN does not: the filter's elements one after the other, every
    product and every sum rounded to the operands' dtype."""
    count, inputs, *space = hlo.shape(x)
    _, channels, *kernel = hlo.shape(weight)
    flat = math.prod(kernel)
    x = hlo.reshape(x, [count, g.groups, inputs // g.groups, *space])
    weight = hlo.reshape(weight, [g.groups, inputs // g.groups, channels, flat])
    columns = hlo.dot_general(weight, x, ((1,), (2,)), ((0,), (1,)), out=torch.float32)  # [groups, C, K, N, *space]
    columns = hlo.transpose(hlo.convert(columns, hlo.dtype(x)), [2, 3, 0, 1, *range(4, 4 + len(space))])
    columns = hlo.reshape(columns, [flat, count, g.groups * channels, *space])
    apart = [s - 1 for s in g.stride]
    dense = [(n - 1) * s + 1 for n, s in zip(space, g.stride, strict=True)]
    full = [n + (k - 1) * d for n, k, d in zip(dense, kernel, g.dilation, strict=True)]
    window = [count, g.groups * channels, *dense]
    zero = hlo.scalar(0, torch.int32)

    def add(i: Value, columns: Value, total: Value) -> list[Value]:
        rest = i
        starts: list[Value] = []
        for k, d in reversed(list(zip(kernel, g.dilation, strict=True))):
            place = stablehlo.remainder(rest, hlo.scalar(k, torch.int32))
            starts.insert(0, stablehlo.multiply(place, hlo.scalar(d, torch.int32)))
            rest = stablehlo.divide(rest, hlo.scalar(k, torch.int32))
        zero = hlo.scalar(0, torch.int32)
        column = hlo.dynamic_slice(columns, [i, *[zero] * (2 + len(space))], [1, *hlo.shape(columns)[1:]])
        spread_out = hlo.pad(hlo.squeeze(column, [0]), 0, [0] * len(window), [0] * len(window), [0, 0, *apart])
        starts = [zero, zero, *starts]
        summed = stablehlo.add(hlo.dynamic_slice(total, starts, window), spread_out)
        return [
            stablehlo.add(i, hlo.scalar(1, torch.int32)),
            columns,
            hlo.dynamic_update_slice(total, summed, starts),
        ]

    start = hlo.full(0, hlo.dtype(x), [*window[:2], *full])
    more = hlo.scalar(flat, torch.int32)
    total = hlo.while_([zero, columns, start], lambda i, *_: hlo.compare(i, more, "LT"), add)[2]
    low = [0, 0, *(-p for p in g.padding)]
    high = [0, 0, *(size + p - n for size, p, n in zip(sizes, g.padding, full, strict=True))]
    return hlo.pad(total, 0, low, high)


def _rounds_at_every_step(ctx: LoweringContext, g: Geometry, output_padding: Ints) -> bool:
    """Whether torch's CPU leaves a transposed convolution in 16 bits to its own kernel."""
    padding = tuple(output_padding) * (len(g.stride) if len(output_padding) == 1 else 1)
    large = any(p >= s for p, s in zip(padding, g.stride, strict=True))
    return ctx.family == "cpu" and ctx.out.dtype.itemsize == 2 and large


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
        if transposed and _rounds_at_every_step(ctx, geometry, output_padding):
            result = hlo.convert(by_columns(input, weight, geometry, out.shape[2:]), kind)
        elif not transposed and _few_taps(ctx, weight, groups, out.shape, kind):
            result = by_taps(input, weight, geometry, out.shape[2:], kind)
        else:
            result = (spread if transposed else correlate)(input, weight, geometry, out.shape[2:], kind)
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
