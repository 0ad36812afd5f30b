"""Looking at many arguments at once: whether they are what a plan expects is asked in one call of torch's own guards,
which takes 50 ns a tensor; one at a time takes 2 µs.

The buffers of arguments that stay what they are from call to call (parameters) are kept, and given up at the moment one
of their cells is written, seen otherwise or dies: such a call only makes sure that each tensor still shows its storage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from tpu_compile.device.state import device
from tpu_compile.device.storage import Cell, Kept, Layout, watch, watched

_MOST_KINDS = 8
"""How often a plan learns what its arguments look like: those that never look the same are looked at one by one."""
_data_ptr = torch.Tensor.data_ptr


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the items at ``places`` out of a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[place] for place in places]


class Glance:
    """The `tpu` arguments of a plan, seen together.

    Args:
        layouts: by the position of each `tpu` argument among all arguments, what its cell must be laid out as.
        written: positions of those that the program overwrites.
        donated: positions of those whose buffers do not survive a call.
        guarded: positions of those whose sizes, strides and dtype the caller answers for (parameters: Dynamo's guards).
    """

    __slots__ = (
        *("_all", "_checked", "_guarded", "_kept", "_layouts", "_learned", "_moving", "_moving_layouts", "_pick"),
        *("_pick_checked", "_pick_moving", "_pick_steady", "_places", "_pointers", "_steady", "_written"),
    )

    def __init__(
        self, layouts: Mapping[int, Layout], written: Sequence[int], donated: Sequence[int], guarded: Collection[int]
    ) -> None:
        self._layouts, self._written, self._guarded = layouts, len(written), guarded
        self._pick = picker(list(layouts))
        self._all: Any = None
        self._learned = 0
        self._divide([*written, *(place for place in donated if place not in written)])

    def _divide(self, moving: list[int]) -> None:
        """Arguments at the positions ``moving`` are looked up at each call, the buffers of all others are kept."""
        moves, place_of = frozenset(moving), {position: place for place, position in enumerate(self._layouts)}
        self._moving, self._steady = moving, [p for p in self._layouts if p not in moves]
        self._places = [place_of[p] for p in moving]
        self._moving_layouts = [self._layouts[p] for p in moving]
        self._pick_moving, self._pick_steady = picker(self._moving), picker(self._steady)
        self._pick_checked = picker([p for p in self._layouts if p in moves or p not in self._guarded])
        self._forget()

    def _forget(self) -> None:
        self._pointers: list[int] = []
        self._checked: Any = None
        self._kept = Kept()

    def buffers(self, arguments: Sequence[Any]) -> tuple[list[Cell], list[Any]] | None:
        """The cells of those that are overwritten, and the buffers of all, in the order of ``layouts``, if the plan
        takes each as it is. None: look at them one by one."""
        if self._all is None:
            return None
        pointers = list(map(_data_ptr, self._pick_steady(arguments)))
        buffers = self._kept.buffers.copy()
        if pointers != self._pointers or not buffers:
            buffers = self._keep(arguments)
            if not buffers:
                return None
        elif not self._checked.check(*self._pick_checked(arguments)):
            return None
        cells = [t.untyped_storage()._tpu_cell for t in self._pick_moving(arguments)]
        if [cell.layout for cell in cells] != self._moving_layouts:
            return None
        for place, cell in zip(self._places, cells, strict=True):
            buffer = buffers[place] = cell.buffer
            if type(buffer) is not device.array:
                return None
        return cells[: self._written], buffers

    def _keep(self, arguments: Sequence[Any]) -> list[Any]:
        """Keep the buffers of the steady arguments. Those that are not what they were at the last call no longer count
        as steady. Empty: an argument is not as the plan expects it."""
        if not self._all.check(*self._pick(arguments)):
            return []
        if self._pointers:
            self._divide([*self._moving, *self._unsteady(arguments)])
        self._checked = _guards(self._pick_checked(arguments))
        steady = self._pick_steady(arguments)
        cells = dict(zip(self._steady, [t.untyped_storage()._tpu_cell for t in steady], strict=True))
        for cell in cells.values():
            watch(cell, self._kept)
        kept = [cells[p].buffer if p in cells else None for p in self._layouts]
        for position, cell in cells.items():
            if cell.layout is not self._layouts[position] or type(cell.buffer) is not device.array:
                return []
        buffers = kept.copy()
        self._kept.buffers, self._pointers = kept, list(map(_data_ptr, steady))
        if not all(watched(cell, self._kept) for cell in cells.values()):  # written meanwhile, by another thread
            kept.clear()
        return buffers

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
