"""The ``defer`` mode: ops are noted down, and run as one program when something is read.

A cell's new contents are a Deferred until then. What is noted down is cut where somebody reads (the host, a compiled
call, an op without a rule), or, when a loop reads nothing, at the loop's own period: sequences that repeat are one
executable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tpu_compile.compiler import lower_graph, options_in_force, runtime
from tpu_compile.device import contents
from tpu_compile.device.background import background
from tpu_compile.device.calls import Call
from tpu_compile.device.fusing import Fused, fuse
from tpu_compile.device.programs import Plan, arranger, constant
from tpu_compile.device.schemas import Schema
from tpu_compile.device.state import device
from tpu_compile.device.steps import Deferred, Steps
from tpu_compile.device.tracing import isolated
from tpu_compile.errors import OutOfMemory
from tpu_compile.stats import counters

MOST_OPS = 768
"""Ops noted down before a period is looked for, and everything is run if there is none."""
_LEAST_PERIOD = 16


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
        self._steps = Steps()
        self._thread = 0
        self._seed: torch.Tensor | None = None
        self._draws = 0
        self._period: tuple[Plan, ...] = ()

    # ---- noting down

    def run(self, plan: Plan, call: Call, schema: Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Note one call down; returns what the op returns, on cells that are not computed yet."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._submit()
            self._thread = thread
        if plan.program.checks or call.generator is not None:  # it must be looked at, or draws from somebody else
            self.flush()
            return plan.execute(call, schema, args, kwargs)
        if plan.traced.draws:
            self._draw(plan.traced.draws)
        # What a step reads, no later one may overwrite in part: XLA's fusions may do the second in place and the first
        # afterwards, where the two see the buffer by different shapes.
        if plan.parts and any(self._steps.reads(call.cells[cell].buffer) for cell, _ in plan.writes):
            self._submit()
        result = plan.build(self._steps.note(plan, call), schema, args, kwargs)
        count = len(self._steps.plans)
        if count == len(self._period) or count >= MOST_OPS:
            self._cut()
        return result

    def settled(self, deferred: Deferred) -> None:
        """Know the buffer of a Deferred as that."""
        self._steps.settled(deferred)

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
        plans = self._steps.plans
        if tuple(plans) == self._period:
            self._submit()
        elif len(plans) >= MOST_OPS:
            before, self._period = _period(plans)
            size = len(self._period)
            if not size:
                self._submit()
                return
            self._submit(before)
            while tuple(self._steps.plans[:size]) == self._period:
                self._submit(size)

    # ---- running

    def flush(self) -> None:
        """Run everything that was noted down, and wait for it.

        Raises:
            DeviceError: a program failed, now or since the last time.
        """
        self._submit()
        background.drain()

    def _submit(self, count: int | None = None) -> None:
        """Let the first ``count`` steps, or all, run as one program, in the background."""
        steps, self._steps = (self._steps, Steps()) if count is None else self._steps.split(count)
        if not steps.plans:
            return
        live = steps.live()
        key = steps.key(live)
        for deferred in live:
            deferred.number = -1
        compiled = _known.get(key)
        if compiled is None:
            compiled = _known[key] = _compile(isolated(lambda: fuse(*key)))
        seed = self._seed_of(steps.plans)
        over = background.submit(partial(_job, compiled, steps.externals, seed, live))
        for deferred in live:
            deferred.over = over

    def _seed_of(self, plans: Sequence[Plan]) -> Any:
        """The seed for these plans' draws, the next of those that were noted down, as a buffer; None for no draws."""
        draws = sum([plan.traced.draws for plan in plans]) if self._seed is not None else 0
        if self._seed is None or not draws:
            return None
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


def _compile(fused: Fused) -> Compiled:
    program = lower_graph(fused.graph, fused.name, donate=True)
    compiled = runtime.executable(program, options_in_force())
    taken = Fused(fused.graph, fused.name, tuple(fused.externals[i] for i in program.arguments))
    constants = tuple(compiled.client.put(t) for t in program.constants)
    return Compiled(taken, compiled.executable.execute, arranger(program), constants)


def _period(plans: list[Plan]) -> tuple[int, tuple[Plan, ...]]:
    """(steps before a loop, the loop's steps) of a sequence that ends in a loop; no steps if it does not."""
    n = len(plans)
    for size in range(_LEAST_PERIOD, n // 2 + 1):
        if plans[n - size :] == plans[n - 2 * size : n - size]:
            start = n - 2 * size
            while start and plans[start - 1] == plans[start - 1 + size]:
                start -= 1
            return start, tuple(plans[start : start + size])
    return 0, ()
