"""Windows on a flat memory: how a tensor with strides is cut out of the buffer that holds it, and written back.

The eager device reads and writes views with two ops of our own. Where the window begins is an argument of the program,
so that ``x[i]`` is one program for every ``i``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_compile.lowering.program import row_major

WHOLE, BOX, FLAT, MERGED, PLACES = "whole", "box", "flat", "merged", "places"
"""How a window lies in its memory. ``whole``: all of it, in some order of the axes. ``box``: a box of the buffer, whose
axes the window's strides may cut further. ``flat``: a box of the memory seen as a grid made of the window's strides
alone. ``merged``: the same, once axes that follow each other are one. ``places``: anything else, element by element."""

_library = torch.library.Library("tpu_compile", "FRAGMENT")
_library.define("read_window(Tensor base, Tensor? start, SymInt[] size, SymInt[] stride, str mode) -> Tensor")
_library.define(
    "write_window(Tensor base, Tensor value, Tensor? start, SymInt[] size, SymInt[] stride, str mode) -> Tensor"
)
read_window = torch.ops.tpu_compile.read_window.default
write_window = torch.ops.tpu_compile.write_window.default


@torch.library.register_fake("tpu_compile::read_window", lib=_library)  # type: ignore[untyped-decorator]
def _fake_read(base: Any, start: Any, size: Any, stride: Any, mode: str) -> Any:
    return torch.empty_strided(size, stride, dtype=base.dtype, device=base.device)


@torch.library.register_fake("tpu_compile::write_window", lib=_library)  # type: ignore[untyped-decorator]
def _fake_write(base: Any, value: Any, start: Any, size: Any, stride: Any, mode: str) -> Any:
    return torch.empty_like(base)


@dataclass(frozen=True)
class Grid:
    """A flat memory of ``numel`` elements seen as ``dims`` (padded at the end to fill them). A window takes
    ``sizes`` of each; its own axes, in the grid's order, are ``axes``."""

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    numel: int

    @property
    def padding(self) -> int:
        return math.prod(self.dims) - self.numel

    def start(self, offset: int) -> tuple[int, ...] | None:
        """Where in the grid a window at ``offset`` begins; None if a row of it would run over an edge."""
        position = []
        for dim in reversed(self.dims):
            position.append(offset % dim)
            offset //= dim
        position.reverse()
        fits = all(p + n <= d for p, n, d in zip(position, self.sizes, self.dims, strict=True))
        return tuple(position) if fits and not offset else None


def grid(dims: Sequence[int], size: Sequence[int], stride: Sequence[int], mode: str) -> Grid | None:
    """The grid that a window's strides make of a row-major buffer of ``dims``; None if strides do not divide each other
    or rows overlap. ``mode`` is ``box``, ``flat`` or ``merged``."""
    numel = math.prod(dims)
    axes = sorted((i for i, n in enumerate(size) if n != 1 and stride[i]), key=lambda i: -stride[i])
    rows = [(size[i], stride[i]) for i in axes]
    if mode == MERGED:
        rows = _merged(rows)
    if mode == BOX:
        taken = {step for _, step in rows}
        own = zip(dims, row_major(tuple(dims)), strict=True)
        rows = sorted([*rows, *((1, step) for n, step in own if n != 1 and step not in taken)], key=lambda row: -row[1])
    for (_, outer), (n, step) in itertools.pairwise(rows):
        if outer % step or n * step > outer:
            return None
    if not rows:
        return Grid((numel,), (1,), (), numel)
    inner = [a // b for (_, a), (_, b) in itertools.pairwise(rows)]
    sizes = (*(n for n, _ in rows), 1)
    return Grid((-(-numel // rows[0][1]), *inner, rows[-1][1]), sizes, tuple(axes), numel)


def _merged(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Axes (size, stride) that follow each other in memory as one."""
    merged: list[tuple[int, int]] = []
    for n, step in rows:
        if merged and merged[-1][1] == n * step:
            merged[-1] = (merged[-1][0] * n, step)
        else:
            merged.append((n, step))
    return merged
