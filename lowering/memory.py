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

WHOLE, BOX, MERGED, PLACES = "whole", "box", "merged", "places"
"""How a window lies in its memory. ``whole``: all of it, in some order of the axes. ``box``: a box of the memory seen
as a grid made of the window's strides. ``merged``: a box once axes that follow each other are one. ``places``:
anything else, element by element."""

_library = torch.library.Library("tpu_compile", "FRAGMENT")
_library.define("read_window(Tensor base, Tensor? start, SymInt[] size, SymInt[] stride, str mode) -> Tensor")
_library.define(
    "write_window(Tensor base, Tensor value, Tensor? start, SymInt[] size, SymInt[] stride, str mode) -> Tensor"
)
read_window = torch.ops.tpu_compile.read_window.default
write_window = torch.ops.tpu_compile.write_window.default


@torch.library.register_fake("tpu_compile::read_window", lib=_library)
def _fake_read(base: Any, start: Any, size: Any, stride: Any, mode: str) -> Any:
    return torch.empty_strided(size, stride, dtype=base.dtype, device=base.device)


@torch.library.register_fake("tpu_compile::write_window", lib=_library)
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


def grid(numel: int, size: Sequence[int], stride: Sequence[int], merge: bool = False) -> Grid | None:
    """The grid that the strides of a window make of a memory; None if they do not divide each other or overlap."""
    axes = sorted((i for i, n in enumerate(size) if n != 1 and stride[i]), key=lambda i: -stride[i])
    counts, steps = [size[i] for i in axes], [stride[i] for i in axes]
    if merge:
        counts, steps = _merged(counts, steps)
    for (n, step), outer in zip(zip(counts[1:], steps[1:], strict=True), steps, strict=False):
        if outer % step or n * step > outer:
            return None
    if not steps:
        return Grid((numel,), (1,), (), numel)
    inner = [a // b for a, b in itertools.pairwise(steps)]
    return Grid((-(-numel // steps[0]), *inner, steps[-1]), (*counts, 1), tuple(axes), numel)


def _merged(counts: list[int], steps: list[int]) -> tuple[list[int], list[int]]:
    """Axes that follow each other in memory as one."""
    merged: list[tuple[int, int]] = []
    for n, step in zip(counts, steps, strict=True):
        if merged and merged[-1][1] == n * step:
            merged[-1] = (merged[-1][0] * n, step)
        else:
            merged.append((n, step))
    return [n for n, _ in merged], [step for _, step in merged]
