"""Sampling an image at the points of a grid, in 2 and 3 dimensions, and its gradients.

A point becomes a coordinate of each axis, a coordinate a few taps (element, weight); corners are the products of taps.
Each corner is one gather of whole channel columns, and in the gradient of the image one scatter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2
CUBIC = -0.75


@dataclass(frozen=True)
class Mode:
    """How points are read: torch's numbers of the interpolation and of the padding; how many axes the image has."""

    interpolation: int
    padding: int
    align: bool
    axes: int

    @property
    def vectorised(self) -> bool:
        """Whether torch's CPU kernel is the one for two axes, whose formulas round otherwise."""
        return self.axes == 2


@dataclass(frozen=True)
class Tap:
    """One element of one axis that a point reads, all [N, *points]: its i32 ``index``, 0 where it is not ``inside``;
    its ``weight`` (None: 1), and how that moves with the point's grid coordinate (``slope``, None: not at all)."""

    index: Value
    inside: Value
    weight: Value | None
    slope: Value | None


def _times(x: Value, factor: float) -> Value:
    return stablehlo.multiply(x, hlo.full_like(x, factor))


def _plus(x: Value, term: float) -> Value:
    return stablehlo.add(x, hlo.full_like(x, term))


# ---- coordinates


def unnormalised(point: Value, size: int, mode: Mode) -> tuple[Value, float]:
    """A grid coordinate (-1 to 1) in elements, and its slope."""
    slope = (size - 1) / 2 if mode.align else size / 2
    if mode.align:
        return _times(_plus(point, 1), slope), slope
    if mode.vectorised:
        return _plus(_times(_plus(point, 1), slope), -0.5), slope
    return _times(_plus(_times(_plus(point, 1), size), -1), 0.5), slope


def padded(at: Value, size: int, mode: Mode) -> tuple[Value, Value | None]:
    """A coordinate moved into the axis as the padding says, and the slope of that (None: 1)."""
    if mode.padding == ZEROS:
        return at, None
    slope = None
    if mode.padding == REFLECTION:
        low, high = (0, 2 * (size - 1)) if mode.align else (-1, 2 * size - 1)
        at, slope = reflected(at, low, high)
    moved, inside = clipped(at, size)
    return moved, inside if slope is None else stablehlo.multiply(slope, inside)


def clipped(at: Value, size: int) -> tuple[Value, Value]:
    """``at`` between the first and the last element; the slope is 0 on and beyond them, as torch has it."""
    zero, end = hlo.full_like(at, 0), hlo.full_like(at, size - 1)
    inside = stablehlo.and_(hlo.compare(at, zero, "GT"), hlo.compare(at, end, "LT"))
    # maximum first: a NaN becomes the first element
    low = hlo.select(hlo.compare(at, zero, "GT"), at, zero)
    return stablehlo.minimum(low, end), hlo.convert(inside, hlo.dtype(at))


def reflected(at: Value, twice_low: int, twice_high: int) -> tuple[Value, Value]:
    """``at`` folded at both ends (given twice, to be integers) until it lies between them."""
    if twice_low == twice_high:
        return hlo.full_like(at, 0), hlo.full_like(at, 0)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    offset = _plus(at, -low)
    sign = hlo.select(hlo.compare(offset, hlo.full_like(at, 0), "LT"), hlo.full_like(at, -1), hlo.full_like(at, 1))
    offset = stablehlo.abs(offset)
    length = hlo.full_like(at, span)
    extra = stablehlo.remainder(offset, length)
    flips = stablehlo.floor(stablehlo.divide(offset, length))
    even = hlo.compare(stablehlo.remainder(flips, hlo.full_like(at, 2)), hlo.full_like(at, 0), "EQ")
    there, back = _plus(extra, low), stablehlo.subtract(hlo.full_like(at, span + low), extra)
    return hlo.select(even, there, back), hlo.select(even, sign, stablehlo.negate(sign))


# ---- taps


def taps(point: Value, size: int, mode: Mode) -> list[Tap]:
    """The elements of one axis that each point reads."""
    at, slope = unnormalised(point, size, mode)
    if mode.interpolation == BICUBIC:
        return _cubic_taps(at, slope, size, mode)
    at, bend = padded(at, size, mode)
    if mode.interpolation == NEAREST:
        return [_tap(stablehlo.round_nearest_even(at), size, None, None)]
    gradient = hlo.full_like(at, slope) if bend is None else _times(bend, slope)
    low = stablehlo.floor(at)
    part = stablehlo.subtract(at, low)
    rest = stablehlo.subtract(hlo.full_like(at, 1), part) if mode.vectorised else stablehlo.subtract(_plus(low, 1), at)
    return [_tap(low, size, rest, stablehlo.negate(gradient)), _tap(low, size, part, gradient, shift=1)]


