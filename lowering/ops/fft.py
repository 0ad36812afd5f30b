"""Fourier transforms: torch's three primitives on stablehlo.fft, which takes up to three innermost axes at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxlib.mlir.dialects import stablehlo

from tpu_compile.lowering import dtypes, hlo
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.hlo import Value
from tpu_compile.lowering.registry import lowers

aten = torch.ops.aten

AXES_AT_ONCE = 3


@lowers(aten._fft_c2c.default)
def fft_c2c(ctx: LoweringContext, x: Value, dim: Sequence[int], normalization: int, forward: bool) -> Value:
    sizes = [hlo.shape(x)[d] for d in dim]
    return _normalized(_complex(x, dim, forward), sizes, normalization, forward)


@lowers(aten._fft_r2c.default)
def fft_r2c(ctx: LoweringContext, x: Value, dim: Sequence[int], normalization: int, onesided: bool) -> Value:
    """Half a spectrum along the last of ``dim`` if ``onesided``."""
    sizes = [hlo.shape(x)[d] for d in dim]
    if onesided:
        half = _transform(x, dim[-1:], "RFFT", sizes[-1:])
        return _normalized(_complex(half, dim[:-1], True), sizes, normalization, True)
    wide = hlo.convert(x, dtypes.complex_of(hlo.dtype(x)))
    return _normalized(_complex(wide, dim, True), sizes, normalization, True)


@lowers(aten._fft_c2r.default)
def fft_c2r(ctx: LoweringContext, x: Value, dim: Sequence[int], normalization: int, last_dim_size: int) -> Value:
    """From half a spectrum along the last of ``dim``, whose full size is ``last_dim_size``."""
    sizes = [*(hlo.shape(x)[d] for d in dim[:-1]), last_dim_size]
    result = _transform(_complex(x, dim[:-1], False), dim[-1:], "IRFFT", sizes[-1:])
    return _normalized(result, sizes, normalization, False)


def _complex(x: Value, dim: Sequence[int], forward: bool) -> Value:
    """Complex transforms of any number of axes."""
    for start in range(0, len(dim), AXES_AT_ONCE):
        axes = dim[start : start + AXES_AT_ONCE]
        x = _transform(x, axes, "FFT" if forward else "IFFT", [hlo.shape(x)[d] for d in axes])
    return x


def _transform(x: Value, dim: Sequence[int], kind: str, lengths: Sequence[int]) -> Value:
    """One stablehlo.fft over ``dim``, moved innermost and back."""
    rank = hlo.rank(x)
    axes = [d % rank for d in dim]
    order = [*(i for i in range(rank) if i not in axes), *axes]
    result = stablehlo.fft(hlo.transpose(x, order), stablehlo.FftTypeAttr.get(kind), list(lengths))
    return hlo.transpose(result, sorted(range(rank), key=order.__getitem__))


def _normalized(x: Value, sizes: Sequence[int], mode: int, forward: bool) -> Value:
    """torch's modes: 0 none, 1 by sqrt(n), 2 by n. StableHLO divides an inverse by n, which mode 0 takes back."""
    count = math.prod(sizes)
    scale = {0: 1.0, 1: 1 / math.sqrt(max(count, 1)), 2: 1 / max(count, 1)}[mode] * (1 if forward else count)
    return x if scale == 1 else stablehlo.multiply(x, hlo.full_like(x, scale))


# ---- frequencies


@lowers(aten.fft_fftfreq.default)
def fft_fftfreq(ctx: LoweringContext, n: int, d: float = 1.0, **_: Any) -> Value:
    counts = hlo.iota([n], 0)
    negative = hlo.compare(counts, hlo.full_like(counts, (n + 1) // 2), "GE")
    wrapped = stablehlo.subtract(counts, hlo.full_like(counts, n))
    return _spaced(ctx, hlo.select(negative, wrapped, counts), n, d)


@lowers(aten.fft_rfftfreq.default)
def fft_rfftfreq(ctx: LoweringContext, n: int, d: float = 1.0, **_: Any) -> Value:
    return _spaced(ctx, hlo.iota([n // 2 + 1], 0), n, d)


def _spaced(ctx: LoweringContext, counts: Value, n: int, d: float) -> Value:
    values = hlo.convert(counts, ctx.out.dtype)
    return stablehlo.multiply(values, hlo.full_like(values, 1 / (n * d)))
