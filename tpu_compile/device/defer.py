"""The ``defer`` mode: ops are noted down, and run as one program when something is read.

A cell's new contents are a Deferred until then. What is noted down is cut where somebody reads (the host, a compiled
call, an op without a rule), or, when a loop reads nothing, at the loop's own period: sequences that repeat are one
executable.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_compile.compiler import lower_graph, options_in_force, runtime
from tpu_compile.device.calls import Call
from tpu_compile.device.fusing import Fused, Wire, fuse
from tpu_compile.device.programs import Plan, output_order, taker
from tpu_compile.device.schemas import Schema
from tpu_compile.device.state import device
from tpu_compile.device.storage import Cell
from tpu_compile.stats import counters

MOST_OPS = 768
"""Ops noted down before a period is looked for, and everything is run if there is none."""
_LEAST_PERIOD = 16


class Deferred:
    """Contents that no program has computed yet: output ``place`` of the op at ``step``, counted from the start."""

    __slots__ = ("__weakref__", "cell", "place", "step")

    def __init__(self, step: int, place: int) -> None:
        self.step, self.place = step, place
        self.cell: weakref.ref[Cell] | None = None

    def wanted(self) -> Cell | None:
        """The cell that still holds it, if there is one."""
        cell = self.cell() if self.cell is not None else None
        return cell if cell is not None and cell.buffer is self else None


@dataclass
class Step:
    """One op: its plan, where its inputs come from (a Deferred, or a buffer), what it makes, and what it overwrites."""

    plan: Plan
    inputs: list[Any]
    outputs: list[Deferred]
    overwrites: list[tuple[Any, Deferred]]


@dataclass(frozen=True)
class Compiled:
    """A fused sequence, ready to run."""

    fused: Fused
    execute: Any
    order: list[int] | None
    constants: tuple[Any, ...]


class Recorder:
    """What was asked for and has not run. ``first`` counts the steps that ran before."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.first = 0
        self._seed: torch.Tensor | None = None
        self._draws = 0
        self._compiled: dict[Any, Compiled] = {}
        self._period: tuple[int, ...] = ()

    # ---- noting down

    def run(self, plan: Plan, call: Call, schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Note one call down; returns what the op returns, on cells that are not computed yet."""
        if plan.program.checks or call.generator is not None:
            return self._at_once(plan, call, schema, args, kwargs)
        if plan.traced.draws:
            self._draw(plan.traced.draws)
        inputs = [self._input(plan.traced.sources[p], call) for p in plan.program.arguments]
        step = self.first + len(self.steps)
        outputs = [Deferred(step, place) for place in range(plan.traced.new + len(plan.writes))]
        overwrites = []
        for cell, place in plan.writes:
            target = call.cells[cell]
            overwrites.append((target.buffer, outputs[place]))
            target.buffer, outputs[place].cell = outputs[place], weakref.ref(target)
        result = plan.build(outputs, schema, args, kwargs)
        _hold(result)
        self.steps.append(Step(plan, inputs, outputs, overwrites))
        self._cut()
        return result

    def _at_once(self, plan: Plan, call: Call, schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What must look at its results, or draws from somebody else's generator, is not deferred."""
        self.flush()
        return plan.execute(call, schema, args, kwargs)

    def _input(self, source: Any, call: Call) -> Any:
        if getattr(source, "kind", None) == "cell":
            buffer = call.cells[source.place].buffer
            if type(buffer) is Deferred:
                return buffer
        return taker(source)(call)

    def _draw(self, count: int) -> None:
        """One seed serves a whole sequence as long as nobody else draws or seeds in between."""
        generator = device.generator
        if self._draws and not generator.follows(self._seed, self._draws):
            self.flush()
        seed = generator.draw(count)
        if not self._draws:
            self._seed = seed
        self._draws += count

    # ---- cutting

    def _cut(self) -> None:
        """Run a loop's period as soon as it is complete; look for one when much has gathered."""
        steps, period = self.steps, self._period
        if period and len(steps) == len(period) and all(s.plan.serial == p for s, p in zip(steps, period, strict=True)):
            self.flush()
        elif len(steps) >= MOST_OPS:
            before, self._period = _period([s.plan.serial for s in steps])
            size = len(self._period)
            if not size:
                self.flush()
                return
            self._run(before)
            while len(self.steps) >= size and tuple(s.plan.serial for s in self.steps[:size]) == self._period:
                self._run(size)

    # ---- running

    def flush(self) -> None:
        """Run everything that was noted down."""
        self._run(len(self.steps))

    def _run(self, count: int) -> None:
        """Run the first ``count`` steps as one program."""
        if not count:
            return
        steps, self.steps = self.steps[:count], self.steps[count:]
        start, self.first = self.first, self.first + count
        later = {id(i): i for s in self.steps for i in s.inputs if type(i) is Deferred and i.step < self.first}
        held = [(d, d.wanted()) for s in steps for d in s.outputs]
        live = [(d, cell) for d, cell in held if cell is not None or id(d) in later]
        wires, externals, replaced = _wiring(steps, start, live)
        key = (tuple(s.plan.serial for s in steps), wires, tuple((d.step - start, d.place) for d, _ in live), replaced)
        compiled = self._compiled.get(key)
        if compiled is None:
            fused = fuse([s.plan for s in steps], wires, [(d.step - start, d.place) for d, _ in live], replaced)
            compiled = self._compiled[key] = _compile(fused)
        outputs = self._execute(compiled, externals, sum(s.plan.traced.draws for s in steps))
        computed = {}
        for (deferred, cell), buffer in zip(live, outputs, strict=True):
            computed[id(deferred)] = buffer
            if cell is not None:
                cell.buffer = buffer
        for step in self.steps:
            step.inputs = [computed.get(id(i), i) if type(i) is Deferred else i for i in step.inputs]
            step.overwrites = [(computed.get(id(b), b), d) for b, d in step.overwrites]

    def _execute(self, compiled: Compiled, externals: list[Any], draws: int) -> list[Any]:
        buffers = [externals[i] for i in compiled.fused.externals]
        buffers.extend(compiled.constants)
        if draws:
            assert self._seed is not None
            buffers.append(device.client.put(self._seed))
            first, second = self._seed.tolist()
            self._draws -= draws
            self._seed = torch.tensor([first, (second + draws) % 2**64], dtype=torch.uint64)
        outputs = compiled.execute(buffers)
        counters["executions"] += 1
        return outputs if compiled.order is None else [outputs[i] for i in compiled.order]


def _hold(result: Any) -> None:
    """Tell the Deferreds in new tensors which cells they are in."""
    if isinstance(result, torch.Tensor):
        cell = result.untyped_storage()._tpu_cell  # type: ignore[attr-defined]
        if type(cell.buffer) is Deferred and cell.buffer.cell is None:
            cell.buffer.cell = weakref.ref(cell)
    elif isinstance(result, (tuple, list)):
        for item in result:
            _hold(item)


def _wiring(steps: Sequence[Step], start: int, live: Sequence[Any]) -> tuple[Any, list[Any], tuple[Any, ...]]:
    """Where each step's inputs come from, as a hashable; the buffers from outside; and which of those are replaced by
    an output, so that they may be donated: (external, place among the outputs)."""
    externals: list[Any] = []
    known: dict[int, int] = {}

    def external(buffer: Any) -> int:
        if id(buffer) not in known:
            known[id(buffer)] = len(externals)
            externals.append(buffer)
        return known[id(buffer)]

    wires = tuple(
        tuple(Wire(i.step - start, i.place) if type(i) is Deferred else Wire(-1, external(i)) for i in step.inputs)
        for step in steps
    )
    return wires, externals, _replaced(steps, known, live)


def _replaced(steps: Sequence[Step], known: dict[int, int], live: Sequence[Any]) -> tuple[Any, ...]:
    """A cell held a buffer when the sequence began, and holds one of its outputs at the end."""
    before: dict[int, int] = {}
    places = {id(deferred): i for i, (deferred, cell) in enumerate(live) if cell is not None}
    found = []
    for step in steps:
        for buffer, deferred in step.overwrites:
            origin = before.get(id(buffer)) if type(buffer) is Deferred else known.get(id(buffer))
            if origin is not None:
                before[id(deferred)] = origin
                if id(deferred) in places:
                    found.append((origin, places[id(deferred)]))
    return tuple(found)


def _compile(fused: Fused) -> Compiled:
    program = lower_graph(fused.graph, fused.name, donate=True)
    compiled = runtime.executable(program, options_in_force())
    kept = _kept(fused, program.arguments)
    constants = tuple(compiled.client.put(t) for t in program.constants)
    return Compiled(kept, compiled.executable.execute, output_order(program), constants)


def _kept(fused: Fused, arguments: Sequence[int]) -> Fused:
    """``fused`` with the buffers that its program takes, in the program's order."""
    return Fused(fused.graph, fused.name, tuple(fused.externals[i] for i in arguments))


def _period(serials: list[int]) -> tuple[int, tuple[int, ...]]:
    """(steps before a loop, the loop's steps) of a sequence that ends in a loop; no steps if it does not."""
    n = len(serials)
    for size in range(_LEAST_PERIOD, n // 2 + 1):
        if serials[n - size :] == serials[n - 2 * size : n - size]:
            start = n - 2 * size
            while start and serials[start - 1] == serials[start - 1 + size]:
                start -= 1
            return start, tuple(serials[start : start + size])
    return 0, ()
