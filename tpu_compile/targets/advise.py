"""Suggestions for a workload on a chip, each with the gain that compiling the changed program shows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch._dynamo.exc import TorchDynamoException

from tpu_compile.errors import OutOfMemory, TpuCompileError, plain
from tpu_compile.executables import options_in_force
from tpu_compile.stats import on_event
from tpu_compile.targets.analysis import analyse
from tpu_compile.targets.changes import (
    Change,
    donations,
    doubles,
    float_products,
    gelu,
    indices,
    odd_batch,
    odd_sizes,
    repeated_layers,
)
from tpu_compile.targets.chips import slice_name
from tpu_compile.targets.compiling import compile_for
from tpu_compile.targets.describe import relative
from tpu_compile.targets.estimate import Point, measured
from tpu_compile.targets.heads import odd_heads
from tpu_compile.targets.transposes import transposes
from tpu_compile.targets.workload import Load, Made, Workload, loaded, trace

_LOOKS = (
    *(odd_sizes, odd_heads, odd_batch, float_products, doubles, indices, gelu, repeated_layers, donations),
    transposes,
)
_OWNER = re.compile(r"^(fn|self\.model|model\.model)\.")
"""What tracing calls the model."""
_LEAST = 0.01
"""Gains below this are not worth a word."""
_EXPLAINED = "Explanation:"
"""Begins the line of Dynamo's errors that says what happened."""
_TOLERABLE = 0.1
"""A step may become this much slower for a shorter compile."""


@dataclass(frozen=True)
class Finding:
    """A suggestion that was tried.

    Attributes:
        kind, title, where, write: see ``Change``.
        gain: part of the time saved: 0.1 is a tenth; for each example, where the batch differs.
        before, after: seconds; ``bytes_saved``: of HBM.
        compile_before, compile_after: seconds that XLA took; 0 where the program was in the cache.
    """

    kind: str
    title: str
    where: str
    write: str
    gain: float
    before: float
    after: float
    bytes_saved: int
    compile_before: float = 0.0
    compile_after: float = 0.0


@dataclass(frozen=True)
class Untried:
    """A suggestion whose changed program could not be made."""

    kind: str
    title: str
    where: str
    write: str
    why: str


@dataclass(frozen=True)
class Advice:
    """All findings for one chip, the largest gain first; ``without_gain`` were tried and did not help."""

    target: str
    seconds: float
    findings: tuple[Finding, ...]
    untried: tuple[Untried, ...]
    without_gain: tuple[Finding, ...]

    def as_row(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def advise(workload: Workload, target: str, batch: int | None, tell: Callable[[str], None]) -> Advice:
    """Look for what could be better about a workload on a chip, and try it.

    Raises:
        OutOfMemory: the workload does not fit.
    """
    return _Adviser(workload, slice_name(target), tell).run(batch)


class _Adviser:
    def __init__(self, workload: Workload, target: str, tell: Callable[[str], None]) -> None:
        self.workload, self.target, self.tell = workload, target, tell

    def run(self, batch: int | None) -> Advice:
        load = self.workload.load(batch)
        self.tell(f"{load.program.name} for {self.target}")
        with _watch() as first:
            compiled = compile_for(self.target, load.program, options_in_force(), code=False)
        found = analyse(compiled.executable.as_text(), compiled.executable.memory_analysis(), self.target)
        before = measured(load, self.target)
        names = arguments_of(load)
        proposed = sorted((each for look in _LOOKS for each in look(load, found, names)), key=lambda each: -each.share)
        findings, untried = [], []
        for change in proposed:
            self.tell(f"{change.kind}: {change.title}")
            try:
                with _watch() as watch:
                    finding = _compared(change, before, self._measured(change, load))
                finding = replace(finding, compile_before=sum(first), compile_after=sum(watch))
            except (TpuCompileError, TorchDynamoException, RuntimeError, TypeError, ValueError) as error:
                # The model does not take the change as it stands: its author may know how to.
                untried.append(Untried(change.kind, change.title, relative(change.where), change.write, _why(error)))
                continue
            findings.append(finding)
        findings.sort(key=lambda finding: -finding.gain)
        helpful = tuple(finding for finding in findings if _helps(finding))
        others = tuple(finding for finding in findings if not _helps(finding))
        return Advice(self.target, found.schedule.seconds, helpful, tuple(untried), others)

    def _measured(self, change: Change, load: Load) -> Point:
        with change.scope():
            return measured(self._changed(change, load), self.target)

    def _changed(self, change: Change, load: Load) -> Load:
        made: Made = self.workload.make(change.batch or load.batch)
        if change.made is not None:
            made = change.made(made)
        traced = trace(made, train=self.workload.train, optimizer=self.workload.optimizer)
        if change.graph is not None:
            graph = change.graph(traced)
            traced = replace(traced, graph_module=graph, tracing=replace(traced.tracing, graph=graph))
        return loaded(made, traced)


def arguments_of(load: Load) -> tuple[str, ...]:
    """What each input of the program is, as the user would write it."""
    placeholders = load.graph.graph.find_nodes(op="placeholder")
    names = [_OWNER.sub("self.", node.meta.get("argument", node.name)) for node in placeholders]
    return tuple(names[position] for position in load.program.arguments)


def _compared(change: Change, before: Point, after: Point) -> Finding:
    if not after.fits:
        raise OutOfMemory("the changed program does not fit", needed=after.needed, available=after.available)
    each, other = before.seconds / before.items, after.seconds / after.items
    gain = 1 - other / each if each else 0.0
    saved = before.needed - after.needed
    where = relative(change.where)
    return Finding(change.kind, change.title, where, change.write, gain, before.seconds, after.seconds, saved)


def _helps(finding: Finding) -> bool:
    if finding.kind == "donate":
        return finding.bytes_saved > 0
    if finding.kind == "scan":
        return 0 < finding.compile_after < 0.9 * finding.compile_before and finding.gain > -_TOLERABLE
    return finding.gain >= _LEAST


@contextlib.contextmanager
def _watch() -> Iterator[list[float]]:
    """The seconds of each compile in the block."""
    seconds: list[float] = []

    def listen(name: str, details: dict[str, Any]) -> None:
        if name == "stage/end" and details["stage"] == "xla":
            seconds.append(details["seconds"])

    stop = on_event(listen)
    try:
        yield seconds
    finally:
        stop()


def _why(error: Exception) -> str:
    lines = [line.strip() for line in plain(error).splitlines()]
    told = next((line for line in lines if line.startswith(_EXPLAINED)), lines[0])
    return told.removeprefix(_EXPLAINED).strip()[:300]
