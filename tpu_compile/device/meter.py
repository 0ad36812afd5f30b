"""How much the device's storages hold: counted as they come and go."""

from __future__ import annotations


class Meter:
    """Bytes and number of the living cells, the most bytes there ever were, and how many cells were made."""

    __slots__ = ("bytes", "cells", "made", "peak")

    def __init__(self) -> None:
        self.bytes = self.cells = self.peak = self.made = 0


meter = Meter()
