"""A program's schedule as steps with a time each: libtpu's own cycles where it gives them, a roofline where not.

The steps of a TPU core follow one another. Transfers between HBM and VMEM run beside them, on one queue: what has to
wait for a transfer waits as long as the queue still takes, at full HBM bandwidth. A loop's body counts once a turn
(once where XLA does not know the number of turns), of a conditional's branches the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tpu_compile.targets.chips import Chip
from tpu_compile.targets.hlo import Computation, Instruction, Module
from tpu_compile.targets.loops import turns
from tpu_compile.targets.products import Product, product
from tpu_compile.targets.traffic import moved

_FREE = frozenset("parameter constant bitcast get-tuple-element tuple after-all partition-id replica-id".split())
_STARTS = ("copy-start", "slice-start", "async-start")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_MOVES = frozenset(
    "copy transpose reshape bitcast slice parameter concatenate pad tuple get-tuple-element constant broadcast "
    "reverse copy-start copy-done dynamic-slice dynamic-update-slice".split()
)
"""What rearranges and computes nothing. A fusion of these alone is a change of layout."""


@dataclass(frozen=True)
class Step:
    """One instruction of the schedule, over all of its turns.

    Attributes:
        kind: ``product``, ``fusion`` (elementwise work and reductions), ``layout`` (copies, transposes), ``gather``,
            ``collective``, ``wait`` (for a transfer) or ``other``.
        op, where: the aten op it stands for, and the user's ``file:line``.
        seconds, cycles: of all turns.
        by: whose estimate: ``libtpu`` or ``roofline``.
        bytes: HBM traffic, tiles filled up.
        flops: of matrix products, each multiply-add two.
        bound: ``compute``, ``memory``, ``layout`` or ``interconnect``.
    """

    name: str
    kind: str
    op: str
    where: str
    seconds: float
    cycles: float
    by: str
    bytes: int
    flops: int
    bound: str
    result: str
    products: tuple[Product, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """All steps of a program in order.

    Attributes:
        transfers: bytes that cross between HBM and VMEM beside the steps.
    """

    chip: Chip
    steps: tuple[Step, ...]
    transfers: int

    @cached_property
    def seconds(self) -> float:
        """Time of one run."""
        return sum(step.seconds for step in self.steps)

    @cached_property
    def cycles(self) -> float:
        """The sum of libtpu's estimates, and no other."""
        return sum(step.cycles for step in self.steps if step.by == "libtpu")

    @cached_property
    def flops(self) -> int:
        return sum(step.flops for step in self.steps)

    @cached_property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps) + self.transfers

    @cached_property
    def roofline(self) -> float:
        """The least time in seconds: products at the peak of their passes, or all HBM traffic at full bandwidth,
        whichever takes longer; and collectives."""
        compute = sum(_at_peak(step.products, self.chip) for step in self.steps)
        collectives = [step for step in self.steps if step.kind == "collective"]
        local = self.bytes - sum(step.bytes for step in collectives)
        return max(compute, local / self.chip.hbm_bandwidth) + sum(step.seconds for step in collectives)

    def seconds_by(self, estimate: str) -> float:
        return sum(step.seconds for step in self.steps if step.by == estimate)


def schedule(module: Module, chip: Chip) -> Schedule:
    """The steps of a module, each with its time on a chip."""
    return _Reader(module, chip).read(module.entry)


