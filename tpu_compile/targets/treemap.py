"""Squarified treemaps: sizes as rectangles whose areas they are, none much longer than wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """A rectangle in a unit of ``width`` × ``height``; ``index`` is the size's place in what was given."""

    index: int
    x: float
    y: float
    width: float
    height: float


def treemap(sizes: Sequence[float], width: float = 100.0, height: float = 100.0) -> list[Tile]:
    """Rectangles for sizes, the largest first, that fill ``width`` × ``height``. Sizes of nothing get none."""
    order = sorted((i for i, size in enumerate(sizes) if size > 0), key=lambda i: -sizes[i])
    total = sum(sizes[i] for i in order)
    tiles: list[Tile] = []
    x = y = 0.0
    areas = [(i, sizes[i] / total * width * height) for i in order]
    while areas:
        side = min(width, height)
        count = _row(areas, side)
        row, areas = areas[:count], areas[count:]
        thickness = sum(area for _, area in row) / side
        along = 0.0
        for index, area in row:
            length = area / thickness
            if width >= height:
                tiles.append(Tile(index, x, y + along, thickness, length))
            else:
                tiles.append(Tile(index, x + along, y, length, thickness))
            along += length
        if width >= height:
            x, width = x + thickness, width - thickness
        else:
            y, height = y + thickness, height - thickness
    return tiles


def _row(areas: Sequence[tuple[int, float]], side: float) -> int:
    """How many of the areas make the row of the least elongated rectangles along ``side``."""
    best, count = float("inf"), 1
    total = 0.0
    for taken, (_, area) in enumerate(areas, 1):
        total += area
        largest, smallest = areas[0][1], area
        worst = max(side * side * largest / total**2, total**2 / (side * side * smallest))
        if worst > best:
            break
        best, count = worst, taken
    return count
