"""What no rule lowers runs on the CPU and comes back: counted, reported once for each op, and an error on demand."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map

import tpu_compile
from tpu_compile.config import config
from tpu_compile.device import contents
from tpu_compile.device.schemas import Schema
from tpu_compile.device.storage import cell_of
from tpu_compile.device.tracing import isolated
from tpu_compile.errors import Gap, TpuCompileWarning, UnsupportedOp
from tpu_compile.stats import count

_DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_told: set[str] = set()
_OURS = (str(Path(torch.__file__).parent), str(Path(tpu_compile.__file__).parent))


def run(schema: Schema, args: Sequence[Any], kwargs: dict[str, Any], reason: Exception | None = None) -> Any:
    """Run one call on the CPU. What is wrong with its arguments, torch says there in its own words.

    Raises:
        UnsupportedOp: with ``fallback`` set to "error".
    """
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_cpu(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _to_cpu(value, moved)
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "tpu" else value

    cpu_args, cpu_kwargs = tree_map(to_cpu, (tuple(args), kwargs))
    result = isolated(lambda: schema.op(*cpu_args, **cpu_kwargs))
    if config.fallback == "error":
        raise UnsupportedOp([_gap(schema, reason)], "of one eager op")
    count("fallback_ops")
    _tell(schema, reason)
    for name in schema.written:
        tree_map(lambda t: _write_back(t, moved), schema.argument(name, args, kwargs))
    return _results(schema, result, args, kwargs)


def _to_cpu(t: torch.Tensor, moved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    if id(t) not in moved:
        cell = cell_of(t)
        value = t if cell is None else contents.to_cpu(t, cell)
        moved[id(t)] = (t, value)
    return moved[id(t)][1]


def _write_back(t: Any, moved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    if not isinstance(t, torch.Tensor) or cell_of(t) is None:
        return
    value = moved[id(t)][1]
    if value.shape != t.shape:
        t.resize_(value.shape)
    t.copy_(value)


def _results(schema: Schema, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    returned = schema.returned
    if len(returned) == 1:
        return schema.argument(returned[0], args, kwargs) if returned[0] else tree_map(_to_device, result)
    if not returned:
        return None
    pairs = zip(returned, result, strict=True)
    return tuple(schema.argument(n, args, kwargs) if n else tree_map(_to_device, r) for n, r in pairs)


def _to_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_nested or value.is_quantized):
        refuse_layout(value)
    return contents.to_device(value) if isinstance(value, torch.Tensor) else value


def refuse_layout(op: Any, *_: Any, **__: Any) -> NoReturn:
    """What torch's sparse, nested and quantised backends of this device are: an error.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "The tpu device has dense tensors only, no sparse, nested or quantized ones: make those on the CPU, from "
        "tensor.cpu(); give embeddings sparse=False, and nested tensors layout=torch.jagged."
    )


def _gap(schema: Schema, reason: Exception | None) -> Gap:
    if isinstance(reason, UnsupportedOp):
        return Gap(reason.gaps[0].op, reason.gaps[0].reason, user_line(), reason.gaps[0].hint)
    said = str(reason).partition("\n")[0] if reason is not None else "no rule lowers it"
    return Gap(str(schema.op), said or type(reason).__name__, user_line())


def _tell(schema: Schema, reason: Exception | None) -> None:
    """Warn once for each op, but not where no rule could help: the values alone tell the result's shape."""
    name = str(schema.op)
    if name not in _told and not _DATA_DEPENDENT & set(schema.op.tags):
        _told.add(name)
        warnings.warn(
            f"{name} runs on the CPU and its results are copied back:\n  - {_gap(schema, reason)}\n"
            "TPU_COMPILE_FALLBACK=error makes this an error; `tpu_compile.lowers` gives an op a rule.",
            TpuCompileWarning,
            stacklevel=2,
        )


def user_line() -> str:
    """The innermost frame on the stack that is neither torch's nor ours, as ``file:line in function``."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame is not None else ""
