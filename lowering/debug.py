"""What ``debug_checks`` adds to a program: beside each op a few numbers that say whether eager would have refused its
indices, or whether it made the first NaN or infinity. The host reads them after each call.

An op is told from its own operands: it made a NaN if it has one and none of its operands had; an infinity, if no
operand had either and none of its numbers is infinite (a mask filled with -inf is meant).

A finding is a row of three integers: the number of the site, or -1 for nothing found, and what the site has to tell.
Out of a loop's body or a branch comes one row, the first that found something: a loop carries it from turn to turn.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.errors import IndexOutOfRange, NonFiniteResult
from tpu_compile.lowering import hlo
from tpu_compile.lowering.context import SourceLine
from tpu_compile.lowering.hlo import Value

aten = torch.ops.aten


@dataclass(frozen=True)
class IndexUse:
    """An index operand: the axis of ``size`` it points into, and whether negative ones count from the end."""

    index: Value
    axis: int
    size: int
    wraps: bool


def _axes(x: Value, indices: Sequence[Value | None], *_: Any) -> Iterator[IndexUse]:
    """index and index_put. A mask has no bounds, but takes as many axes as it has."""
    sizes, at = hlo.shape(x), 0
    for index in indices:
        mask = index is not None and hlo.dtype(index) in (torch.bool, torch.uint8)
        if index is not None and not mask:
            yield IndexUse(index, at, sizes[at], True)
        at += hlo.rank(index) if mask else 1


def _along(x: Value, dim: int, index: Value, *_: Any) -> Iterator[IndexUse]:
    """gather, the scatters, index_select."""
    rank = max(hlo.rank(x), 1)
    yield IndexUse(index, dim % rank, [*hlo.shape(x), 1][dim % rank], False)


def _rows(weight: Value, indices: Value, *_: Any) -> Iterator[IndexUse]:
    yield IndexUse(indices, 0, hlo.shape(weight)[0], False)


def _flat(x: Value, index: Value, *_: Any) -> Iterator[IndexUse]:
    yield IndexUse(index, 0, hlo.numel(x), True)


INDEXING: dict[Any, Callable[..., Iterator[IndexUse]]] = {
    **dict.fromkeys((aten.index.Tensor, aten.index_put.default), _axes),
    **dict.fromkeys((aten._unsafe_index.Tensor, aten._unsafe_index_put.default), _axes),
    **dict.fromkeys((aten.gather.default, aten.index_select.default, aten.index_reduce.default), _along),
    **dict.fromkeys((aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce), _along),
    **dict.fromkeys((aten.scatter_add.default, aten.scatter_reduce.two), _along),
    **dict.fromkeys((aten.embedding.default, aten._embedding_bag.default), _rows),
    aten._embedding_bag_forward_only.default: _rows,
    **dict.fromkeys((aten.take.default, aten.put.default), _flat),
}
"""Ops that clamp an index or drop a write where eager raises."""


@dataclass(frozen=True)
class Bounds:
    """Its two numbers are the least and the greatest index; of an empty index the least is the greater."""

    op: str
    where: str
    axis: int
    size: int
    wraps: bool

    @property
    def lowest(self) -> int:
        """The least index allowed."""
        return -self.size if self.wraps else 0

    def broken(self, least: Value, greatest: Value) -> Value:
        """Whether the program found something, from its two i64[]."""
        below = hlo.compare(least, hlo.full_like(least, self.lowest), "LT")
        above = hlo.compare(greatest, hlo.full_like(greatest, self.size), "GE")
        return stablehlo.and_(hlo.compare(least, greatest, "LE"), stablehlo.or_(below, above))

    def error(self, least: int, greatest: int) -> IndexOutOfRange:
        """What to raise then."""
        wrong = greatest if greatest >= self.size else least
        return IndexOutOfRange(
            f"{self.op}: index {wrong} is out of bounds for axis {self.axis} with size {self.size} (indices from "
            f"{least} to {greatest}, allowed {self.lowest} to {self.size - 1})\n      at {self.where}"
        )


@dataclass(frozen=True)
class Finite:
    """Its two numbers say whether the op made a NaN, and an infinity."""

    op: str
    where: str
    result: str

    def broken(self, nan: Value, infinite: Value) -> Value:
        """Whether the program found something, from its two i64[]."""
        return hlo.convert(stablehlo.or_(nan, infinite), torch.bool)

    def error(self, nan: int, infinite: int) -> NonFiniteResult:
        """What to raise then."""
        return NonFiniteResult(
            f"{self.op}: its result ({self.result}) has {'NaN' if nan else 'infinity'}, and none of its operands "
            f"had\n      at {self.where}"
        )


@dataclass(frozen=True)
class DebugReport:
    """The host's part: raises for the first row of the program's table that found something."""

    sites: tuple[Bounds | Finite, ...]

    def __call__(self, table: torch.Tensor) -> None:
        for site, first, second in table.tolist():
            if site >= 0:
                raise self.sites[site].error(first, second)


@dataclass
class _Scope:
    """The ops of one block, in order: rows i64[1, 3] of what they found, and what is known of values seen in it."""

    block: Any
    rows: list[Value] = field(default_factory=list)
    known: ChainMap[Value, tuple[Value, Value]] = field(default_factory=ChainMap)

    def first(self, before: Value) -> Value:
        """``before`` if it found something, otherwise the first row that did; i64[1, 3]."""
        table = hlo.concatenate([before, *self.rows], 0)
        found = hlo.slice_axis(table, 1, 0, 1)
        places = hlo.iota(hlo.shape(found), 0)
        missed = hlo.compare(found, hlo.full_like(found, 0), "LT")
        last = hlo.full_like(places, len(self.rows))
        place = hlo.reduce(hlo.select(missed, last, places), (0, 1), "minimum")
        return hlo.dynamic_slice(table, [place, hlo.full_like(place, 0)], [1, 3])


class DebugChecks:
    """Collects the checks of one program, in the order of its ops."""

    def __init__(self) -> None:
        self._sites: list[Bounds | Finite] = []
        self._scopes: list[_Scope] = []

    def after(self, op: Any, line: SourceLine | None, args: Any, kwargs: Any, result: Any) -> None:
        """Add what there is to check of an op that was just lowered."""
        if ir.InsertionPoint.current.block != self._here().block:
            return  # in a region that its rule made by itself
        where = str(line or "an op with no source line")
        for use in INDEXING[op](*args, *kwargs.values()) if op in INDEXING else ():
            self._add(Bounds(str(op), where, use.axis, use.size, use.wraps), *_range(use.index))
        leaves = list(_leaves((args, kwargs)))
        values = [v for v in leaves if hlo.is_value(v)]
        if not values:
            return  # it makes its own from nothing: full(-inf)
        operands = [self._non_finite(v) for v in values if _floating(v)]
        numbers = [v for v in leaves if isinstance(v, float)]
        for value in _leaves(result):
            if hlo.is_value(value) and _floating(value) and value not in values:
                self._made(str(op), where, value, operands, numbers)

    def table(self) -> tuple[Value, DebugReport] | None:
        """The rows as one i64[n, 3], and who reads it."""
        rows = self._scopes[0].rows if self._scopes else []
        return (hlo.concatenate(rows, 0), DebugReport(tuple(self._sites))) if rows else None

    # ---- regions

    def loop(self, carries: Sequence[Value], condition: Callable[..., Value], body: Callable[..., Any]) -> list[Value]:
        """``hlo.while_``, and what its ops found. The condition's own are looked at in the body, before it, and after
        the last turn: out of a condition comes nothing but whether to go on."""

        def checked(*state: Value) -> list[Value]:
            with self._scope() as scope:
                condition(*state[:-1])
                new = body(*state[:-1])
                return [*new, scope.first(state[-1])]

        def go_on(*state: Value) -> Value:
            with self._scope():
                return condition(*state[:-1])

        here = self._here()
        *results, found = hlo.while_([*carries, _nothing()], go_on, checked)
        here.rows.append(found)
        condition(*results)
        return results

    def case(self, index: Value, branches: Sequence[Callable[[], Any]], types: Sequence[ir.Type]) -> list[Value]:
        """``hlo.case``, and what the ops of its branch found."""

        def checked(branch: Callable[[], Any]) -> list[Value]:
            with self._scope() as scope:
                results = branch()
                return [*results, scope.first(_nothing())]

        here = self._here()
        watched = [lambda b=branch: checked(b) for branch in branches]
        *results, found = hlo.case(index, watched, [*types, hlo.tensor_type((1, 3), torch.int64)])
        here.rows.append(found)
        return results

    def _here(self) -> _Scope:
        if not self._scopes:
            self._scopes.append(_Scope(ir.InsertionPoint.current.block))
        return self._scopes[-1]

    @contextmanager
    def _scope(self) -> Iterator[_Scope]:
        """Of the region where we stand: what is known outside holds inside, and not the other way round."""
        self._scopes.append(_Scope(ir.InsertionPoint.current.block, known=self._here().known.new_child()))
        try:
            yield self._scopes[-1]
        finally:
            self._scopes.pop()

    def _made(
        self, op: str, where: str, value: Value, operands: Sequence[tuple[Value, Value]], numbers: Sequence[float]
    ) -> None:
        nan, infinite = self._non_finite(value)
        had_nan, had_infinity = (_any([pair[i] for pair in operands]) for i in (0, 1))
        given = hlo.scalar(any(math.isnan(n) for n in numbers), torch.bool)
        meant = hlo.scalar(any(not math.isfinite(n) for n in numbers), torch.bool)
        new_nan = stablehlo.and_(nan, stablehlo.not_(stablehlo.or_(had_nan, given)))
        had = stablehlo.or_(stablehlo.or_(had_nan, had_infinity), meant)
        new_infinity = stablehlo.and_(infinite, stablehlo.not_(had))
        self._add(Finite(op, where, str(value.type)), new_nan, new_infinity)

    def _add(self, site: Bounds | Finite, first: Value, second: Value) -> None:
        first, second = hlo.convert(first, torch.int64), hlo.convert(second, torch.int64)
        number = hlo.scalar(len(self._sites), torch.int64)
        found = hlo.select(site.broken(first, second), number, hlo.full_like(number, -1))
        self._sites.append(site)
        self._scopes[-1].rows.append(hlo.concatenate([hlo.reshape(v, [1, 1]) for v in (found, first, second)], 1))

    def _non_finite(self, value: Value) -> tuple[Value, Value]:
        """(has NaN, has an infinity), each bool[]."""
        memory = self._scopes[-1].known
        known = memory.get(value)
        if known is None:
            parts = [value]
            if hlo.dtype(value).is_complex:
                parts = [stablehlo.real(value), stablehlo.imag(value)]
            every = range(hlo.rank(value))
            nans = [hlo.is_nan(p) for p in parts]
            infinite = [
                stablehlo.not_(stablehlo.or_(stablehlo.is_finite(p), n)) for p, n in zip(parts, nans, strict=True)
            ]
            known = memory[value] = (
                _any([hlo.reduce(n, every, "or") for n in nans]),
                _any([hlo.reduce(i, every, "or") for i in infinite]),
            )
        return known


def _nothing() -> Value:
    """A row that found nothing."""
    return hlo.full(-1, torch.int64, (1, 3))


def _range(index: Value) -> tuple[Value, Value]:
    wide, every = hlo.convert(index, torch.int64), range(hlo.rank(index))
    return hlo.reduce(wide, every, "minimum"), hlo.reduce(wide, every, "maximum")


def _any(flags: Sequence[Value]) -> Value:
    result = hlo.scalar(False, torch.bool)
    for flag in flags:
        result = stablehlo.or_(result, flag)
    return result


def _floating(value: Value) -> bool:
    kind = hlo.dtype(value)
    return kind.is_floating_point or kind.is_complex


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    else:
        yield tree