def _tap(at: Value, size: int, weight: Value | None, slope: Value | None, shift: int = 0) -> Tap:
    """Element ``at + shift``; the shift is an integer's, where the float's next number may be further away than 1."""
    inside = stablehlo.and_(
        hlo.compare(at, hlo.full_like(at, -shift), "GE"), hlo.compare(at, hlo.full_like(at, size - 1 - shift), "LE")
    )
    index = _plus(hlo.convert(hlo.select(inside, at, hlo.full_like(at, 0)), torch.int32), shift)
    return Tap(hlo.select(inside, index, hlo.full_like(index, 0)), inside, weight, slope)


def _cubic_taps(at: Value, slope: float, size: int, mode: Mode) -> list[Tap]:
    """Four taps around the point; padding moves each of them, not the point."""
    low = stablehlo.floor(at)
    part = stablehlo.subtract(at, low)
    result = []
    for i, (weight, rise) in enumerate(zip(_cubic_weights(part), _cubic_slopes(part), strict=True)):
        place, _ = padded(_plus(low, i - 1), size, mode)
        result.append(_tap(stablehlo.round_nearest_even(place), size, weight, _times(rise, slope)))
    return result


def _cubic_weights(t: Value) -> list[Value]:
    def near(x: Value) -> Value:
        inner = _plus(_times(x, CUBIC + 2), -(CUBIC + 3))
        return _plus(stablehlo.multiply(stablehlo.multiply(inner, x), x), 1)

    def far(x: Value) -> Value:
        inner = _plus(stablehlo.multiply(_plus(_times(x, CUBIC), -5 * CUBIC), x), 8 * CUBIC)
        return _plus(stablehlo.multiply(inner, x), -4 * CUBIC)

    back, further = (stablehlo.subtract(hlo.full_like(t, reach), t) for reach in (1, 2))
    return [far(_plus(t, 1)), near(t), near(back), far(further)]


def _cubic_slopes(t: Value) -> list[Value]:
    def near(x: Value) -> Value:
        return stablehlo.multiply(_plus(_times(x, 3 * (CUBIC + 2)), -2 * (CUBIC + 3)), x)

    def far(x: Value) -> Value:
        return _plus(stablehlo.multiply(_plus(_times(x, 3 * CUBIC), -10 * CUBIC), x), 8 * CUBIC)

    back = stablehlo.subtract(hlo.full_like(t, 1), t)
    return [far(_plus(t, 1)), near(t), stablehlo.negate(near(back)), stablehlo.negate(far(_plus(back, 1)))]


# ---- corners


def corners(grid: Value, spatial: list[int], mode: Mode) -> list[tuple[Tap, ...]]:
    """Every combination of the axes' taps. The grid's last axis counts the image's axes from the innermost."""
    n = len(spatial)
    columns = []
    for axis, size in enumerate(spatial):
        column = hlo.slice_axis(grid, n + 1, n - 1 - axis, n - axis)
        columns.append(taps(hlo.squeeze(column, [n + 1]), size, mode))
    return list(itertools.product(*columns))


def inside(corner: Sequence[Tap]) -> Value:
    """Where all taps of a corner lie in the image."""
    return functools.reduce(stablehlo.and_, [tap.inside for tap in corner])


def weight(corner: Sequence[Tap], without: int = -1) -> Value | None:
    """The product of the taps' weights, of one axis its slope; None is 1. From the innermost axis out, as torch has
    it."""
    result = None
    for axis, tap in reversed(list(enumerate(corner))):
        factor = tap.slope if axis == without else tap.weight
        if factor is not None:
            result = factor if result is None else stablehlo.multiply(result, factor)
    return result


def index_vectors(corner: Sequence[Tap]) -> Value:
    """[N, *points, axes]: where a corner stands in the image."""
    last = hlo.rank(corner[0].index)
    return hlo.concatenate([hlo.unsqueeze(tap.index, last) for tap in corner], last)


def read(image: Value, corner: Sequence[Tap]) -> Value:
    """[N, C, *points]: the image at a corner, 0 outside of it."""
    n = len(corner)
    channels = hlo.shape(image)[1]
    values = hlo.gather(
        image,
        index_vectors(corner),
        offset_dims=(1,),
        collapsed=tuple(range(2, n + 2)),
        start_index_map=tuple(range(2, n + 2)),
        slice_sizes=[1, channels, *[1] * n],
        operand_batching=(0,),
        indices_batching=(0,),
    )
    return hlo.select(per_channel(inside(corner), channels), values, hlo.full_like(values, 0))


def per_channel(v: Value, channels: int) -> Value:
    """[N, *points] repeated along a new axis of channels."""
    n, *points = hlo.shape(v)
    return hlo.broadcast_in_dim(v, [n, channels, *points], [0, *range(2, len(points) + 2)])


