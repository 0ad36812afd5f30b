"""Results that torch's own meta functions refuse, because a GPU kernel would: on this device the op takes more."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


class TraceMode(FakeTensorMode):
    """The FakeTensorMode of an eager op's trace: its CPU tensors stand for the device's."""


def register() -> None:
    """Tell FakeTensor; tensors of other devices are left to torch."""
    register_op_impl(aten._grouped_mm.default)(grouped_mm)
    register_op_impl(aten.histc.default)(histc)
    register_op_impl(aten._thnn_fused_lstm_cell.default)(fused_lstm_cell)


def grouped_mm(
    mode: FakeTensorMode, func: Any, x: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """``_grouped_mm`` in every dtype; torch's meta function takes bfloat16 only."""
    if not (isinstance(mode, TraceMode) or x.device.type == "tpu"):
        return NotImplemented
    grouped_rows, grouped_columns = x.dim() == 2, mat2.dim() == 2
    if grouped_rows and grouped_columns:
        shape: tuple[Any, ...] = (offs.size(0), x.size(0), mat2.size(1))
    elif grouped_rows:
        shape = (x.size(0), mat2.size(-1))
    else:
        shape = (x.size(1), mat2.size(1)) if grouped_columns else (x.size(0), x.size(1), mat2.size(-1))
    with mode:
        return torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)


def histc(mode: FakeTensorMode, func: Any, x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """``histc`` of integers too; torch's meta function says what its CPU kernel cannot do."""
    if not (isinstance(mode, TraceMode) or x.device.type == "tpu"):
        return NotImplemented
    with mode:
        return torch.empty((bins,), dtype=x.dtype, device=x.device)


def fused_lstm_cell(mode: FakeTensorMode, func: Any, input_gates: Any, hidden_gates: Any, cx: Any, *biases: Any) -> Any:
    """The cell without biases too; torch's meta function looks at their device."""
    if not (isinstance(mode, TraceMode) or cx.device.type == "tpu"):
        return NotImplemented
    with mode:
        return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(input_gates)
