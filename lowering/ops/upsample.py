"""Interpolation of every mode, forward and backward: axis by axis, each a table of weighted taps made on the host.

The tables repeat torch's own float arithmetic, since its rounding decides which source an element takes. A gradient is
the transposed table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten
Scale = float | None


@dataclass(frozen=True)
class Taps:
    """What each element of an axis is made of: sources and weights, [size, taps]; a NaN weight is an absent tap."""

    source: np.ndarray
    weight: np.ndarray

    def transposed(self, size: int) -> Taps:
        """The taps of the adjoint: for each of ``size`` sources, the elements that take from it."""
        present = ~np.isnan(self.weight)
        element = np.nonzero(present)[0]
        source, weight = self.source[present], self.weight[present]
        order = np.argsort(source, kind="stable")
        counts = np.bincount(source, minlength=size)
        rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        width = max(counts.max(initial=0), 1)
        result = Taps(np.zeros((size, width), np.int64), np.full((size, width), np.nan))
        result.source[source[order], rank] = element[order]
        result.weight[source[order], rank] = weight[order]
        return result


# ---- taps of each mode: (input size, output size, align_corners, the user's scale factor, dtype of the arithmetic)


def _scale(size: int, count: int, align: bool, factor: Scale, kind: Any) -> Any:
    if align:
        return kind(0) if count <= 1 else kind((size - 1) / kind(count - 1))
    return kind(1.0 / factor) if factor is not None and factor > 0 else kind(kind(size) / kind(count))


def nearest(size: int, count: int, align: bool, factor: Scale, kind: Any) -> Taps:
    o = np.arange(count)
    if count == 2 * size:
        source = o // 2
    else:
        source = np.floor(o.astype(np.float32) * _scale(size, count, False, factor, np.float32)).astype(np.int64)
    return _single(o if count == size else np.minimum(source, size - 1))


def nearest_exact(size: int, count: int, align: bool, factor: Scale, kind: Any) -> Taps:
    o = np.arange(count)
    scale = _scale(size, count, False, factor, np.float32)
    source = np.floor((o.astype(np.float32) + np.float32(0.5)) * scale).astype(np.int64)
    return _single(np.minimum(source, size - 1))


def _single(source: np.ndarray) -> Taps:
    return Taps(source[:, None], np.ones((len(source), 1)))


def _real_source(size: int, count: int, align: bool, factor: Scale, kind: Any) -> np.ndarray:
    scale = _scale(size, count, align, factor, kind)
    o = np.arange(count).astype(kind)
    return scale * o if align else scale * (o + kind(0.5)) - kind(0.5)


def linear(size: int, count: int, align: bool, factor: Scale, kind: Any) -> Taps:
    if size == count:
        return _single(np.arange(count))
    real = np.maximum(_real_source(size, count, align, factor, kind), 0)
    low = np.minimum(real.astype(np.int64), size - 1)
    part = np.clip(real - low, 0, 1)
    return Taps(np.stack([low, np.minimum(low + 1, size - 1)], 1), np.stack([1 - part, part], 1))


def cubic(size: int, count: int, align: bool, factor: Scale, kind: Any) -> Taps:
    real = _real_source(size, count, align, factor, kind)
    low = np.minimum(np.floor(real).astype(np.int64), size - 1)
    part = np.clip(real - low, 0, 1)
    distance = np.stack([part + 1, part, 1 - part, 2 - part], 1)
    source = np.clip(low[:, None] + np.arange(-1, 3), 0, size - 1)
    return Taps(source, _cubic_filter(distance, -0.75))


def _cubic_filter(x: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _triangle_filter(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _lanczos_filter(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def antialiased(filter_: Callable[[np.ndarray], np.ndarray], width: int) -> Callable[..., Taps]:
    """Taps of a filter that widens with the scale when shrinking. ``width``: how many taps it has at scale 1."""

    def taps(size: int, count: int, align: bool, factor: Scale, kind: Any) -> Taps:
        scale = _scale(size, count, align, factor, kind)
        widen = max(scale, kind(1))
        support = kind(width * 0.5) * widen
        centre = scale * (np.arange(count).astype(kind) + kind(0.5))
        first = np.maximum((centre - support + kind(0.5)).astype(np.int64), 0)
        end = np.minimum((centre + support + kind(0.5)).astype(np.int64), size)
        length = np.clip(end - first, 0, math.ceil(support) * 2 + 1)
        j = np.arange(max(length.max(initial=1), 1))
        source = first[:, None] + j
        weight = filter_((source - centre[:, None] + kind(0.5)) * (1 / widen))
        weight = np.where(j < length[:, None], weight, 0)
        total = weight.sum(1, keepdims=True)
        weight = np.divide(weight, total, out=weight, where=total != 0)
        return Taps(np.minimum(source, size - 1), np.where(j < length[:, None], weight, np.nan))

    return taps


# ---- applying taps


def resample(x: Value, axis: int, taps: Taps) -> Value:
    """Weighted sums of elements along ``axis``."""
    count, width = taps.source.shape
    if width == 1 and np.array_equal(taps.weight, np.ones_like(taps.weight)):
        return take(x, axis, taps.source[:, 0])
    sizes = hlo.shape(x)
    if sizes[axis] == count * width and np.array_equal(taps.source.reshape(-1), np.arange(count * width)):
        picked = hlo.reshape(x, [*sizes[:axis], count, width, *sizes[axis + 1 :]])
    else:
        picked = take(x, axis, taps.source)
    kind = hlo.dtype(x)
    present = ~np.isnan(taps.weight)
    weight = np.where(present, taps.weight, 0)
    if not np.array_equal(weight, np.ones_like(weight)):
        table = hlo.dense(weight.astype(dtypes.NUMPY[kind]), kind)
        picked = stablehlo.multiply(picked, hlo.broadcast_in_dim(table, hlo.shape(picked), [axis, axis + 1]))
    if not present.all():
        mask = hlo.broadcast_in_dim(hlo.dense(present, torch.bool), hlo.shape(picked), [axis, axis + 1])
        picked = hlo.select(mask, picked, hlo.full_like(picked, 0))
    return hlo.reduce(picked, [axis + 1], "add")


def take(x: Value, axis: int, index: np.ndarray) -> Value:
    """``x`` at host-known positions of one axis; the axis becomes those of ``index``."""
    sizes = hlo.shape(x)
    if np.array_equal(index, np.arange(sizes[axis])):
        return x
    if index.ndim == 1 and index.size and sizes[axis] and index.size % sizes[axis] == 0:
        times = index.size // sizes[axis]
        if np.array_equal(index, np.arange(index.size) // times):
            wide = [*sizes[: axis + 1], times, *sizes[axis + 1 :]]
            spread = hlo.broadcast_in_dim(x, wide, [i if i <= axis else i + 1 for i in range(len(sizes))])
            return hlo.reshape(spread, [*sizes[:axis], index.size, *sizes[axis + 1 :]])
    n = index.ndim
    return hlo.gather(
        x,
        hlo.dense(index[..., None].astype(np.int32), torch.int32),
        offset_dims=[i if i < axis else i + n - 1 for i in range(len(sizes)) if i != axis],
        collapsed=(axis,),
        start_index_map=(axis,),
        slice_sizes=[1 if i == axis else size for i, size in enumerate(sizes)],
    )


# ---- registration

MODES: dict[str, tuple[Callable[..., Taps], bool, Sequence[int]]] = {
    "upsample_nearest": (nearest, False, (1, 2, 3)),
    "_upsample_nearest_exact": (nearest_exact, False, (1, 2, 3)),
    "upsample_linear": (linear, True, (1,)),
    "upsample_bilinear": (linear, True, (2,)),
    "upsample_trilinear": (linear, True, (3,)),
    "upsample_bicubic": (cubic, True, (2,)),
    "_upsample_bilinear2d_aa": (antialiased(_triangle_filter, 2), True, (2,)),
    "_upsample_bicubic2d_aa": (antialiased(lambda x: _cubic_filter(x, -0.5), 4), True, (2,)),
    "_upsample_lanczos2d_aa": (antialiased(_lanczos_filter, 6), True, (2,)),
}
"""Packet name without its dimension -> (taps, whether it takes align_corners, its dimensions)."""


def _factors(rest: Sequence[Any], spatial: int) -> list[Scale]:
    """The user's scale factors: one argument an axis, or one list (the ``vec`` overloads)."""
    given = list(rest[0]) if rest and isinstance(rest[0], (list, tuple)) else list(rest)
    return [*given, *[None] * (spatial - len(given))]


