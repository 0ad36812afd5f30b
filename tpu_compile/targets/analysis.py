"""One program on one chip: time, memory, and everything in it that costs more than it should."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tpu_compile.errors import OutOfMemory
from tpu_compile.runtime.executable import MemoryAnalysis
from tpu_compile.targets.chips import Chip, chip
from tpu_compile.targets.hlo import Module, parse
from tpu_compile.targets.products import Product
from tpu_compile.targets.schedule import Schedule, Step, schedule

_BAKED_IN = 1024
"""Bytes; smaller constants are nobody's concern."""


@dataclass(frozen=True)
class Fit:
    """Whether a program fits a chip's memory.

    Attributes:
        needed, available: bytes of HBM.
        exact: libtpu said both; else ``needed`` is what the program holds and ``available`` from the table of chips.
    """

    needed: int
    available: int
    exact: bool

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def spare(self) -> int:
        """Bytes left over; negative: missing."""
        return self.available - self.needed


def fit(memory: MemoryAnalysis, chip: Chip) -> Fit:
    """How a compiled program fits: libtpu would have refused it if it did not, and its statistics round up."""
    return Fit(min(memory.held, chip.usable_bytes), chip.usable_bytes, False)


def misfit(error: OutOfMemory) -> Fit:
    """How a program does not fit, from libtpu's refusal."""
    return Fit(error.needed, error.available, True)


@dataclass(frozen=True)
class Constant:
    """A constant inside the program."""

    what: str
    nbytes: int
    where: str


@dataclass(frozen=True)
class Analysis:
    """A compiled program, read."""

    target: str
    chip: Chip
    module: Module
    schedule: Schedule
    memory: MemoryAnalysis
    fit: Fit

    def top(self, count: int) -> list[Step]:
        """The steps that take longest."""
        return sorted(self.schedule.steps, key=lambda step: -step.seconds)[:count]

    def share(self, seconds: float) -> float:
        """Part of the whole time."""
        return seconds / self.schedule.seconds if self.schedule.seconds else 0.0

    @cached_property
    def layout_changes(self) -> list[Step]:
        """Copies and transposes between fusions, the longest first."""
        return _longest(step for step in self.schedule.steps if step.kind == "layout")

    @cached_property
    def wide_products(self) -> list[tuple[Step, Product]]:
        """Products of f32 that the matrix unit goes over more than once."""
        return self._products(lambda found: found.passes > 1)

    def wasteful_products(self, least: float = 0.1) -> list[tuple[Step, Product]]:
        """Products of which at least this share of the matrix unit's work is padding."""
        return self._products(lambda found: found.waste(self.chip.mxu) >= least)

    def _products(self, wanted: Callable[[Product], bool]) -> list[tuple[Step, Product]]:
        pairs = [(step, found) for step in self.schedule.steps for found in set(step.products) if wanted(found)]
        return sorted(pairs, key=lambda pair: -pair[0].seconds)

    @cached_property
    def constants(self) -> list[Constant]:
        """Constants of more than a kilobyte, the largest first."""
        found = {
            Constant(str(each.shape), each.shape.nbytes, each.where)
            for computation in self.module.computations.values()
            for each in computation.instructions
            if each.opcode == "constant" and each.shape.nbytes > _BAKED_IN
        }
        return sorted(found, key=lambda each: -each.nbytes)

    @cached_property
    def by_line(self) -> list[tuple[str, float]]:
        """(``file:line``, seconds), the line that takes longest first."""
        seconds: dict[str, float] = defaultdict(float)
        for step in self.schedule.steps:
            seconds[step.where] += step.seconds
        return sorted(seconds.items(), key=lambda pair: -pair[1])


def _longest(steps: Iterator[Step]) -> list[Step]:
    return sorted(steps, key=lambda step: -step.seconds)


def analyse(text: str, memory: MemoryAnalysis, target: str) -> Analysis:
    """Read what libtpu compiled for a slice such as ``v5e:2x2``.

    Raises:
        ConfigError: the table of chips lacks the generation.
    """
    device, module = chip(target), parse(text)
    return Analysis(target, device, module, schedule(module, device), memory, fit(memory, device))


def grouped(steps: Sequence[Step]) -> list[tuple[Step, int, float]]:
    """(one of them, how many, their seconds) for steps alike: the same work at the same line, once a layer, say."""
    groups: dict[tuple[str, str, str, str, int], list[Step]] = defaultdict(list)
    for step in steps:
        groups[step.kind, step.op, step.where, step.result, step.flops].append(step)
    rows = [(found[0], len(found), sum(step.seconds for step in found)) for found in groups.values()]
    return sorted(rows, key=lambda row: -row[2])