@dataclass
class _Reader:
    module: Module
    chip: Chip

    def read(self, computation: Computation) -> Schedule:
        steps: list[Step] = []
        now = queue = 0.0
        ready: dict[str, float] = {}
        transfers = 0
        for each in computation.instructions:
            if each.opcode in _STARTS:
                size = self._transfer(computation, each)
                transfers += size
                queue = ready[each.name] = max(now, queue) + size / self.chip.hbm_bandwidth
                continue
            if each.opcode.endswith("-done"):
                source = each.operands[0] if each.operands else ""
                found = self._wait(each, ready.get(source, now) - now)
            else:
                found = list(self._steps(computation, each))
                transfers += self._inner_transfers
            steps += found
            now += sum(step.seconds for step in found)
        return Schedule(self.chip, tuple(steps), transfers)

    _inner_transfers: int = 0

    def _steps(self, computation: Computation, each: Instruction) -> Iterator[Step]:
        self._inner_transfers = 0
        if each.opcode in _FREE:
            return
        if each.opcode == "while":
            body = self.read(self.module.computations[each.attribute("body").lstrip("%")])
            count = turns(self.module, computation, each)
            self._inner_transfers = body.transfers * count
            yield from (_times(step, count) for step in body.steps)
        elif each.opcode == "conditional":
            branches = [self.read(self.module.computations[name]) for name in each.called]
            longest = max(branches, key=lambda branch: branch.seconds)
            self._inner_transfers = longest.transfers
            yield from longest.steps
        elif each.opcode == "call":
            inner = self.read(self.module.computations[each.called[0]])
            self._inner_transfers = inner.transfers
            yield from inner.steps
        else:
            yield self._step(computation, each)

    def _step(self, computation: Computation, each: Instruction) -> Step:
        products = tuple(_products(self.module, computation, each))
        kind = self._kind(each, products)
        size = moved(self.module, computation, each)
        if kind == "collective":
            return self._collective(computation, each)
        memory, compute = size / self.chip.hbm_bandwidth, _at_peak(products, self.chip)
        if each.cycles is not None:
            seconds, by = each.cycles / self.chip.clock, "libtpu"
        else:
            seconds, by = max(memory, compute), "roofline"
        bound = "layout" if kind == "layout" else "memory" if memory > max(compute, seconds / 2) else "compute"
        place = _place(self.module, each, products)
        cycles = seconds * self.chip.clock if each.cycles is None else each.cycles
        flops = sum(each.flops for each in products)
        result = ", ".join(map(str, each.results[:3]))
        return Step(each.name, kind, *place, seconds, cycles, by, size, flops, bound, result, products)

    def _kind(self, each: Instruction, products: Sequence[Product]) -> str:
        if products:
            return "product"
        if each.opcode.removesuffix("-start") in _COLLECTIVES:
            return "collective"
        opcodes = {inner.opcode for _, inner in self.module.inside(each)} if each.opcode == "fusion" else {each.opcode}
        if opcodes & {"gather", "scatter"}:
            return "gather"
        moving = opcodes & {"copy", "transpose"} or each.opcode == "copy"
        if moving and opcodes - {"fusion"} <= _MOVES:
            return "layout"
        return "fusion" if each.opcode == "fusion" or each.cycles is not None else "other"

    def _collective(self, computation: Computation, each: Instruction) -> Step:
        """Every byte of the result crosses the ring about once in each direction; twice for an all-reduce."""
        size = sum(shape.nbytes for shape in each.results[-1:])
        crossings = 2 if each.opcode.startswith("all-reduce") else 1
        seconds = crossings * size / self.chip.ici_bandwidth
        result = ", ".join(map(str, each.results[:3]))
        cycles = seconds * self.chip.clock
        return Step(
            each.name,
            "collective",
            each.op,
            each.where,
            seconds,
            cycles,
            "roofline",
            size,
            0,
            "interconnect",
            result,
        )

    def _transfer(self, computation: Computation, each: Instruction) -> int:
        """Bytes between HBM and VMEM."""
        arrays = [shape for shape in each.results if shape.bits and shape.space in (0, 1)]
        spaces = {shape.space for shape in arrays}
        return min(shape.padded_bytes for shape in arrays) if 0 in spaces and arrays else 0

    def _wait(self, each: Instruction, seconds: float) -> list[Step]:
        if seconds <= 0:
            return []
        cycles, result = seconds * self.chip.clock, str(each.results[0]) if each.results else ""
        return [Step(each.name, "wait", each.op, each.where, seconds, cycles, "roofline", 0, 0, "memory", result)]


def _times(step: Step, turns: int) -> Step:
    return replace(
        step,
        seconds=step.seconds * turns,
        cycles=step.cycles * turns,
        bytes=step.bytes * turns,
        flops=step.flops * turns,
        products=step.products * turns if turns > 1 else step.products,
    )


def _products(module: Module, computation: Computation, each: Instruction) -> Iterator[Product]:
    for inside, instruction in ((computation, each), *module.inside(each)):
        found = product(inside, instruction)
        if found:
            yield found


def _at_peak(products: Sequence[Product], chip: Chip) -> float:
    return sum(each.flops * each.passes / chip.peak(each.dtype) for each in products)


def _place(module: Module, each: Instruction, products: Sequence[Product]) -> tuple[str, str]:
    """(aten op, file:line): of the largest product inside, else its own, else of the last instruction inside that has
    one."""
    if products:
        largest = max(products, key=lambda found: found.flops)
        if largest.where or largest.op:
            return largest.op, largest.where
    if each.where:
        return each.op, each.where
    placed = [inner for _, inner in module.inside(each) if inner.where]
    return (placed[-1].op, placed[-1].where) if placed else (each.op, "")
