"""The ``defer`` mode: ops are noted down, and run as one program when something is read.

A cell's new contents are a Deferred until then. What is noted down is cut where somebody reads (the host, a compiled
call, an op without a rule), or, when a loop reads nothing, at the loop's own period: sequences that repeat are one
executable.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tpu_compile.compiler import lower_graph, options_in_force, runtime
from tpu_compile.device import contents
from tpu_compile.device.background import background
from tpu_compile.device.calls import Call
from tpu_compile.device.fusing import Fused, Wire, fuse
from tpu_compile.device.programs import Plan, arranger, constant
from tpu_compile.device.schemas import Schema
from tpu_compile.device.state import device
from tpu_compile.device.storage import Cell
from tpu_compile.device.tracing import isolated
from tpu_compile.errors import OutOfMemory
from tpu_compile.stats import counters

MOST_OPS = 768
"""Ops noted down before a period is looked for, and everything is run if there is none."""
_LEAST_PERIOD = 16


class Deferred:
    """Contents that may not be computed yet: output ``place`` of a step. ``step`` is None once that has been submitted,
    ``over`` is then held until it has run, and ``buffer`` is there."""

    __slots__ = ("__weakref__", "buffer", "cell", "over", "place", "step")

    def __init__(self, step: Step, place: int) -> None:
        self.step: Step | None = step
        self.place, self.buffer = place, None
        self.over: threading.Lock | None = None
        self.cell: weakref.ref[Cell] | None = None

    def wanted(self) -> Cell | None:
        """The cell that still holds it, if there is one."""
        cell = self.cell() if self.cell is not None else None
        return cell if cell is not None and cell.buffer is self else None


@dataclass(eq=False, slots=True)
class Step:
    """One op: its plan, its inputs (Deferreds, buffers, host values), what it makes, and what it overwrites (before,
    after). ``number`` counts the steps of the sequence that it runs in."""

    plan: Plan
    number: int
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Deferred] = field(default_factory=list)
    overwrites: list[tuple[Any, Deferred]] = field(default_factory=list)


@dataclass(frozen=True)
class Compiled:
    """A fused sequence, ready to run."""

    fused: Fused
    execute: Any
    arranged: Callable[[list[Any]], list[Any]] | None
    constants: tuple[Any, ...]


_known: dict[Any, Compiled] = {}
"""The sequences of this process that were compiled; leaving the mode forgets none."""


class Recorder:
    """What was asked for and has not run. A sequence ends where another thread goes on: autograd runs a backward pass
    in one of its own, and the forward pass may run meanwhile."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._read: set[int] = set()
        """The identities of the steps' inputs. What a step reads, no later one may overwrite in part: XLA's fusions may
        do the second in place and the first afterwards, where the two see the buffer by different shapes."""
        self._thread = 0
        self._seed: torch.Tensor | None = None
        self._draws = 0
        self._period: tuple[int, ...] = ()

    # ---- noting down

    def run(self, plan: Plan, call: Call, schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Note one call down; returns what the op returns, on cells that are not computed yet."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._submit(len(self.steps))
            self._thread = thread
        if plan.program.checks or call.generator is not None:  # it must be looked at, or draws from somebody else
            self.flush()
            return plan.execute(call, schema, args, kwargs)
        if plan.traced.draws:
            self._draw(plan.traced.draws)
        cells = call.cells
        if plan.parts and any(id(cells[cell].buffer) in self._read for cell, _ in plan.writes):
            self._submit(len(self.steps))
        step = Step(plan, len(self.steps))
        step.inputs = [self._held(cells[place]) if take is None else take(call) for place, take in plan.recipe]
        self._read.update(map(id, step.inputs))
        outputs = step.outputs = [Deferred(step, place) for place in range(plan.traced.new + len(plan.writes))]
        for cell, place in plan.writes:
            target, deferred = cells[cell], outputs[place]
            step.overwrites.append((target.buffer, deferred))
            target.buffer, deferred.cell = deferred, weakref.ref(target)
        result = plan.build(outputs, schema, args, kwargs)
        if plan.traced.new:
            _hold(result)
        self.steps.append(step)
        if len(self.steps) == len(self._period) or len(self.steps) >= MOST_OPS:
            self._cut()
        return result

    def _held(self, cell: Cell) -> Any:
        buffer = cell.buffer
        return buffer if buffer.__class__ is Deferred or buffer.__class__ is device.array else contents.contents(cell)

    def _draw(self, count: int) -> None:
        """One seed serves a whole sequence as long as nobody else draws or seeds in between."""
        generator = device.generator
        if self._seed is not None and not generator.follows(self._seed, self._draws):
            self.flush()
        seed = generator.draw(count)
        if self._seed is None:
            self._seed = seed
        self._draws += count

    # ---- cutting

    def _cut(self) -> None:
        """Run a loop's period as soon as it is complete; look for one when much has gathered."""
        serials = [step.plan.serial for step in self.steps]
        if tuple(serials) == self._period:
            self._submit(len(serials))
        elif len(serials) >= MOST_OPS:
            before, self._period = _period(serials)
            size = len(self._period)
            if not size:
                self._submit(len(serials))
                return
            self._submit(before)
            while len(self.steps) >= size and tuple(s.plan.serial for s in self.steps[:size]) == self._period:
                self._submit(size)

    # ---- running

    def flush(self) -> None:
        """Run everything that was noted down, and wait for it.

        Raises:
            DeviceError: a program failed, now or since the last time.
        """
        self._submit(len(self.steps))
        background.drain()

    def _submit(self, count: int) -> None:
        """Let the first ``count`` steps run as one program, in the background."""
        if not count:
            return
        steps, self.steps = self.steps[:count], self.steps[count:]
        self._read = {id(source) for step in self.steps for source in step.inputs}
        mine = {id(step) for step in steps}
        later = {id(i) for s in self.steps for i in s.inputs if i.__class__ is Deferred and id(i.step) in mine}
        live = [d for s in steps for d in s.outputs if d.wanted() is not None or id(d) in later]
        wires, externals, known = _wiring(steps)
        places = tuple([(d.step.number, d.place) for d in live if d.step is not None])
        replaced = _replaced(steps, known, live)
        key = (tuple([s.plan.serial for s in steps]), wires, places, replaced)
        compiled = _known.get(key)
        if compiled is None:
            plans = [s.plan for s in steps]
            compiled = _known[key] = _compile(isolated(lambda: fuse(plans, wires, places, replaced)))
        seed = self._seed_of(sum([s.plan.traced.draws for s in steps]))
        for step in steps:
            for deferred in step.outputs:
                deferred.step = None
        for step in self.steps:
            step.number -= count
        over = background.submit(partial(_job, compiled, externals, seed, live))
        for deferred in live:
            deferred.over = over

    def _seed_of(self, draws: int) -> Any:
        """The seed for that many of the draws that were noted down, as a buffer; None for no draws."""
        if not draws:
            return None
        assert self._seed is not None
        seed = device.client.put(self._seed)
        first, second = self._seed.tolist()
        self._draws -= draws
        again = torch.tensor([first, (second + draws) % 2**64], dtype=torch.uint64, device="cpu")
        self._seed = again if self._draws else None
        return seed


def _job(compiled: Compiled, externals: list[Any], seed: Any, live: list[Deferred]) -> None:
    """Run a sequence and make its results known."""
    buffers = [_computed(externals[i]) for i in compiled.fused.externals]
    externals.clear()  # what is donated must not be held here
    buffers.extend(compiled.constants)
    if seed is not None:
        buffers.append(seed)
    try:
        outputs = compiled.execute(buffers)
    except OutOfMemory as error:
        error.add_note(contents.living())
        raise
    counters["executions"] += 1
    if compiled.arranged is not None:
        outputs = compiled.arranged(outputs)
    for deferred, buffer in zip(live, outputs, strict=True):
        deferred.buffer = buffer


def _computed(source: Any) -> Any:
    if source.__class__ is tuple:
        return constant(*source)
    return source.buffer if source.__class__ is Deferred else source


def _hold(result: Any) -> None:
    """Tell the Deferreds in new tensors which cells they are in."""
    if isinstance(result, torch.Tensor):
        cell = result.untyped_storage()._tpu_cell  # type: ignore[attr-defined]
        deferred = cell.buffer
        if deferred.__class__ is Deferred and deferred.cell is None:
            deferred.cell = weakref.ref(cell)
    elif isinstance(result, (tuple, list)):
        for item in result:
            _hold(item)


def _wiring(steps: Sequence[Step]) -> tuple[tuple[Wire, ...], list[Any], dict[int, int]]:
    """Where the steps' inputs come from, one after another; the buffers from outside; and their numbers by identity."""
    externals: list[Any] = []
    known: dict[int, int] = {}
    wires: list[Wire] = []
    for step in steps:
        for source in step.inputs:
            if source.__class__ is Deferred and source.step is not None:
                wires.append((source.step.number, source.place))
                continue
            number = known.get(id(source))
            if number is None:
                # What the background has finished may be known as a buffer too; then it is so here, and once only.
                # Host values are never the same, or numbers that are equal by chance would make another program.
                buffer = source.buffer if source.__class__ is Deferred else source
                number = known.get(id(buffer), len(externals)) if buffer is not None else len(externals)
                if number == len(externals):
                    externals.append(source)
                known[id(source)] = number
                if buffer is not None:
                    known[id(buffer)] = number
            wires.append(number)
    return tuple(wires), externals, known


def _replaced(steps: Sequence[Step], known: dict[int, int], live: Sequence[Deferred]) -> tuple[tuple[int, int], ...]:
    """(external, place among the outputs) where a cell held a buffer when the sequence began, and holds an output at
    the end: its memory may be taken over."""
    origins: dict[int, int] = {}
    places = {id(deferred): i for i, deferred in enumerate(live)}
    found = []
    for step in steps:
        for before, after in step.overwrites:
            inside = before.__class__ is Deferred and before.step is not None
            origin = (origins if inside else known).get(id(before))
            if origin is not None:
                origins[id(after)] = origin
                if id(after) in places and after.wanted() is not None:
                    found.append((origin, places[id(after)]))
    return tuple(found)


def _compile(fused: Fused) -> Compiled:
    program = lower_graph(fused.graph, fused.name, donate=True)
    compiled = runtime.executable(program, options_in_force())
    taken = Fused(fused.graph, fused.name, tuple(fused.externals[i] for i in program.arguments))
    constants = tuple(compiled.client.put(t) for t in program.constants)
    return Compiled(taken, compiled.executable.execute, arranger(program), constants)


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
