"""Whether a compiled program is right: eager says what is, and programs as right as eager's say how sure that is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from tpu_compile.tolerances import tolerance

from .programs import Fuzzed, function, leaf, outcome

_ULP = {
    torch.float64: 2.0**-40,
    torch.complex128: 2.0**-40,
    torch.float32: 2.0**-21,
    torch.complex64: 2.0**-21,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}

_REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, AssertionError, AttributeError)
"""What compiling raises, Dynamo's own slips included; it is our fault where ``aot_eager`` compiles the same."""

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def on_tpu(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` with our backend."""
    return torch.compile(fn, backend="tpu", fullgraph=True, dynamic=False)


def by_torch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` with no backend's doing: what is wrong with that is torch's."""
    return torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=False)


def fault(program: Fuzzed, compiler: Compile = on_tpu) -> str | None:
    """What is wrong with the compiled program, and not with torch's own capture of it; None if nothing is. Also after
    a call: what it left in its inputs."""
    found = _fault(program, compiler)
    return found if found and not _fault(program, by_torch) else None


def _fault(program: Fuzzed, compiler: Compile) -> str | None:
    want = outcome(program, function(program.source()), program.copies())
    torch._dynamo.reset()
    try:
        got = outcome(program, compiler(function(program.source())), program.copies())
    except _REFUSALS as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    labels = [*program.returned, *(f"{name} after the call" for name, _ in program.inputs)]
    for label, w, g, promised in zip(labels, want, got, _promised(program, want), strict=False):
        if _apart(w, g) and _apart(promised, g):
            return f"{label}: strides {g.stride()} for {w.stride()}"
    labels += [f"gradient of {name}" for name, t in program.inputs if leaf(t, program.grad).requires_grad]
    doubtful = [i for i, (w, g) in enumerate(zip(want, got, strict=True)) if _differs(w, g, [])]
    others = list(_others(program)) if doubtful else []
    for i in doubtful:
        reason = _differs(want[i], got[i], [o[i] for o in others], vague="fft." in program.source())
        if reason:
            return f"{labels[i]}: {reason}"
    return None


def _promised(program: Fuzzed, want: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results as FakeTensor has them: all that a backend knows. Its strides are not always eager's."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # torch.tensor(2) in a program is real
    given = [mode.from_tensor(t) for t in program.copies()]
    with contextlib.suppress(RuntimeError), mode:  # it refuses what depends on data
        return [*function(program.source())(*given), *given]
    return want[: len(program.returned) + len(program.inputs)]


def _apart(want: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether the strides differ; that of an axis of one element means nothing."""
    if want.shape != got.shape or not want.numel():
        return False
    return any(w != g for w, g, n in zip(want.stride(), got.stride(), want.shape, strict=True) if n > 1)


def _differs(want: Any, got: Any, others: Sequence[Any], vague: bool = False) -> str | None:
    """The largest difference that neither the tolerance nor the spread of ``others`` explains. ``vague``: of numbers
    that are not finite it is only asked that they are not, as of complex ones: a transform mixes them as its algorithm
    likes."""
    for what in ("dtype", "shape"):
        if getattr(want, what) != getattr(got, what):
            return f"{what} {getattr(got, what)} for {getattr(want, what)}"
    if not want.is_floating_point() and not want.is_complex():
        wrong = want != got
        for other in others:
            wrong &= other == want
        return f"{got[wrong].tolist()[:4]} for {want[wrong].tolist()[:4]}" if wrong.any() else None
    relative, absolute = tolerance(want.dtype)
    w, g = _wide(want), _wide(got)
    same_edge = _not_finite if vague or w.is_complex() else _same_edge
    allowed = absolute + relative * w.abs()
    finite = torch.isfinite(w)
    wrong = torch.where(finite, ~((g - w).abs() <= allowed), ~same_edge(g, w))
    for other in others:
        o = _wide(other)
        wrong &= torch.where(finite, ~((g - w).abs() <= allowed + 8 * (o - w).abs()), same_edge(o, w))
        wrong &= torch.isfinite(o) == finite
    return f"{g[wrong].tolist()[:4]} for {w[wrong].tolist()[:4]}" if wrong.any() else None


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _same_edge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _not_finite(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(a) & ~torch.isfinite(b)


def _others(program: Fuzzed) -> Iterator[list[torch.Tensor]]:
    """Results of programs that are as right as eager's: in float64, and with every value moved by its last bits. Where
    they depart from eager, eager's own digits mean nothing."""
    wide = re.sub(r"torch\.b?float(16|32)", "torch.float64", program.source())
    wide = re.sub(r"\.(float|half|bfloat16)\(\)", ".double()", wide.replace("torch.complex64", "torch.complex128"))
    given = [leaf(_wide(t), program.grad) if t.is_floating_point() or t.is_complex() else t for t in program.copies()]
    with contextlib.suppress(RuntimeError):  # two operands may no longer agree in dtype; the moved ones remain
        yield outcome(program, function(wide), given)
    moved = re.sub(r"^    (v\d+) = (.*)$", r"    \1 = moved(\2)", program.source(), flags=re.MULTILINE)
    for seed in range(4):
        move = _Move(seed)
        given = [move(t) for t in program.copies()]
        yield outcome(program, function(moved, moved=move), given)


class _Move:
    """Moves floats by a few units of the last place. Views stay: they must go on sharing memory."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        if t.dtype not in _ULP or t._is_view():
            return t
        noise = torch.rand(t.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        t.data.copy_(_wide(t.data) * (1 + noise * _ULP[t.dtype]))  # unseen by autograd
        return t