def _bound(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in the schema's order."""
    names = [a.name for a in op._schema.arguments]
    given = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    return [given[n] for n in names]


def forward_rule(op: Any, taps: Callable[..., Taps], takes_align: bool, spatial: int) -> Any:
    """The rule of a forward overload."""

    def rule(ctx: LoweringContext, *args: Any, **kwargs: Any) -> Value:
        x, _, *rest = _bound(op, args, kwargs)
        align = bool(rest.pop(0)) if takes_align else False
        return interpolate(ctx, x, taps, align, _factors(rest, spatial))

    return rule


def interpolate(
    ctx: LoweringContext, x: Value, taps: Callable[..., Taps], align: bool, factors: Sequence[Scale]
) -> Value:
    """``x`` with its last axes resampled to the promised sizes."""
    out = ctx.out
    if 0 in out.shape:
        return hlo.full(0, out.dtype, out.shape)
    selects = taps in (nearest, nearest_exact)
    kind = out.dtype if selects else _arithmetic(out.dtype)
    x = hlo.convert(x, kind)
    first = hlo.rank(x) - len(factors)
    for axis in reversed(range(first, hlo.rank(x))):
        size, count = hlo.shape(x)[axis], out.shape[axis]
        x = resample(x, axis, taps(size, count, align, factors[axis - first], _real(kind)))
    if dtypes.is_integer(out.dtype) and not selects:
        limits = torch.iinfo(out.dtype)
        x = hlo.clamp(stablehlo.round_nearest_even(x), hlo.scalar(limits.min, kind), hlo.scalar(limits.max, kind))
    return hlo.convert(x, out.dtype)


def _arithmetic(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if dtypes.is_integer(kind) else dtypes.opmath(kind)


def _real(kind: torch.dtype) -> Any:
    return np.float64 if kind in (torch.float64, torch.complex128) else np.float32


def backward_rule(op: Any, taps: Callable[..., Taps], takes_align: bool, spatial: int) -> Any:
    """The rule of a backward overload."""

    def rule(ctx: LoweringContext, *args: Any, **kwargs: Any) -> Value:
        grad, _, _, *rest = _bound(op, args, kwargs)
        align = bool(rest.pop(0)) if takes_align else False
        factors, out = _factors(rest, spatial), ctx.out
        if 0 in out.shape or hlo.numel(grad) == 0:
            return hlo.full(0, out.dtype, out.shape)
        grad = hlo.convert(grad, _arithmetic(out.dtype))
        first = hlo.rank(grad) - spatial
        for axis in range(first, hlo.rank(grad)):
            size, count = out.shape[axis], hlo.shape(grad)[axis]
            table = taps(size, count, align, factors[axis - first], _real(hlo.dtype(grad)))
            grad = resample(grad, axis, table.transposed(size))
        return hlo.convert(grad, out.dtype)

    return rule


def _register() -> None:
    for name, (taps, takes_align, dimensions) in MODES.items():
        for spatial in dimensions:
            full_name = name if name.endswith("_aa") else f"{name}{spatial}d"
            packet, backward = getattr(aten, full_name), getattr(aten, f"{full_name}_backward", None)
            for op in (packet.default, packet.vec):
                lowers(op)(forward_rule(op, taps, takes_align, spatial))
            if backward is not None:
                lowers(backward.default)(backward_rule(backward.default, taps, takes_align, spatial))


_register()
