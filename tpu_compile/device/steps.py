"""Ops that were noted down and have not run: what they run on, what they make, and what of that is wanted."""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

from tpu_compile.device import contents
from tpu_compile.device.calls import Call
from tpu_compile.device.fusing import Wire
from tpu_compile.device.programs import Plan
from tpu_compile.device.storage import Cell, HostBytes

Key = tuple[tuple[Plan, ...], tuple[Wire, ...], tuple[int, ...], tuple[tuple[int, int], ...]]
"""Plans, wires, the outputs that are wanted, and what of them takes an external's place: what ``fuse`` takes."""


class Deferred:
    """Contents that may not be computed yet: output ``number`` of the sequence that is being noted down, -1 once that
    was submitted: then ``over`` is held until it has run, and ``buffer`` is there.

    A sequence does not hold its outputs: one that no cell holds is not wanted. The defaults are the class's because
    there are many of them.
    """

    number = -1
    buffer: Any = None
    over: threading.Lock | None = None
    read = False
    """Whether its own sequence reads it."""


class Steps:
    """A sequence of plans. ``wires`` says where their inputs come from, one plan after another; ``externals`` are
    buffers from outside, Deferreds of earlier sequences, and host values. Outputs are numbered from plan to plan."""

    __slots__ = ("_known", "_outputs", "_overwrites", "externals", "plans", "wires")

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.wires: list[Wire] = []
        self.externals: list[Any] = []
        self._known: dict[int, int] = {}
        """The numbers of the externals by identity."""
        self._outputs: list[ref[Deferred]] = []
        self._overwrites: list[tuple[Wire, int]] = []
        """(what a cell held, the output that it holds since)."""

    # ---- noting down

    def note(self, plan: Plan, call: Call) -> list[Deferred]:
        """Add a step; returns its outputs. Cells that it writes hold theirs already."""
        cells, known = call.cells, self._known
        wires: list[Wire] = []
        for place, take in plan.recipe:
            source = cells[place].buffer if take is None else take(call)
            if source.__class__ is Deferred and source.number >= 0:
                source.read = True
                wires.append(~source.number)
            elif (number := known.get(id(source))) is not None:
                wires.append(number)
            else:
                if source is None or source.__class__ is HostBytes:
                    source = contents.contents(cells[place])
                wires.append(self._external(source))
        self.plans.append(plan)
        self.wires += wires
        outputs = self._new(plan.results)
        for cell, place in plan.writes:
            self._overwrite(cells[cell], outputs[place])
        return outputs

    def _external(self, source: Any) -> int:
        """The number of a new external. No host value is found again, or numbers that are equal by chance would make
        another program."""
        number = self._known[id(source)] = len(self.externals)
        self.externals.append(source)
        if source.__class__ is Deferred:
            self.settled(source)
        return number

    def settled(self, deferred: Deferred) -> None:
        """Know what the background has finished as its buffer too: its cell may hold that from now on."""
        number = self._known.get(id(deferred))
        if number is not None and deferred.buffer is not None:
            self._known[id(deferred.buffer)] = number

    def _new(self, count: int) -> list[Deferred]:
        outputs, begun = [], len(self._outputs)
        for number in range(begun, begun + count):
            deferred = Deferred()
            deferred.number = number
            outputs.append(deferred)
        self._outputs += map(ref, outputs)
        return outputs

    def _overwrite(self, cell: Cell, deferred: Deferred) -> None:
        before = cell.buffer
        inside = before.__class__ is Deferred and before.number >= 0
        origin = ~before.number if inside else self._known.get(id(before))
        if origin is not None:
            self._overwrites.append((origin, deferred.number))
        cell.buffer = deferred

    def reads(self, buffer: Any) -> bool:
        """Whether a step reads what a cell holds."""
        if buffer.__class__ is Deferred and buffer.number >= 0:
            return bool(buffer.read)
        return id(buffer) in self._known

    # ---- running

    def live(self) -> list[Deferred]:
        """The outputs that somebody wants, in order."""
        return [deferred for output in self._outputs if (deferred := output()) is not None]

    def key(self, live: list[Deferred]) -> Key:
        """What tells it from others."""
        numbers = [deferred.number for deferred in live]
        return tuple(self.plans), tuple(self.wires), tuple(numbers), self._replaced(numbers)

    def _replaced(self, live: list[int]) -> tuple[tuple[int, int], ...]:
        """(external, place among the results) where a cell held a buffer when the sequence began, and holds a result
        at the end: its memory may be taken over."""
        origins: dict[int, int] = {}
        for before, after in self._overwrites:
            origin = before if before >= 0 else origins.get(~before)
            if origin is not None:
                origins[after] = origin
        return tuple([(origins[number], place) for place, number in enumerate(live) if number in origins])

    # ---- cutting

    def split(self, count: int) -> tuple[Steps, Steps]:
        """The first ``count`` steps, and the others, which find outside what they read of the first."""
        first, rest = Steps(), Steps()
        first.plans, rest.plans = self.plans[:count], self.plans[count:]
        inputs, made = sum(len(p.recipe) for p in first.plans), sum(p.results for p in first.plans)
        rest._outputs = self._outputs[made:]
        for deferred in rest.live():
            deferred.number -= made
        for wire in self.wires[inputs:]:
            rest.wires.append(wire + made if ~wire >= made else rest._place(self._source(wire)))
        for before, after in self._overwrites:
            origin = before + made if ~before >= made else rest._known.get(id(self._source(before)))
            if after >= made and origin is not None:
                rest._overwrites.append((origin, after - made))
        first.wires, first._outputs = self.wires[:inputs], self._outputs[:made]
        first.externals = self.externals[: max(first.wires, default=-1) + 1]
        first._overwrites = [pair for pair in self._overwrites if pair[1] < made]
        return first, rest

    def _source(self, wire: Wire) -> Any:
        """What is at the other end of a wire. An output that was not wanted is from now on, as long as it is held."""
        if wire >= 0:
            return self.externals[wire]
        deferred = self._outputs[~wire]()
        if deferred is None:
            deferred = Deferred()
            deferred.number = ~wire
            self._outputs[~wire] = ref(deferred)
        return deferred

    def _place(self, source: Any) -> int:
        number = self._known.get(id(source))
        return self._external(source) if number is None else number
