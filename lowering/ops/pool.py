"""Pooling over windows and its gradients: max with positions, average, and their 1-, 2- and 3-dimensional forms.

Max pooling works one axis after another: the first maximum of a box is the first row's first maximum, so pairs of value
and position compose. Small windows are unrolled into strided slices, which XLA fuses into one loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers
from tpu_compile.lowering.windows import reduce_window, select_and_scatter

aten = torch.ops.aten
Ints = Sequence[int]

UNROLLED = 32
"""Windows up to this many elements on one axis become slices; longer ones a reduce_window, a gather or a scatter."""


@dataclass(frozen=True)
class Window:
    """The window of one axis: ``count`` positions over an axis of ``size``, the first at ``-padding``."""

    axis: int
    size: int
    count: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def span(self) -> int:
        """Elements from the first to the last tap."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def high(self) -> int:
        """Padding behind the axis so that just ``count`` windows fit; negative when the last elements are in none."""
        return (self.count - 1) * self.stride + self.span - self.size - self.padding


def windows(
    x: Value, counts: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints = (1,), *, spatial: int
) -> list[Window]:
    """The windows of the trailing axes; lists of one entry speak for every axis, an empty stride means the kernel."""
    stride = stride if len(stride) else kernel
    columns = ([*v] * spatial if len(v) == 1 else [*v] for v in (kernel, stride, padding, dilation))
    first = hlo.rank(x) - spatial
    rows = zip(hlo.shape(x)[first:], counts[-spatial:], *columns, strict=True)
    return [Window(first + i, *row) for i, row in enumerate(rows)]


def padded(x: Value, w: Window, fill: object) -> Value:
    """``x`` with the window's padding on its axis."""
    low, high = [0] * hlo.rank(x), [0] * hlo.rank(x)
    low[w.axis], high[w.axis] = w.padding, w.high
    return hlo.pad(x, fill, low, high)


def tap(x: Value, w: Window, i: int) -> Value:
    """Element ``i`` of every window, of a padded ``x``."""
    start = i * w.dilation
    return hlo.slice_axis(x, w.axis, start, start + (w.count - 1) * w.stride + 1, w.stride)


# ---- max


def lowest(element: torch.dtype) -> object:
    """What max pooling pads with."""
    return -math.inf if element.is_floating_point else torch.iinfo(element).min


def better(value: Value, best: Value) -> Value:
    """Whether a later element replaces the best so far: torch takes the first maximum, but the last NaN."""
    wins = hlo.compare(value, best, "GT")
    return stablehlo.or_(wins, hlo.is_nan(value)) if hlo.dtype(value).is_floating_point else wins


def max_along(x: Value, index: Value, w: Window) -> tuple[Value, Value]:
    """Windowed maximum of one axis, and what ``index`` holds where it stands. Padding has index -1."""
    element = hlo.dtype(x)
    x, index = padded(x, w, lowest(element)), padded(index, w, -1)
    if w.kernel <= UNROLLED:
        best, at = tap(x, w, 0), tap(index, w, 0)
        for i in range(1, w.kernel):
            value, place = tap(x, w, i), tap(index, w, i)
            wins = better(value, best)
            best = hlo.select(wins, value, best)
            at = hlo.select(stablehlo.or_(wins, hlo.compare(at, hlo.full_like(at, 0), "LT")), place, at)
        return best, at
    sizes = [1] * hlo.rank(x)
    kernel, stride, dilation = list(sizes), list(sizes), list(sizes)
    kernel[w.axis], stride[w.axis], dilation[w.axis] = w.kernel, w.stride, w.dilation
    inits = [hlo.scalar(lowest(element), element), hlo.scalar(-1, torch.int32)]
    value, at = reduce_window([x, index], inits, either, kernel, stride, [(0, 0)] * len(sizes), dilation)
    return value, at


def either(a: Value, i: Value, b: Value, j: Value) -> tuple[Value, Value]:
    """The better of two (value, position) pairs in any order: the first maximum, the last NaN, padding (-1) never."""
    zero = hlo.full_like(i, 0)
    earlier = stablehlo.and_(hlo.compare(a, b, "EQ"), hlo.compare(j, i, "LT"))
    wins = stablehlo.or_(hlo.compare(b, a, "GT"), earlier)
    if hlo.dtype(a).is_floating_point:
        later = stablehlo.or_(stablehlo.not_(hlo.is_nan(a)), hlo.compare(j, i, "GT"))
        wins = stablehlo.or_(wins, stablehlo.and_(hlo.is_nan(b), later))
    wins = stablehlo.or_(wins, hlo.compare(i, zero, "LT"))
    take = stablehlo.and_(wins, hlo.compare(j, zero, "GE"))
    return hlo.select(take, b, a), hlo.select(take, j, i)