def _sample(ctx: LoweringContext, image: Value, grid: Value, mode: Mode) -> Value:
    """torch's CPU kernels round 16-bit floats at every step, coordinates too: so do we there, and nowhere else."""
    out = ctx.out
    kind = out.dtype if ctx.family == "cpu" else dtypes.opmath(out.dtype)
    total = hlo.full(0, kind, out.shape)
    if 0 in (*out.shape, *hlo.shape(image)):
        return hlo.convert(total, out.dtype)
    image, grid = hlo.convert(image, kind), hlo.convert(grid, kind)
    read_corners = corners(grid, hlo.shape(image)[2:], mode)
    if mode.interpolation == BICUBIC:
        return hlo.convert(_row_by_row(image, read_corners), out.dtype)
    for corner in read_corners:
        value, factor = read(image, corner), weight(corner)
        if factor is not None:
            value = stablehlo.multiply(value, per_channel(factor, out.shape[1]))
        total = stablehlo.add(total, value)
    return hlo.convert(total, out.dtype)


def _row_by_row(image: Value, read_corners: Sequence[tuple[Tap, ...]]) -> Value:
    """Each row of four corners by the inner axis' weights, then the four rows by the outer one's."""

    def summed(terms: Sequence[tuple[Value, Value | None]]) -> Value:
        channels = hlo.shape(image)[1]
        parts = [stablehlo.multiply(v, per_channel(w, channels)) for v, w in terms if w is not None]
        return functools.reduce(stablehlo.add, parts)

    rows = [read_corners[i : i + 4] for i in range(0, len(read_corners), 4)]
    inner = [summed([(read(image, corner), corner[1].weight) for corner in row]) for row in rows]
    return summed([(value, row[0][0].weight) for value, row in zip(inner, rows, strict=True)])


@lowers(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    ctx: LoweringContext,
    input: Value,
    grid: Value,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Value:
    axes = hlo.rank(input) - 2
    return _sample(ctx, input, grid, Mode(interpolation_mode, padding_mode, align_corners, axes))


@lowers(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    ctx: LoweringContext,
    grad_output: Value,
    input: Value,
    grid: Value,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    mode = Mode(interpolation_mode, padding_mode, align_corners, hlo.rank(input) - 2)
    of_image, of_grid = ctx.outs
    kind = dtypes.opmath(hlo.dtype(input))
    if 0 in (*hlo.shape(grad_output), *hlo.shape(input)):
        return tuple(None if s is None else hlo.full(0, s.dtype, s.shape) for s in ctx.outs)
    grad, image, points = (hlo.convert(v, kind) for v in (grad_output, input, grid))
    shared = corners(points, hlo.shape(image)[2:], mode)
    first = image_gradient(grad, hlo.shape(image), shared) if output_mask[0] and of_image is not None else None
    second = grid_gradient(grad, image, hlo.shape(grid), shared) if of_grid is not None else None
    return (
        None if first is None else hlo.convert(first, of_image.dtype),
        None if second is None else hlo.convert(second, of_grid.dtype),
    )


def image_gradient(grad: Value, shape: list[int], shared: Sequence[Sequence[Tap]]) -> Value:
    """Each point's gradient added to the corners it read."""
    n, channels, total = len(shape) - 2, shape[1], hlo.full(0, hlo.dtype(grad), shape)
    for corner in shared:
        part, factor = grad, weight(corner)
        if factor is not None:
            part = stablehlo.multiply(part, per_channel(factor, channels))
        part = hlo.select(per_channel(inside(corner), channels), part, hlo.full_like(part, 0))
        total = hlo.scatter(
            [total],
            index_vectors(corner),
            [part],
            "add",
            update_window_dims=(1,),
            inserted=tuple(range(2, n + 2)),
            scatter_dims=tuple(range(2, n + 2)),
            input_batching=(0,),
            indices_batching=(0,),
        )[0]
    return total


def grid_gradient(grad: Value, image: Value, shape: list[int], shared: Sequence[Sequence[Tap]]) -> Value:
    """How the result moves with each point: corners weighted by the slope of one axis and the weights of the others."""
    axes = len(shared[0])
    totals = [hlo.full(0, hlo.dtype(grad), shape[:-1])] * axes
    for corner in shared:
        if corner[0].slope is None:
            break
        pull = hlo.reduce(stablehlo.multiply(read(image, corner), grad), [1], "add")
        for axis in range(axes):
            slope = weight(corner, axis)
            assert slope is not None
            totals[axis] = stablehlo.add(totals[axis], stablehlo.multiply(pull, slope))
    return hlo.concatenate([hlo.unsqueeze(t, axes + 1) for t in reversed(totals)], axes + 1)
