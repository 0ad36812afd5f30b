"""Two tensors that should agree: by how much they do not, and whether that is too much."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan, nan
from typing import Any

import torch

from tpu_compile.tolerances import tolerance

FARTHER = 4.0
"""A result outside its tolerance still agrees if its error against float64 is at most this many times eager's own:
where a model amplifies rounding, eager is as far from the truth, and two roundings seldom differ by more."""
PLAUSIBLE = 10.0
"""Eager's own error counts only up to this many tolerances of the run's largest value: what is beyond is no rounding,
and the run in float64 took another course."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """How ``got`` differs from ``want``.

    Attributes:
        name: what the tensor is to the user.
        kind: its dtype and shape.
        absolute, relative: the largest error, and the largest as a share of its expected value.
        ulps: the largest error in units in the last place of the expected value's dtype.
        cosine: of the angle between both as vectors; nan where one of them is 0.
        problem: empty if they agree; else what is wrong.
        note: why they agree although they are outside the tolerance.
    """

    name: str
    kind: str
    absolute: float = 0.0
    relative: float = 0.0
    ulps: float = 0.0
    cosine: float = nan
    problem: str = ""
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problem


@dataclass(frozen=True)
class Truth:
    """The same result from a run in float64, and the largest magnitude among the run's results of its kind."""

    value: Any
    largest: float


def measure(name: str, want: Any, got: Any, truth: Truth | None = None) -> Difference:
    """Compare two results. ``got`` may be as far from ``truth`` as ``want`` is, if there is one."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = _same(want, got)
        return Difference(name, type(want).__name__, problem="" if same else f"{got!r} instead of {want!r}")
    kind = _kind(want)
    if _kind(got) != kind:
        return Difference(name, kind, inf, inf, inf, problem=f"is {_kind(got)} instead of {kind}")
    return _numbers(name, kind, want.detach().cpu(), got.detach().cpu(), truth)


def _same(want: Any, got: Any) -> bool:
    if isinstance(want, float) and isinstance(got, float):
        return want == got or (isnan(want) and isnan(got))
    return bool(type(want) is type(got) and want == got)


def _kind(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _numbers(name: str, kind: str, want: torch.Tensor, got: torch.Tensor, truth: Truth | None) -> Difference:
    if want.numel() == 0:
        return Difference(name, kind)
    relative, absolute = tolerance(want.dtype)
    exact_want, exact_got = _exact(want), _exact(got)
    error = _error(exact_want, exact_got)
    figures = (
        float(error.max()),
        float(torch.where(error > 0, error / exact_want.abs(), 0.0).nan_to_num(inf, inf, inf).max()),
        _ulps(want, got),
        _cosine(exact_want, exact_got),
    )
    bad = error > relative * exact_want.abs().nan_to_num(0, 0, 0) + absolute * scale(exact_want)
    if not bad.any():
        return Difference(name, kind, *figures)
    note = _excuse(exact_want, exact_got, truth, absolute) if truth else ""
    problem = "" if note else _problem(exact_want, exact_got, error, bad, (relative, absolute))
    return Difference(name, kind, *figures, problem=problem, note=note)


def _exact(t: torch.Tensor) -> torch.Tensor:
    """The values without loss: integers stay integers where a float64 could not hold them."""
    if t.is_complex():
        return t.to(torch.complex128)
    return t if t.dtype in (torch.int64, torch.uint64) else t.to(torch.float64)


def _error(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Absolute errors as float64: 0 where both are the same infinity or NaN, infinite where only one of them is."""
    if not want.is_floating_point() and not want.is_complex():
        return torch.where(want == got, 0.0, (want.double() - got.double()).abs().clamp(min=1.0))
    error = (want - got).abs()
    return torch.where((want == got) | (want.isnan() & got.isnan()), 0.0, error.nan_to_num(inf, inf, inf))


def scale(want: torch.Tensor) -> float:
    """The largest finite magnitude."""
    finite = want.abs().to(torch.float64)
    return float(finite[finite.isfinite()].max()) if finite.isfinite().any() else 0.0


def _ulps(want: torch.Tensor, got: torch.Tensor) -> float:
    """The most representable numbers that lie between a result and its expected value."""
    if want.is_complex():
        return _ulps(torch.view_as_real(want.resolve_conj()), torch.view_as_real(got.resolve_conj()))
    if not want.is_floating_point():
        return float(_error(want, got).max())
    finite = want.isfinite() & got.isfinite()
    if not finite.any():
        return 0.0
    a, b = _ordered(want[finite]), _ordered(got[finite])
    apart = torch.where((a < 0) == (b < 0), (a - b).abs().double(), a.double().abs() + b.double().abs())  # no overflow
    return float(apart.max())


def _ordered(t: torch.Tensor) -> torch.Tensor:
    """Floats as integers that count representable numbers from zero."""
    bits = t.contiguous().view(_BITS[t.element_size()]).to(torch.int64)
    top = 1 << (8 * t.element_size() - 1)
    magnitude = bits & (top - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def _cosine(want: torch.Tensor, got: torch.Tensor) -> float:
    a, b = (
        t.to(torch.complex128 if t.is_complex() else torch.float64).flatten().nan_to_num(0, 0, 0) for t in (want, got)
    )
    lengths = a.norm() * b.norm()
    return float((a.conj() * b).sum().abs() / lengths) if lengths > 0 else nan


def _excuse(want: torch.Tensor, got: torch.Tensor, truth: Truth, absolute: float) -> str:
    """Why a result outside its tolerance is right all the same, if it is: eager is as far from the truth."""
    value = truth.value
    if not isinstance(value, torch.Tensor) or value.shape != want.shape or not absolute:
        return ""
    exact = _exact(value.detach().cpu())
    ours, theirs = float(_error(exact, got).max()), float(_error(exact, want).max())
    if theirs > PLAUSIBLE * absolute * truth.largest or ours > FARTHER * theirs:
        return ""
    return f"{ours / theirs:.1f}× the reference's own error against float64"


def _problem(
    want: torch.Tensor, got: torch.Tensor, error: torch.Tensor, bad: torch.Tensor, limit: tuple[float, float]
) -> str:
    place = int(error.flatten().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(place, device="cpu"), want.shape)]
    pair = f"{got.flatten()[place].item()!r} instead of {want.flatten()[place].item()!r}"
    allowed = f"allowed: {limit[0]:g} of the value + {limit[1]:g} of the largest" if limit[0] else "must be equal"
    return f"{int(bad.sum())} of {want.numel()} elements, worst at {index}: {pair} ({allowed})"
