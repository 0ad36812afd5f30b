"""Which of equal elements a selection picks. torch's CPU kernels leave that to their algorithm: ``topk`` to
libstdc++'s nth_element, ``kthvalue`` to Sedgewick's quickselect. Both are reproduced here: positions among ties are
eager's.

All rows advance together. One turn of the loop is a whole partition: its swaps are known at once, because the i-th
element from the left that must not stay changes places with the i-th such element from the right, until they meet.

Values are [rows, n], ``order`` their former positions (i32), bounds i32[rows, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import hlo
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.ops.indexing import take_along
from tpu_compile.lowering.windows import running

Before = Callable[[Value, Value], Value]


def nth_element(values: Value, nth: int, before: Before) -> Value:
    """``std::nth_element``: the positions, permuted so that place ``nth`` holds the element of that rank.

    Where libstdc++ would give up on partitions after 2·log2(n) of them, the rest is ordered by position.
    """
    rows, n = hlo.shape(values)
    first, last = _bound(rows, 0), _bound(rows, n)
    turns = 2 * (n.bit_length() - 1)

    def wide(first: Value, last: Value) -> Value:
        return hlo.compare(stablehlo.subtract(last, first), _bound(rows, 3), "GT")

    def go_on(turn: Value, values: Value, order: Value, first: Value, last: Value) -> Value:
        more = hlo.compare(turn, hlo.scalar(turns, torch.int32), "LT")
        return stablehlo.and_(more, _any(wide(first, last)))

    def body(turn: Value, values: Value, order: Value, first: Value, last: Value) -> list[Value]:
        active = wide(first, last)
        ends = [_plus(first, 1), _middle(first, last), _plus(last, -1)]
        a, b, c = (take_along(values, end, 1) for end in ends)
        source = hlo.select(active, _median(ends, before(a, b), before(b, c), before(a, c)), first)
        values, order = _permuted(values, order, _swap(_places(values), first, source))
        pivot = take_along(values, first, 1)
        inside = stablehlo.and_(_within(values, _plus(first, 1), last), _wide(active, values))
        stops = _stops(
            stablehlo.and_(inside, stablehlo.not_(before(values, _wide(pivot, values)))),
            stablehlo.and_(inside, stablehlo.not_(before(_wide(pivot, values), values))),
        )
        values, order = _permuted(values, order, stops.swaps)
        cut = stablehlo.minimum(stops.left_at(stops.count), stops.right_at(_plus(stops.count, -1), missing=n))
        low = hlo.compare(cut, _bound(rows, nth), "LE")
        first = hlo.select(stablehlo.and_(active, low), cut, first)
        last = hlo.select(stablehlo.and_(active, stablehlo.not_(low)), cut, last)
        return [stablehlo.add(turn, hlo.scalar(1, torch.int32)), values, order, first, last]

    carries = [hlo.scalar(0, torch.int32), values, _places(values), first, last]
    _, values, order, first, last = hlo.while_(carries, go_on, body)
    return _insertion_sorted(values, order, first, last, before)


def quickselect(values: Value, k: int, before: Before) -> Value:
    """torch's ``kthvalue``: the position of the element of rank ``k``, [rows, 1]."""
    rows, _ = hlo.shape(values)

    def go_on(values: Value, order: Value, low: Value, high: Value) -> Value:
        return _any(hlo.compare(high, _plus(low, 1), "GT"))

    def body(values: Value, order: Value, low: Value, high: Value) -> list[Value]:
        active = hlo.compare(high, _plus(low, 1), "GT")
        values, order = _permuted(values, order, _median_to_low(values, low, high, active, before))
        pivot = _wide(take_along(values, low, 1), values)
        left = stablehlo.and_(_within(values, _plus(low, 2), _plus(high, 1)), stablehlo.not_(before(values, pivot)))
        right = stablehlo.and_(_within(values, _plus(low, 1), high), stablehlo.not_(before(pivot, values)))
        on = _wide(active, values)
        stops = _stops(stablehlo.and_(left, on), stablehlo.and_(right, on))
        values, order = _permuted(values, order, stops.swaps)
        met = hlo.compare(stops.left_at(stops.count), stops.right_at(stops.count), "EQ")
        final = stablehlo.add(stops.count, hlo.convert(met, torch.int32))  # an element may change places with itself
        before_it = _plus(stops.count, -1)
        i = stablehlo.minimum(stops.left_at(final), stops.right_at(before_it, missing=hlo.shape(values)[1]))
        j = stablehlo.maximum(stops.right_at(final), stops.left_at(before_it, missing=-1))
        values, order = _permuted(values, order, _swap(_places(values), low, hlo.select(active, j, low)))
        rank = _bound(rows, k)
        up = stablehlo.and_(active, hlo.compare(j, rank, "LE"))
        down = stablehlo.and_(active, hlo.compare(j, rank, "GE"))
        return [values, order, hlo.select(up, i, low), hlo.select(down, _plus(j, -1), high)]

    start, end = _bound(rows, 0), _bound(rows, hlo.shape(values)[1] - 1)
    values, order, low, high = hlo.while_([values, _places(values), start, end], go_on, body)
    pair = hlo.compare(high, _plus(low, 1), "EQ")
    wrong = before(take_along(values, high, 1), take_along(values, low, 1))
    swaps = _swap(_places(values), low, hlo.select(stablehlo.and_(pair, wrong), high, low))
    return hlo.slice_axis(_permuted(values, order, swaps)[1], 1, k, k + 1)


