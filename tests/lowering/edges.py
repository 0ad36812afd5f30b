"""Edge values of each dtype, and a comparison in units of the last place that tells NaN and infinities apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import tpu_compile
from tpu_compile import compiler
from tpu_compile.calling import CallPlan

_FLOATS = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 0.1, 0.3, 0.7, 0.99, 4.2, 7.0, 10.0, 50.0, 100.0, 1e-3, 1e3, math.pi]
_CARRIER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def values(dtype: torch.dtype) -> torch.Tensor:
    """Small and large numbers of both signs; both zeros, infinities and NaN, or the ends of an integer's range."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        return torch.tensor([*_FLOATS, *(-v for v in _FLOATS), math.inf, -math.inf, math.nan], dtype=dtype)
    limits = torch.iinfo(dtype)
    negative = [-1, -2, -3, -7, -10, -100, limits.min, limits.min + 1] if limits.min else [128, 200]
    return torch.tensor([0, 1, 2, 3, 7, 8, 10, 31, 64, 100, limits.max, limits.max - 1, *negative], dtype=dtype)


def compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn`` compiled as one graph, called."""
    return torch.compile(fn, backend="tpu", fullgraph=True)(*args)


@dataclass(frozen=True)
class ForTpu:
    """What a TPU is given, compiled for this machine and run here. ``stablehlo`` and ``hlo``: before and after XLA."""

    results: list[Any]
    stablehlo: str
    hlo: str


def for_a_tpu(fn: Callable[..., Any], *args: torch.Tensor) -> ForTpu:
    """``fn`` as it is lowered for a TPU, called."""
    lowered = tpu_compile.trace(fn, *args).lower("tpu")
    built = compiler.runtime.executable(lowered.program, compiler.options_in_force())
    results = CallPlan(lowered.program, built.executable, built.client)(list(args))
    return ForTpu(results, lowered.as_text(), built.executable.as_text())


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Floats as integers in their own order: neighbours differ by 1, both zeros are 0."""
    bits = x.contiguous().view(_CARRIER[x.dtype.itemsize]).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(_CARRIER[x.dtype.itemsize]).min - bits, bits)


def assert_same(got: Any, want: Any, ulps: int = 0, what: str = "", atol: float = 0.0) -> None:
    """Every tensor equal in shape, dtype, NaN and infinities, and within ``ulps`` (or ``atol``) elsewhere.

    With ``ulps``, subnormal results count as 0: XLA's CPU code flushes them, as a TPU does.
    """
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    for g, w in pairs:
        kinds = f"{what}: {g.dtype}{list(g.shape)} for {w.dtype}{list(w.shape)}"
        assert g.dtype == w.dtype and g.shape == w.shape, kinds
        if w.is_complex():
            g, w = torch.view_as_real(g.resolve_conj()), torch.view_as_real(w.resolve_conj())
        if not w.is_floating_point():
            assert torch.equal(g, w), f"{what}: {g} for {w}"
            continue
        special = ~(w.isfinite() & g.isfinite())
        equal = (g == w) | (g.isnan() & w.isnan())
        if ulps:
            tiny = torch.finfo(w.dtype).tiny
            g, w = (torch.where(t.abs() < tiny, 0.0, t) for t in (g, w))
        near = ((_ordered(g) - _ordered(w)).abs() <= ulps) | ((g - w).abs() <= atol)
        wrong = ~torch.where(special, equal, near)
        assert not wrong.any(), f"{what}: {g[wrong][:5].tolist()} for {w[wrong][:5].tolist()}"
