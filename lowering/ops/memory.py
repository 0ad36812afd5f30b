"""Reading and writing a window of a flat memory, for the eager device's views."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import hlo, memory
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.memory import PLACES, WHOLE, Grid, read_window, write_window
from tpu_compile.lowering.program import dense_order
from tpu_compile.lowering.registry import lowers


@lowers(read_window)
def read(
    ctx: LoweringContext, base: Value, start: Value | None, size: Sequence[int], stride: Sequence[int], mode: str
) -> Value:
    if not ctx.out.numel:
        return hlo.full(0, ctx.out.dtype, ctx.out.shape)
    if mode == WHOLE:
        order = _order(size, stride)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return hlo.transpose(hlo.reshape(base, [size[i] for i in order]), inverse)
    flat = hlo.reshape(base, [hlo.numel(base)])
    if mode == PLACES:
        return hlo.broadcast(_gather(flat, _places(start, size, stride)), size)
    box = _grid(base, size, stride, mode)
    cut = hlo.dynamic_slice(_spread(flat, box), _starts(start, box), box.sizes)
    return _from_box(cut, box, size)


@lowers(write_window)
def write(
    ctx: LoweringContext,
    base: Value,
    value: Value,
    start: Value | None,
    size: Sequence[int],
    stride: Sequence[int],
    mode: str,
) -> Value:
    value = hlo.convert(value, hlo.dtype(base))
    if not hlo.numel(value):
        return base
    if mode == WHOLE:
        return hlo.reshape(hlo.transpose(value, _order(size, stride)), hlo.shape(base))
    value = _without_repeats(value, stride)
    flat = hlo.reshape(base, [hlo.numel(base)])
    if mode == PLACES:
        return hlo.reshape(_scatter(flat, _places(start, size, stride), value), hlo.shape(base))
    box = _grid(base, size, stride, mode)
    axes = [*(i for i in range(len(size)) if i not in box.axes), *box.axes]
    update = hlo.reshape(hlo.transpose(value, axes), box.sizes)
    written = hlo.dynamic_update_slice(_spread(flat, box), update, _starts(start, box))
    whole = hlo.reshape(written, [box.numel + box.padding])
    return hlo.reshape(hlo.slice_axis(whole, 0, 0, box.numel), hlo.shape(base))


def _order(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    order = dense_order(tuple(size), tuple(stride))
    assert order is not None, f"a whole window is dense, not {size} with strides {stride}"
    return order


def _grid(base: Value, size: Sequence[int], stride: Sequence[int], mode: str) -> Grid:
    found = memory.grid(hlo.shape(base), size, stride, mode)
    assert found is not None, f"no grid has windows {size} with strides {stride}"
    return found


def _spread(flat: Value, box: Grid) -> Value:
    return hlo.reshape(hlo.pad(flat, 0, [0], [box.padding]) if box.padding else flat, box.dims)


def _starts(start: Value | None, box: Grid) -> list[Value]:
    return [hlo.reshape(hlo.slice_(start, [i], [i + 1]), []) for i in range(len(box.dims))]


def _from_box(cut: Value, box: Grid, size: Sequence[int]) -> Value:
    """A box's elements in the order of the window's axes, broadcast along those that repeat memory."""
    ordered = hlo.reshape(cut, [size[i] for i in box.axes])
    rank = range(len(box.axes))
    by_axis = sorted(rank, key=box.axes.__getitem__)
    return hlo.broadcast_in_dim(hlo.transpose(ordered, by_axis), size, sorted(box.axes))


def _without_repeats(value: Value, stride: Sequence[int]) -> Value:
    """What is written through an axis that repeats memory: its first element."""
    shape = hlo.shape(value)
    kept = [1 if not s else n for n, s in zip(shape, stride, strict=True)]
    return value if kept == shape else hlo.slice_(value, [0] * len(shape), kept)


def _places(start: Value | None, size: Sequence[int], stride: Sequence[int]) -> Value:
    """The position in memory of each element, without axes that repeat it."""
    kept = [1 if not s else n for n, s in zip(size, stride, strict=True)]
    kind = hlo.dtype(start)
    position = hlo.broadcast(hlo.reshape(start, []), kept)
    for at, (n, step) in enumerate(zip(kept, stride, strict=True)):
        if n > 1:
            counts = hlo.iota(kept, at, kind)
            position = stablehlo.add(position, stablehlo.multiply(counts, hlo.full_like(counts, step)))
    return position


def _gather(flat: Value, position: Value) -> Value:
    rank = hlo.rank(position)
    return hlo.gather(
        flat,
        position,
        offset_dims=[],
        collapsed=[0],
        start_index_map=[0],
        slice_sizes=[1],
        index_vector_dim=rank,
    )


def _scatter(flat: Value, position: Value, value: Value) -> Value:
    (written,) = hlo.scatter(
        [flat],
        position,
        [value],
        "second",
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
        index_vector_dim=hlo.rank(position),
    )
    return written
