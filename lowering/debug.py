"""What ``debug_checks`` adds to a program: beside each op a few numbers that say whether eager would have refused its
indices, or whether it made the first NaN or infinity. The host reads them after each call.

An op is told from its own operands: it made a NaN if it has one and none of its operands had; an infinity, if no
operand had either and none of its numbers is infinite (a mask filled with -inf is meant). Ops inside a loop's body or
a branch are not looked at, the loop or branch as a whole is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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

    def judge(self, least: int, greatest: int) -> None:
        lowest = -self.size if self.wraps else 0
        if least <= greatest and (least < lowest or greatest >= self.size):
            wrong = greatest if greatest >= self.size else least
            raise IndexOutOfRange(
                f"{self.op}: index {wrong} is out of bounds for axis {self.axis} with size {self.size} (indices from "
                f"{least} to {greatest}, allowed {lowest} to {self.size - 1})\n      at {self.where}"
            )


@dataclass(frozen=True)
class Finite:
    """Its two numbers say whether the op made a NaN, and an infinity."""

    op: str
    where: str
    result: str

    def judge(self, nan: int, infinite: int) -> None:
        if nan or infinite:
            raise NonFiniteResult(
                f"{self.op}: its result ({self.result}) has {'NaN' if nan else 'infinity'}, and none of its operands "
                f"had\n      at {self.where}"
            )


@dataclass(frozen=True)
class DebugReport:
    """The host's part: ``sites[i]`` judges row i of the table that the program computes."""

    sites: tuple[Bounds | Finite, ...]

    def __call__(self, table: torch.Tensor) -> None:
        for site, (first, second) in zip(self.sites, table.tolist(), strict=True):
            site.judge(first, second)


class DebugChecks:
    """Collects the checks of one program, in the order of its ops."""

    def __init__(self) -> None:
        self._sites: list[Bounds | Finite] = []
        self._rows: list[Value] = []
        self._known: dict[Value, tuple[Value, Value]] = {}

    def after(self, op: Any, line: SourceLine | None, args: Any, kwargs: Any, result: Any) -> None:
        """Add what there is to check of an op that was just lowered."""
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
        """The rows as one i64[n, 2], and who reads it."""
        if not self._rows:
            return None
        return hlo.concatenate(self._rows, 0), DebugReport(tuple(self._sites))

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
        cells = [hlo.reshape(hlo.convert(v, torch.int64), [1, 1]) for v in (first, second)]
        self._sites.append(site)
        self._rows.append(hlo.concatenate(cells, 1))

    def _non_finite(self, value: Value) -> tuple[Value, Value]:
        """(has NaN, has an infinity), each bool[]."""
        known = self._known.get(value)
        if known is None:
            parts = [value]
            if hlo.dtype(value).is_complex:
                parts = [stablehlo.real(value), stablehlo.imag(value)]
            every = range(hlo.rank(value))
            nans = [hlo.is_nan(p) for p in parts]
            infinite = [
                stablehlo.not_(stablehlo.or_(stablehlo.is_finite(p), n)) for p, n in zip(parts, nans, strict=True)
            ]
            known = self._known[value] = (
                _any([hlo.reduce(n, every, "or") for n in nans]),
                _any([hlo.reduce(i, every, "or") for i in infinite]),
            )
        return known


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
