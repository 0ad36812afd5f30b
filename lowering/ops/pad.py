"""Reflection and replication pads, and the way back of their gradients: slices, flips and joins, one axis at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

Border = Callable[[Value, int, int, bool], Value]
"""(x, axis, width, at the end) to the strip that is joined on there."""


def _reflected(x: Value, at: int, width: int, end: bool) -> Value:
    n = hlo.shape(x)[at]
    start = n - 1 - width if end else 1
    return hlo.reverse(hlo.slice_axis(x, at, start, start + width), [at])


def _replicated(x: Value, at: int, width: int, end: bool) -> Value:
    n = hlo.shape(x)[at]
    edge = hlo.slice_axis(x, at, n - 1 if end else 0, n if end else 1)
    return hlo.broadcast_in_dim(edge, [width if i == at else s for i, s in enumerate(hlo.shape(x))], range(hlo.rank(x)))


def _pad(x: Value, padding: Sequence[int], border: Border) -> Value:
    """Pad the last axes; a negative amount crops, after the other side has been made from the whole axis."""
    for i in range(len(padding) // 2):
        at, low, high = hlo.rank(x) - 1 - i, padding[2 * i], padding[2 * i + 1]
        parts = [border(x, at, low, False)] if low > 0 else []
        parts += [x, *([border(x, at, high, True)] if high > 0 else [])]
        x = hlo.concatenate(parts, at)
        x = hlo.slice_axis(x, at, max(-low, 0), hlo.shape(x)[at] - max(-high, 0))
    return x


def _fold_reflected(strip: Value, at: int, size: int, end: bool) -> Value:
    width = hlo.shape(strip)[at]
    start = size - 1 - width if end else 1
    return _placed(hlo.reverse(strip, [at]), at, start, size)


def _fold_replicated(strip: Value, at: int, size: int, end: bool) -> Value:
    total = hlo.reduce(strip, [at], "add")
    return _placed(hlo.unsqueeze(total, at), at, size - 1 if end else 0, size)


def _placed(x: Value, at: int, start: int, size: int) -> Value:
    """``x`` within zeros of ``size`` on one axis."""
    low, high = [0] * hlo.rank(x), [0] * hlo.rank(x)
    low[at], high[at] = start, size - start - hlo.shape(x)[at]
    return hlo.pad(x, 0, low, high)


def _unpad(grad: Value, sizes: Sequence[int], padding: Sequence[int], fold: Border) -> Value:
    """The transpose of ``_pad``: the middle, plus what each strip hands back to the elements it was made from."""
    for i in range(len(padding) // 2):
        at = hlo.rank(grad) - 1 - i
        low, high, size = padding[2 * i], padding[2 * i + 1], sizes[at]
        grad = _placed(grad, at, max(-low, 0), hlo.shape(grad)[at] + max(-low, 0) + max(-high, 0))
        first, last = max(low, 0), max(high, 0)
        total = hlo.slice_axis(grad, at, first, first + size)
        if first:
            total = stablehlo.add(total, fold(hlo.slice_axis(grad, at, 0, first), at, size, False))
        if last:
            strip = hlo.slice_axis(grad, at, first + size, first + size + last)
            total = stablehlo.add(total, fold(strip, at, size, True))
        grad = total
    return grad


def _rule(border: Border) -> Any:
    def rule(ctx: LoweringContext, x: Value, padding: Sequence[int]) -> Value:
        if not ctx.out.numel:
            return hlo.full(0, ctx.out.dtype, ctx.out.shape)
        return _pad(x, padding, border)

    return rule


def _backward_rule(fold: Border) -> Any:
    def rule(ctx: LoweringContext, grad_output: Value, x: Value, padding: Sequence[int]) -> Value:
        out = ctx.out
        if not out.numel or not hlo.numel(grad_output):
            return hlo.full(0, out.dtype, out.shape)
        wide = hlo.convert(grad_output, dtypes.opmath(out.dtype))
        return hlo.convert(_unpad(wide, out.shape, padding, fold), out.dtype)

    return rule


lowers(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)(_rule(_reflected))
lowers(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)(
    _rule(_replicated)
)
lowers(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
)(_backward_rule(_fold_reflected))
lowers(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)(_backward_rule(_fold_replicated))
