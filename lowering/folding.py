"""Products of operands that were permuted and reshaped to matrices (``torch.einsum``, ``torch.matmul``): contracted
where their axes stood, since undoing a merge of axes that do not lie together is a copy on a TPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.hlo import Value


@dataclass(frozen=True)
class Folded:
    """A value's axes as groups of axes, in order, of ``base`` reshaped to ``shape``, which has no axis of size 1."""

    base: Value
    shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def value(self) -> Value:
        """What to contract."""
        return hlo.reshape(self.base, self.shape)

    def sizes(self, axis: int) -> list[int]:
        """What the axis is the product of."""
        return [self.shape[i] for i in self.groups[axis]]

    def merged(self, axis: int) -> Folded | None:
        """The same with one axis in one piece, if its axes lie together."""
        group = self.groups[axis]
        if not group or list(group) != list(range(group[0], group[0] + len(group))):
            return None
        first, gone = group[0], len(group) - 1
        shape = (*self.shape[:first], math.prod(self.sizes(axis)), *self.shape[first + gone + 1 :])
        moved = [tuple(i if i <= first else i - gone for i in g) for g in self.groups]
        moved[axis] = (first,)
        return Folded(self.base, shape, tuple(moved))


def fold(x: Value) -> Folded:
    """What ``x`` was before it was permuted and its axes were merged."""
    return folds(x)[0]


def folds(x: Value) -> list[Folded]:
    """``x`` before each of the permutations and merges that made it, the earliest first; ``x`` itself is the last."""
    base, groups = x, [[i] for i in range(hlo.rank(x))]
    found = [_without_ones(base, groups)]
    while (step := _undo(base)) is not None:
        base, mapping = step
        groups = [[axis for i in group for axis in mapping[i]] for group in groups]
        found.append(_without_ones(base, groups))
    return found[::-1]


def _without_ones(base: Value, groups: list[list[int]]) -> Folded:
    shape = hlo.shape(base)
    kept = [i for i, size in enumerate(shape) if size != 1]
    place = {axis: i for i, axis in enumerate(kept)}
    squeezed = tuple(shape[i] for i in kept)
    return Folded(base, squeezed, tuple(tuple(place[i] for i in group if i in place) for group in groups))


def _undo(x: Value) -> tuple[Value, list[list[int]]] | None:
    """The operand of the permutation or merge that made ``x``, and the operand's axes behind each axis of ``x``."""
    if op := hlo.made_by(x, stablehlo.TransposeOp):
        return op.operand, [[int(i)] for i in op.permutation]
    if op := hlo.made_by(x, stablehlo.ReshapeOp):
        merged = _merged(hlo.shape(op.operand), hlo.shape(x))
        return None if merged is None else (op.operand, merged)
    return None


def _merged(before: Sequence[int], after: Sequence[int]) -> list[list[int]] | None:
    """The axes that each axis of a reshaped value is made of; None if one was split, or there are no elements."""
    if not math.prod(before):
        return None
    groups: list[list[int]] = []
    rest = [i for i, size in enumerate(before) if size != 1]
    for size in after:
        group: list[int] = []
        while size != math.prod(before[i] for i in group):
            if not rest:
                return None
            group.append(rest.pop(0))
            if size % math.prod(before[i] for i in group):
                return None
        groups.append(group)
    return groups


def batched_product(a: Value, b: Value, out: torch.dtype) -> Value:
    """[B, M, K] times [B, K, N], rounded once to ``out``, on the axes they were made of where both agree on them."""
    left, right = fold(a), fold(b)
    if not _worthwhile(left, right) or left.sizes(0) != right.sizes(0) or left.sizes(2) != right.sizes(1):
        return _dot(a, b, ((2,), (1,)), ((0,), (0,)), out)
    batch, contract = (left.groups[0], right.groups[0]), (left.groups[2], right.groups[1])
    result = _in_order(left, right, left.groups[1], right.groups[2], contract, batch, out)
    return hlo.reshape(result, [hlo.shape(a)[0], hlo.shape(a)[1], hlo.shape(b)[2]])


def unmerged_product(a: Value, b: Value, out: torch.dtype) -> Value:
    """[M, K] times [K, N], rounded once to ``out``; M and N are the axes they were made of, for a reshape to merge."""
    pair = _agreeing(folds(a), folds(b))
    if pair is None or not _worthwhile(*pair):
        return _dot(a, b, ((1,), (0,)), ((), ()), out)
    left, right = pair
    contract = (left.groups[1], right.groups[0])
    return _in_order(left, right, left.groups[0], right.groups[1], contract, ((), ()), out)


def _agreeing(lefts: Sequence[Folded], rights: Sequence[Folded]) -> tuple[Folded, Folded] | None:
    """The earliest forms of two matrices that agree on what K is made of, or on K in one piece."""
    pairs = list(itertools.product(lefts, rights))
    for left, right in pairs:
        if left.sizes(1) == right.sizes(0):
            return left, right
        whole = left.merged(1), right.merged(0)
        if whole[0] is not None and whole[1] is not None:
            return whole[0], whole[1]
    return None


def _in_order(
    left: Folded,
    right: Folded,
    rows: Sequence[int],
    columns: Sequence[int],
    contract: Any,
    batch: Any,
    out: torch.dtype,
) -> Value:
    """The product with its axes in the order of the groups: a dot has free axes in that of its operands. What has more
    of them goes first, as in ``jnp.einsum``.
    """
    operands = [(left.value, rows, contract[0], batch[0]), (right.value, columns, contract[1], batch[1])]
    flipped = len(columns) > len(rows)
    (a, first, *a_axes), (b, second, *b_axes) = operands[::-1] if flipped else operands
    result = _dot(a, b, (a_axes[0], b_axes[0]), (a_axes[1], b_axes[1]), out)
    start = len(batch[0])
    places = [start + sorted(first).index(axis) for axis in first]
    others = [start + len(first) + sorted(second).index(axis) for axis in second]
    return hlo.transpose(result, [*range(start), *(others + places if flipped else places + others)])


def _dot(a: Value, b: Value, contract: Any, batch: Any, out: torch.dtype) -> Value:
    """Rounded before its axes are put in order: XLA joins permutations, and none across a rounding."""
    return hlo.convert(hlo.dot_general(a, b, contract, batch, out=dtypes.opmath(hlo.dtype(a))), out)


def _worthwhile(*operands: Folded) -> bool:
    """Whether axes were merged: a permutation alone is no copy."""
    return any(len(group) > 1 for operand in operands for group in operand.groups)