def max_with_positions(x: Value, boxes: Sequence[Window]) -> tuple[Value, Value]:
    """(maximum, flat position in the unpadded spatial volume as i32) of every box. The innermost axis goes first."""
    index = flat_positions(x, [w.axis for w in boxes])
    for w in reversed(boxes):
        x, index = max_along(x, index, w)
    return x, index


def max_alone(x: Value, boxes: Sequence[Window]) -> Value:
    """The maximum of every box."""
    x = _covered(x, boxes)
    kernel, stride, padding, dilation = _columns(hlo.rank(x), boxes)
    start = hlo.scalar(lowest(hlo.dtype(x)), hlo.dtype(x))
    return reduce_window([x], [start], stablehlo.maximum, kernel, stride, padding, dilation)[0]


def _covered(x: Value, boxes: Sequence[Window]) -> Value:
    """``x`` without the last elements that are in no box."""
    for w in boxes:
        x = hlo.slice_axis(x, w.axis, 0, w.size + min(w.high, 0))
    return x


def _columns(rank: int, boxes: Sequence[Window]) -> tuple[list[int], list[int], list[tuple[int, int]], list[int]]:
    """Kernel, stride, padding and dilation, with an entry for every axis, of what ``_covered`` gives."""
    kernel, stride, padding, dilation = [1] * rank, [1] * rank, [(0, 0)] * rank, [1] * rank
    for w in boxes:
        kernel[w.axis], stride[w.axis], dilation[w.axis] = w.kernel, w.stride, w.dilation
        padding[w.axis] = w.padding, max(w.high, 0)
    return kernel, stride, padding, dilation


def flat_positions(x: Value, axes: Ints) -> Value:
    """Row-major positions over ``axes`` as i32, shaped like ``x``."""
    index = hlo.full(0, torch.int32, hlo.shape(x))
    step = 1
    for axis in reversed(axes):
        counts = hlo.iota(hlo.shape(x), axis)
        index = stablehlo.add(index, stablehlo.multiply(counts, hlo.full_like(counts, step)))
        step *= hlo.shape(x)[axis]
    return index


