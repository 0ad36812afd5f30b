"""torch dtypes, MLIR element types and numpy dtypes: one table, and the promotion rule that Python scalars and 0-dim
tensors follow."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from jaxlib.mlir import ir
from torch.utils._python_dispatch import _disable_current_modes

from tpu_compile.errors import UnsupportedDtype
from tpu_compile.lowering.program import CARRIED

_MLIR = {
    torch.bool: lambda: ir.IntegerType.get_signless(1),
    torch.int8: lambda: ir.IntegerType.get_signless(8),
    torch.int16: lambda: ir.IntegerType.get_signless(16),
    torch.int32: lambda: ir.IntegerType.get_signless(32),
    torch.int64: lambda: ir.IntegerType.get_signless(64),
    torch.uint8: lambda: ir.IntegerType.get_unsigned(8),
    torch.uint16: lambda: ir.IntegerType.get_unsigned(16),
    torch.uint32: lambda: ir.IntegerType.get_unsigned(32),
    torch.uint64: lambda: ir.IntegerType.get_unsigned(64),
    torch.float16: ir.F16Type.get,
    torch.bfloat16: ir.BF16Type.get,
    torch.float32: ir.F32Type.get,
    torch.float64: ir.F64Type.get,
    torch.float8_e4m3fn: ir.Float8E4M3FNType.get,
    torch.float8_e4m3fnuz: ir.Float8E4M3FNUZType.get,
    torch.float8_e5m2: ir.Float8E5M2Type.get,
    torch.float8_e5m2fnuz: ir.Float8E5M2FNUZType.get,
    torch.complex32: lambda: ir.ComplexType.get(ir.F32Type.get()),  # see CARRIED
    torch.complex64: lambda: ir.ComplexType.get(ir.F32Type.get()),
    torch.complex128: lambda: ir.ComplexType.get(ir.F64Type.get()),
}
_FLOAT_CLASSES = {
    ir.F16Type: torch.float16,
    ir.BF16Type: torch.bfloat16,
    ir.F32Type: torch.float32,
    ir.F64Type: torch.float64,
    ir.Float8E4M3FNType: torch.float8_e4m3fn,
    ir.Float8E4M3FNUZType: torch.float8_e4m3fnuz,
    ir.Float8E5M2Type: torch.float8_e5m2,
    ir.Float8E5M2FNUZType: torch.float8_e5m2fnuz,
}
_SIGNED = {1: torch.bool, 8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_UNSIGNED = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}
NUMPY = {
    torch.bool: np.bool_,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
    torch.complex32: np.complex64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
_OPMATH = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX = {torch.float64: torch.complex128, torch.complex128: torch.complex128}


def element_type(dtype: torch.dtype) -> ir.Type:
    """The MLIR element type of ``dtype``, in the current context. Raises UnsupportedDtype."""
    make = _MLIR.get(dtype)
    if make is None:
        raise UnsupportedDtype(
            f"StableHLO has no element type for {dtype}. Convert the tensor first, e.g. with .to(torch.float32)."
        )
    return make()


def from_element_type(element: ir.Type) -> torch.dtype:
    """The torch dtype of an MLIR element type."""
    dtype = _FLOAT_CLASSES.get(type(element))
    if dtype is not None:
        return dtype
    if isinstance(element, ir.IntegerType):
        return (_UNSIGNED if element.is_unsigned else _SIGNED)[element.width]
    return torch.complex128 if isinstance(ir.ComplexType(element).element_type, ir.F64Type) else torch.complex64


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """A host copy of ``t`` as a C-contiguous numpy array of the same bits."""
    with _disable_current_modes():  # AOTAutograd compiles under a FakeTensorMode, which refuses real tensors
        t = t.to(CARRIED.get(t.dtype, t.dtype)).detach().cpu().resolve_conj().resolve_neg().contiguous()
        if t.dtype in (torch.bfloat16, *(d for d in NUMPY if d.is_floating_point and d.itemsize == 1)):
            carrier = {1: torch.uint8, 2: torch.int16}[t.dtype.itemsize]
            return t.view(carrier).numpy().view(NUMPY[t.dtype]).copy()
        return t.numpy().copy()


def is_integer(dtype: torch.dtype) -> bool:
    """Integers, not bool."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype torch computes in for data of ``dtype``: float32 for the 16-bit floats."""
    return _OPMATH.get(dtype, dtype)


def real(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a complex number's parts; other dtypes as they are. Raises UnsupportedDtype for complex32."""
    if dtype.is_complex and dtype not in _REAL:
        element_type(dtype)
    return _REAL.get(dtype, dtype)


def complex_of(dtype: torch.dtype) -> torch.dtype:
    """The complex dtype whose parts are ``dtype``."""
    return _COMPLEX.get(dtype, torch.complex64)


def _scalar_dtype(value: Any) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    return torch.get_default_dtype() if isinstance(value, float) else complex_of(torch.get_default_dtype())


def promote(tensors: Iterable[tuple[torch.dtype, int]], scalars: Iterable[Any] = ()) -> torch.dtype:
    """torch's ``result_type`` of tensors given as (dtype, rank) and Python scalars: a lower tier only widens the
    category."""
    tensors = tuple(tensors)
    dimensioned = _join(d for d, rank in tensors if rank)
    zero_dim = _join(d for d, rank in tensors if not rank)
    result = _combine(dimensioned, _combine(zero_dim, _join(map(_scalar_dtype, scalars))))
    assert result is not None, "promote() of nothing"
    return result


def _join(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    present = list(dtypes)
    return functools.reduce(torch.promote_types, present) if present else None


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return complex_of(higher) if lower.is_complex else higher
    if higher == torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher
