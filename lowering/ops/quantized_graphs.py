"""What torch's quantisation by export writes into a graph (``quantized_decomposed``), through torch's own Python.

These operators are defined where they are used (``torch.ao``), so they are known here by name only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpu_compile.lowering.composite import lower_traced
from tpu_compile.lowering.context import LoweringContext
from tpu_compile.lowering.registry import RuleFunction, registry

_LIBRARY = "quantized_decomposed"
_AS_TORCH_WRITES_IT = (
    "quantize_per_tensor",
    "dequantize_per_tensor",
    "quantize_per_channel",
    "dequantize_per_channel",
    "quantize_per_token",
    "dequantize_per_token",
    "dequantize_per_channel_group",
)


def _quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: Any, quant_max: Any, dtype: torch.dtype
) -> Tensor:
    # torch takes the numbers out of their tensors: 1 / scale is a float64, rounded where it meets the float32 values
    inverse = scale.double().reciprocal().float()
    return torch.clamp(torch.round(x.float() * inverse) + zero_point, quant_min, quant_max).to(dtype)


def _dequantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    kind = out_dtype or torch.float32
    return (x.to(kind) - zero_point.to(kind)) * scale.to(kind)


_WITH_NUMBERS_IN_TENSORS = {"quantize_per_tensor": _quantize, "dequantize_per_tensor": _dequantize}


def _traced(function: Callable[..., Any]) -> RuleFunction:
    def rule(ctx: LoweringContext, *args: Any, **kwargs: Any) -> Any:
        results = lower_traced(ctx, lambda given, named: function(*given, **named), args, kwargs)
        return results[0] if len(results) == 1 else tuple(results)

    return rule


def _own_kernel(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module("torch.ao.quantization.fx._decomposed")  # where the operator was defined
        return getattr(module, name)(*args, **kwargs)

    return kernel


for _name in _AS_TORCH_WRITES_IT:
    registry.register(f"{_LIBRARY}::{_name}", _traced(_own_kernel(_name)))
for _name, _function in _WITH_NUMBERS_IN_TENSORS.items():
    for _overload in ("tensor", "tensor2"):
        registry.register(f"{_LIBRARY}::{_name}.{_overload}", _traced(_function))