# ---- one partition


@dataclass(frozen=True)
class _Stops:
    """Where the two scans of a partition stop. ``left[r]`` and ``right[r]`` are the places of the r-th stops, in the
    order of the scans; the first ``count`` of them change places, which is the permutation ``swaps``."""

    left: Value
    right: Value
    count: Value
    swaps: Value

    def left_at(self, rank: Value, missing: int | None = None) -> Value:
        """The place of the left stop of that rank; ``missing`` for rank -1."""
        return _or_missing(self.left, rank, missing)

    def right_at(self, rank: Value, missing: int | None = None) -> Value:
        """The place of the right stop of that rank; ``missing`` for rank -1."""
        return _or_missing(self.right, rank, missing)


def _or_missing(places: Value, rank: Value, missing: int | None) -> Value:
    if missing is None:
        return take_along(places, rank, 1)
    none = hlo.compare(rank, hlo.full_like(rank, 0), "LT")
    return hlo.select(none, hlo.full_like(rank, missing), take_along(places, stablehlo.abs(rank), 1))


def _stops(left: Value, right: Value) -> _Stops:
    rows, n = hlo.shape(left)
    left_rank = _plus(running(hlo.convert(left, torch.int32), 1, "add"), -1)
    from_right = hlo.reverse(running(hlo.reverse(hlo.convert(right, torch.int32), [1]), 1, "add"), [1])
    right_rank = _plus(from_right, -1)
    lefts = _by_rank(left, left_rank, missing=n)
    rights = _by_rank(right, right_rank, missing=-1)
    crossed = hlo.convert(hlo.compare(lefts, rights, "LT"), torch.int32)
    count = hlo.reshape(hlo.reduce(crossed, [1], "add"), [rows, 1])
    swaps = hlo.iota([rows, n], 1)
    for stop, rank, partners in ((left, left_rank, rights), (right, right_rank, lefts)):
        moves = stablehlo.and_(stop, hlo.compare(rank, _wide(count, rank), "LT"))
        partner = take_along(partners, stablehlo.maximum(rank, hlo.full_like(rank, 0)), 1)
        swaps = hlo.select(moves, partner, swaps)
    return _Stops(lefts, rights, count, swaps)


