"""Compiled against a reference, call by call and tensor by tensor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_compile.comparing.interpreted import Interpreted
from tpu_compile.comparing.measure import Difference, Truth, measure, scale
from tpu_compile.comparing.runs import Subject, run
from tpu_compile.compiler import record
from tpu_compile.errors import DeviceError, Gap, LoweringError, TpuCompileWarning, plain

Run = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """How one subject's compiled run differs from its reference.

    Attributes:
        differences: one for each result, gradient and overwritten tensor of each call.
        reference: what was compared with.
        gaps: ops that ran on the CPU on both sides.
    """

    differences: tuple[Difference, ...]
    reference: str
    gaps: tuple[Gap, ...]
    seconds: float

    @property
    def departing(self) -> tuple[Difference, ...]:
        """Those that do not agree."""
        return tuple(d for d in self.differences if not d.agrees)


def compare(
    subject: Subject,
    *,
    calls: int = 1,
    grad: bool = False,
    against: str = "eager",
    options: Mapping[str, Any] | None = None,
) -> Comparison:
    """Run copies of a subject compiled and by a reference, and measure everything that they leave behind.

    A compile that fails is a difference called "compilation".

    Args:
        calls: how often to call it; what a call writes is there for the next.
        grad: also compare gradients.
        against: ``eager``, or the name of another lowering.
        options: for the compiled side, as in ``torch.compile(options=...)``.

    Raises:
        ConfigError: the subject cannot be copied, or has no gradient to compare.
    """
    start = time.perf_counter()
    with record() as recorded, warnings.catch_warnings():
        warnings.simplefilter("ignore", TpuCompileWarning)  # of ops that run on the CPU: `gaps` has them
        try:
            got = _compiled(subject, calls, grad, options)
        except (LoweringError, DeviceError) as error:
            failed = Difference("compilation", "", problem=f"{type(error).__name__}: {plain(error)}")
            return Comparison((failed,), against, tuple(recorded.gaps), time.perf_counter() - start)
        random = any(lowering.compiled.program.random for lowering in recorded.lowerings)
        want, reference = _reference(subject, calls, grad, against, random)
    found = list(_pairs(want, got, {}))
    if not random and not all(d.agrees for d in found):
        found = list(_pairs(want, got, _truth(subject, calls, grad)))
    return Comparison(tuple(found), reference, tuple(recorded.gaps), time.perf_counter() - start)


def _compiled(subject: Subject, calls: int, grad: bool, options: Mapping[str, Any] | None) -> Run:
    ours = subject.copied()
    torch._dynamo.reset()
    compiled = torch.compile(ours.model, backend="tpu", options=dict(options or {}) or None)
    return run(ours, compiled, calls=calls, grad=grad)


def _reference(subject: Subject, calls: int, grad: bool, against: str, random: bool) -> tuple[Run, str]:
    if against != "eager":
        return _compiled(subject, calls, grad, {"lowering": against}), f"lowered by {against}"
    theirs = subject.copied()
    if not random:
        return run(theirs, theirs.model, calls=calls, grad=grad), "eager"
    torch._dynamo.reset()
    interpreted = torch.compile(theirs.model, backend=Interpreted().compile)
    text = "eager, op by op, with the compiled program's random numbers"
    return run(theirs, interpreted, calls=calls, grad=grad), text


def _truth(subject: Subject, calls: int, grad: bool) -> dict[str, Truth]:
    """Everything by name from a run in float64; nothing if the model cannot be run so."""
    exact = subject.to(torch.float64)
    try:
        found = dict(_named(run(exact, exact.model, calls=calls, grad=grad)))
    except (RuntimeError, TypeError, ValueError):  # it makes tensors of other dtypes itself
        return {}
    largest: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            largest[_group(name)] = max(largest.get(_group(name), 0.0), scale(value))
    return {name: Truth(value, largest.get(_group(name), 0.0)) for name, value in found.items()}


def _group(name: str) -> str:
    """``result``, ``gradient``, ``buffer``, …"""
    return name.rpartition(": ")[2].partition(" ")[0].partition(".")[0].partition("[")[0]


def _pairs(want: Run, got: Run, truth: Mapping[str, Truth]) -> Iterator[Difference]:
    expected, found = dict(_named(want)), dict(_named(got))
    for name in dict.fromkeys((*expected, *found)):
        if name not in found:
            yield Difference(name, "", problem="eager has, makes or writes this, compiled does not")
        elif name not in expected:
            yield Difference(name, "", problem="compiled has, makes or writes this, eager does not")
        else:
            yield measure(name, expected[name], found[name], truth.get(name))


def _named(calls: Run) -> Iterator[tuple[str, Any]]:
    for index, leaves in enumerate(calls, 1):
        prefix = f"call {index}: " if len(calls) > 1 else ""
        yield from ((prefix + name, value) for name, value in leaves.items())