def _max_pool(
    ctx: LoweringContext, x: Value, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, spatial: int
) -> tuple[Value, Value]:
    values, indices = ctx.outs
    boxes = windows(x, values.shape, kernel, stride, padding, dilation, spatial=spatial)
    value, index = max_with_positions(x, boxes)
    if ctx.family == "tpu":  # which has one operation for it; where no one reads the positions they are not computed
        value = max_alone(x, boxes)
    return hlo.convert(value, values.dtype), hlo.convert(index, indices.dtype)


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(
    ctx: LoweringContext,
    x: Value,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    dilation: Ints = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    return _max_pool(ctx, x, kernel_size, stride, padding, dilation, 2)


@lowers(aten.max_pool3d_with_indices.default)
def max_pool3d_with_indices(
    ctx: LoweringContext,
    x: Value,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    dilation: Ints = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    return _max_pool(ctx, x, kernel_size, stride, padding, dilation, 3)


@lowers(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_with_indices_backward(
    ctx: LoweringContext,
    grad_output: Value,
    x: Value,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    indices: Value,
) -> Value:
    boxes = windows(x, hlo.shape(grad_output), kernel_size, stride, padding, dilation, spatial=2)
    return _max_pool_backward(ctx, grad_output, x, indices, boxes)


@lowers(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_with_indices_backward(
    ctx: LoweringContext,
    grad_output: Value,
    x: Value,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    indices: Value,
) -> Value:
    boxes = windows(x, hlo.shape(grad_output), kernel_size, stride, padding, dilation, spatial=3)
    return _max_pool_backward(ctx, grad_output, x, indices, boxes)


def _max_pool_backward(ctx: LoweringContext, grad: Value, x: Value, indices: Value, boxes: Sequence[Window]) -> Value:
    if ctx.family == "tpu" and all(w.dilation == 1 for w in boxes):
        return send_to_maxima(ctx, grad, x, boxes)
    return send_back(ctx, grad, indices, boxes)


def send_to_maxima(ctx: LoweringContext, grad: Value, x: Value, boxes: Sequence[Window]) -> Value:
    """Each window's gradient added at its maximum, looked for again: a TPU has one operation for it. Sums of up to four
    16-bit gradients are rounded as they grow: as float32, what is pooled would be in memory a second time."""
    out = ctx.out
    meeting = math.prod(-(-w.kernel // w.stride) for w in boxes)
    kind = out.dtype if meeting <= 4 else dtypes.opmath(out.dtype)
    x = hlo.convert(_covered(x, boxes), kind)
    kernel, stride, padding, _ = _columns(hlo.rank(x), boxes)
    result = select_and_scatter(x, hlo.convert(grad, kind), kernel, stride, padding)
    rest = [size - covered for size, covered in zip(out.shape, hlo.shape(x), strict=True)]
    return hlo.convert(hlo.pad(result, 0, [0] * len(rest), rest), out.dtype)


def send_back(ctx: LoweringContext, grad: Value, indices: Value, boxes: Sequence[Window]) -> Value:
    """Each window's gradient added at its flat position. In small windows every tap asks whether it was chosen."""
    out = ctx.out
    grad = hlo.convert(grad, dtypes.opmath(out.dtype))
    indices = hlo.index_operand(indices, 2**31 - 1)
    if math.prod(w.kernel for w in boxes) > UNROLLED:
        return hlo.convert(scatter_flat(grad, indices, out.shape, len(boxes)), out.dtype)
    total = None
    for taps in np.ndindex(*(w.kernel for w in boxes)):
        here = hlo.full(0, torch.int32, hlo.shape(grad))
        step = 1
        for w, i in reversed(list(zip(boxes, taps, strict=True))):
            at = stablehlo.multiply(hlo.iota(hlo.shape(grad), w.axis), hlo.full_like(here, w.stride))
            at = stablehlo.add(at, hlo.full_like(here, i * w.dilation - w.padding))
            here = stablehlo.add(here, stablehlo.multiply(at, hlo.full_like(at, step)))
            step *= w.size
        chosen = hlo.select(hlo.compare(here, indices, "EQ"), grad, hlo.full_like(grad, 0))
        part = spread_tap(chosen, boxes, taps)
        total = part if total is None else stablehlo.add(total, part)
    assert total is not None
    return hlo.convert(total, out.dtype)


def spread_tap(x: Value, boxes: Sequence[Window], taps: Ints) -> Value:
    """Element ``taps`` of every window, put back where it stands in the unpadded input; zeros elsewhere."""
    low, high, inner = ([0] * hlo.rank(x) for _ in range(3))
    for w, i in zip(boxes, taps, strict=True):
        low[w.axis], inner[w.axis] = i * w.dilation - w.padding, w.stride - 1
        high[w.axis] = w.size - low[w.axis] - ((w.count - 1) * w.stride + 1)
    return hlo.pad(x, 0, low, high, inner)


def scatter_flat(x: Value, indices: Value, shape: Ints, spatial: int) -> Value:
    """``x[lead, ...]`` added at ``indices[lead, ...]``, flat positions in the last ``spatial`` axes of ``shape``."""
    lead, volume = math.prod(shape[: len(shape) - spatial]), math.prod(shape[len(shape) - spatial :])
    count = hlo.numel(x) // max(lead, 1)
    rows = hlo.reshape(x, [lead, count])
    target = hlo.full(0, hlo.dtype(x), [lead, volume])
    result = hlo.scatter(
        [target],
        hlo.reshape(indices, [lead, count, 1]),
        [rows],
        "add",
        update_window_dims=(),
        inserted=(1,),
        scatter_dims=(1,),
        input_batching=(0,),
        indices_batching=(0,),
    )[0]
    return hlo.reshape(result, shape)


# ---- average


def sums(x: Value, boxes: Sequence[Window]) -> Value:
    """The sum of every box."""
    return window_sum(_covered(x, boxes), [(w.axis, w.kernel, w.stride, (w.padding, max(w.high, 0)), 1) for w in boxes])


def window_sum(x: Value, rows: Sequence[tuple[int, int, int, tuple[int, int], int]]) -> Value:
    """reduce_window of add; each row is (axis, window, stride, padding, base dilation)."""
    ones = [1] * hlo.rank(x)
    kernel, strides, pads, base = list(ones), list(ones), [(0, 0)] * len(ones), list(ones)
    for axis, window, stride, padding, dilation in rows:
        kernel[axis], strides[axis], pads[axis], base[axis] = window, stride, padding, dilation
    init = hlo.scalar(0, hlo.dtype(x))
    return reduce_window([x], [init], stablehlo.add, kernel, strides, pads, None, base)[0]


def divisors(w: Window, include_pad: bool) -> np.ndarray:
    """How many elements each window of one axis counts: within the padded axis, or within the axis itself."""
    start = np.arange(w.count) * w.stride - w.padding
    end = np.minimum(start + w.kernel, w.size + w.padding)
    return end - start if include_pad else np.minimum(end, w.size) - np.maximum(start, 0)


def averaged(x: Value, boxes: Sequence[Window], include_pad: bool, override: int | None) -> Value:
    """``x``, one entry a window, divided by what torch counts in the window."""
    scale = 1.0
    if override is not None:
        return stablehlo.divide(x, hlo.full_like(x, override))
    for w in boxes:
        counts = divisors(w, include_pad)
        if (counts == counts[:1]).all():
            scale *= int(counts[0]) if counts.size else 1
        else:
            column = hlo.dense(counts.astype(dtypes.NUMPY[hlo.dtype(x)]), hlo.dtype(x))
            x = stablehlo.divide(x, hlo.broadcast_in_dim(column, hlo.shape(x), [w.axis]))
    return x if scale == 1 else stablehlo.divide(x, hlo.full_like(x, scale))


def _avg_pool(
    ctx: LoweringContext,
    x: Value,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    include_pad: bool,
    override: int | None,
    spatial: int,
) -> Value:
    out = ctx.out
    kind = torch.int64 if dtypes.is_integer(out.dtype) else dtypes.opmath(out.dtype)
    boxes = windows(x, out.shape, kernel, stride, padding, spatial=spatial)
    return hlo.convert(averaged(sums(hlo.convert(x, kind), boxes), boxes, include_pad, override), out.dtype)


@lowers(aten.avg_pool2d.default)
def avg_pool2d(
    ctx: LoweringContext,
    x: Value,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    return _avg_pool(ctx, x, kernel_size, stride, padding, count_include_pad, divisor_override, 2)


@lowers(aten.avg_pool3d.default)
def avg_pool3d(
    ctx: LoweringContext,
    x: Value,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    return _avg_pool(ctx, x, kernel_size, stride, padding, count_include_pad, divisor_override, 3)


@lowers(aten.avg_pool1d.default)
def avg_pool1d(
    ctx: LoweringContext,
    x: Value,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Value:
    return _avg_pool(ctx, x, kernel_size, stride, padding, count_include_pad, None, 1)


def _avg_pool_backward(
    ctx: LoweringContext,
    grad: Value,
    x: Value,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    include_pad: bool,
    override: int | None,
    spatial: int,
) -> Value:
    """Every window hands each of its elements a share: a window sum over the gradient, spaced out by the stride."""
    out = ctx.out
    boxes = windows(x, hlo.shape(grad), kernel, stride, padding, spatial=spatial)
    share = averaged(hlo.convert(grad, dtypes.opmath(out.dtype)), boxes, include_pad, override)
    rows = []
    for w in boxes:
        low = w.kernel - 1 - w.padding
        high = w.size + w.kernel - 1 - low - ((w.count - 1) * w.stride + 1)
        rows.append((w.axis, w.kernel, 1, (low, high), w.stride))
    share = window_sum(share, rows)
    return hlo.convert(share, out.dtype)


@lowers(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    ctx: LoweringContext,
    grad_output: Value,
    x: Value,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    return _avg_pool_backward(ctx, grad_output, x, kernel_size, stride, padding, count_include_pad, divisor_override, 2)


@lowers(aten.avg_pool3d_backward.default)
def avg_pool3d_backward(
    ctx: LoweringContext,
    grad_output: Value,
    x: Value,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    return _avg_pool_backward(ctx, grad_output, x, kernel_size, stride, padding, count_include_pad, divisor_override, 3)