def _by_rank(stop: Value, rank: Value, missing: int) -> Value:
    """The places of the stops in order of rank, [rows, n + 1]; ``missing`` beyond them."""
    rows, n = hlo.shape(stop)
    nowhere = hlo.full(missing, torch.int32, [rows, n + 1])
    target = hlo.select(stop, rank, hlo.full_like(rank, n + 1))
    return hlo.scatter(
        [nowhere],
        hlo.unsqueeze(target, 2),
        [hlo.iota([rows, n], 1)],
        "second",
        update_window_dims=[],
        inserted=[1],
        scatter_dims=[1],
        input_batching=[0],
        indices_batching=[0],
    )[0]


def _median(ends: list[Value], ab: Value, bc: Value, ac: Value) -> Value:
    """Which of three places holds the median, as libstdc++ decides it."""
    a, b, c = ends
    ordered = hlo.select(bc, b, hlo.select(ac, c, a))
    return hlo.select(ab, ordered, hlo.select(ac, a, hlo.select(bc, c, b)))


def _median_to_low(values: Value, low: Value, high: Value, active: Value, before: Before) -> Value:
    """Sedgewick's choice of a pivot as a permutation: the median of three goes to ``low``, the smaller beside it."""
    middle, beside = _middle(low, high), _plus(low, 1)
    held = [(place, take_along(values, place, 1)) for place in (low, middle, high)]
    for x, y in ((1, 2), (0, 2), (1, 0)):
        held[x], held[y] = _exchanged(before(held[y][1], held[x][1]), held[x], held[y])
    places = _places(values)
    moves = places
    for target, source in ((middle, beside), (high, held[2][0]), (low, held[0][0]), (beside, held[1][0])):
        moves = hlo.select(hlo.compare(places, _wide(target, places), "EQ"), _wide(source, places), moves)
    return hlo.select(_wide(active, places), moves, places)


_Held = tuple[Value, Value]


def _exchanged(wrong: Value, x: _Held, y: _Held) -> tuple[_Held, _Held]:
    first = hlo.select(wrong, y[0], x[0]), hlo.select(wrong, y[1], x[1])
    return first, (hlo.select(wrong, x[0], y[0]), hlo.select(wrong, x[1], y[1]))


def _insertion_sorted(values: Value, order: Value, first: Value, last: Value, before: Before) -> Value:
    """The order with the elements of [first, last) sorted stably and the others in place."""
    places = _places(values)
    block = hlo.select(_within(values, first, last), _wide(first, places), places)

    def less(block_a: Value, block_b: Value, a: Value, b: Value, *_: Value) -> Value:
        same = stablehlo.and_(hlo.compare(block_a, block_b, "EQ"), before(a, b))
        return stablehlo.or_(hlo.compare(block_a, block_b, "LT"), same)

    return hlo.sort([block, values, order], 1, less)[2]


# ---- rows


def _bound(rows: int, value: int) -> Value:
    return hlo.full(value, torch.int32, [rows, 1])


def _plus(x: Value, amount: int) -> Value:
    return stablehlo.add(x, hlo.full_like(x, amount)) if amount else x


def _middle(first: Value, last: Value) -> Value:
    half = stablehlo.divide(stablehlo.subtract(last, first), hlo.full_like(first, 2))
    return stablehlo.add(first, half)


def _places(values: Value) -> Value:
    return hlo.iota(hlo.shape(values), 1)


def _wide(x: Value, like: Value) -> Value:
    return hlo.broadcast(x, hlo.shape(like))


def _within(values: Value, first: Value, last: Value) -> Value:
    places = _places(values)
    from_first = hlo.compare(places, _wide(first, places), "GE")
    return stablehlo.and_(from_first, hlo.compare(places, _wide(last, places), "LT"))


def _swap(places: Value, a: Value, b: Value) -> Value:
    """The permutation that exchanges two places of each row."""
    at_a = hlo.compare(places, _wide(a, places), "EQ")
    at_b = hlo.compare(places, _wide(b, places), "EQ")
    return hlo.select(at_a, _wide(b, places), hlo.select(at_b, _wide(a, places), places))


def _permuted(values: Value, order: Value, source: Value) -> tuple[Value, Value]:
    return take_along(values, source, 1), take_along(order, source, 1)


def _any(x: Value) -> Value:
    return hlo.reduce(x, [0, 1], "or")
