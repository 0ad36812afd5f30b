"""Looking at many arguments at once: whether they are what a plan expects is asked in one call of torch's own guards,
which takes 50 ns a tensor; one at a time takes 2 µs.

The buffers of arguments that stay what they are from call to call (parameters) are kept, and given up at the moment one
of their cells is written, seen otherwise or dies: such a call only makes sure that each tensor still shows its storage.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch._C._dynamo.guards import TensorGuards

from tpu_compile.device.state import device
from tpu_compile.device.storage import Cell, Kept, Layout, rewrite, watch, watched

_MOST_KINDS = 8
"""How often a plan learns what its arguments look like: those that never look the same are looked at one by one."""
_OFTEN, _SELDOM = 3, 5
"""An argument that has changed so often is looked up at each call; changes so many calls apart do not count."""
_data_ptr = torch.Tensor.data_ptr


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the items at ``places`` out of a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[place] for place in places]


@dataclass(frozen=True, slots=True)
class Seen:
    """One call's arguments: the cells of those that are overwritten, the buffers of all, and whether no buffer is among
    them twice."""

    cells: list[Cell]
    buffers: list[Any]
    distinct: bool
    kept: Kept


class Glance:
    """The `tpu` arguments of a plan, seen together.

    Args:
        layouts: by the position of each `tpu` argument among all arguments, what its cell must be laid out as.
        written: positions of those that the program overwrites, and perhaps takes over.
        donated: positions of those whose buffers do not survive a call.
        guarded: positions of those whose sizes, strides and dtype the caller answers for (parameters: Dynamo's guards).
    """

    def __init__(
        self, layouts: Mapping[int, Layout], written: Sequence[int], donated: Sequence[int], guarded: Collection[int]
    ) -> None:
        place_of = {position: place for place, position in enumerate(layouts)}
        self._layouts, self._places, self._guarded = layouts, place_of, guarded
        self._written, self._written_places = written, [place_of[position] for position in written]
        self._pick = picker(list(layouts))
        self._all: Any = None
        self._learned = self._calls = 0
        self._changes: Counter[int] = Counter()
        self._divide([position for position in donated if position not in written])

    def _divide(self, moving: list[int]) -> None:
        """Arguments at the positions ``moving`` are looked up at each call, the buffers of all others are kept."""
        moves = frozenset(moving)
        self._moving, self._steady = moving, [p for p in self._layouts if p not in moves]
        self._moving_layouts = [self._layouts[p] for p in moving]
        self._written_moving = [(index, p) for index, p in enumerate(self._written) if p in moves]
        self._pick_moving, self._pick_steady = picker(self._moving), picker(self._steady)
        self._pick_checked = picker([p for p in self._layouts if p in moves or p not in self._guarded])
        self._forget()

    def _forget(self) -> None:
        self._pointers: list[int] = []
        self._written_cells: list[ref[Cell]] = []
        self._checked: Any = None
        self._kept = Kept()

    def look(self, arguments: Sequence[Any]) -> Seen | None:
        """The arguments of a call, if the plan takes each as it is. None: look at them one by one."""
        if self._all is None:
            return None
        self._calls += 1
        pointers = list(map(_data_ptr, self._pick_steady(arguments)))
        buffers = self._kept.buffers.copy()
        if pointers != self._pointers or not buffers:
            buffers = self._keep(arguments)
            if not buffers:
                return None
        elif not self._checked.check(*self._pick_checked(arguments)):
            return None
        if self._moving and not self._look_up(arguments, buffers):
            return None
        cells: list[Any] = [cell() for cell in self._written_cells]
        for index, position in self._written_moving:
            cells[index] = arguments[position].untyped_storage()._tpu_cell
        kept = self._kept
        return Seen(cells, buffers, kept.distinct and not self._moving, kept)

    def again(self) -> Seen | None:
        """The arguments of the last call, which nobody can have replaced. None: look at them."""
        kept = self._kept
        buffers = kept.buffers.copy()
        if not buffers or self._moving:
            return None
        self._calls += 1
        cells: list[Any] = [cell() for cell in self._written_cells]
        return Seen(cells, buffers, kept.distinct, kept)

    def _look_up(self, arguments: Sequence[Any], buffers: list[Any]) -> bool:
        """Fill in the buffers of the moving arguments, if they are as the plan expects."""
        cells = [t.untyped_storage()._tpu_cell for t in self._pick_moving(arguments)]
        if [cell.layout for cell in cells] != self._moving_layouts:
            return False
        for position, cell in zip(self._moving, cells, strict=True):
            buffer = buffers[self._places[position]] = cell.buffer
            if type(buffer) is not device.array:
                return False
        return True

    def write(self, seen: Seen, buffers: Sequence[Any]) -> None:
        """Give the cells that the call has overwritten their new buffers, in the order of ``written``."""
        kept = seen.kept
        rewrite(seen.cells, buffers, kept)
        if not kept.buffers:
            return
        try:
            for place, buffer in zip(self._written_places, buffers, strict=True):
                kept.buffers[place] = buffer
        except IndexError:  # emptied just now, by another thread
            return

    def _keep(self, arguments: Sequence[Any]) -> list[Any]:
        """Keep the buffers of the steady arguments. Empty: an argument is not as the plan expects it."""
        if not self._all.check(*self._pick(arguments)):
            return []
        if self._pointers:
            self._note(self._unsteady(arguments))
        self._checked = _guards(self._pick_checked(arguments))
        steady = self._pick_steady(arguments)
        cells = dict(zip(self._steady, [t.untyped_storage()._tpu_cell for t in steady], strict=True))
        for cell in cells.values():
            watch(cell, self._kept)
        kept = [cells[p].buffer if p in cells else None for p in self._layouts]
        for position, cell in cells.items():
            if cell.layout is not self._layouts[position] or type(cell.buffer) is not device.array:
                return []
        self._kept.distinct = len(set(map(id, kept))) == len(kept)
        self._written_cells = [ref(arguments[p].untyped_storage()._tpu_cell) for p in self._written]
        buffers = kept.copy()
        self._kept.buffers, self._pointers = kept, list(map(_data_ptr, steady))
        if not all(watched(cell, self._kept) for cell in cells.values()):  # written meanwhile, by another thread
            kept.clear()
        return buffers

    def _note(self, changed: Sequence[int]) -> None:
        """Take the steady arguments that have changed three times, with few calls between, for moving ones."""
        if self._calls >= _SELDOM:
            self._changes.clear()
        else:
            self._changes.update(changed)
        self._calls = 0
        if often := [position for position in changed if self._changes[position] >= _OFTEN]:
            self._divide([*self._moving, *often])

    def _unsteady(self, arguments: Sequence[Any]) -> list[int]:
        """Positions of arguments on another storage than at the last call, or written since."""
        seen = zip(self._steady, self._pick_steady(arguments), self._pointers, strict=True)
        return [
            position
            for position, t, pointer in seen
            if t.data_ptr() != pointer or not watched(t.untyped_storage()._tpu_cell, self._kept)
        ]

    def learn(self, arguments: Sequence[Any]) -> None:
        """Tensors that look like these (sizes, strides, dtype, class, ``requires_grad``) fit."""
        if self._learned < _MOST_KINDS:
            self._learned += 1
            self._all = _guards(self._pick(arguments))
            self._forget()


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards: Any = TensorGuards  # its stub says less than it takes
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
