"""Making storages, changing what a tensor shows of one, and views: kernels that run no program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_compile.device import contents
from tpu_compile.device.storage import cell_of, extent, layout_of, maker
from tpu_compile.lowering.program import row_major

aten = torch.ops.aten
Tensor = torch.Tensor
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """``empty.memory_format``. Nothing is allocated before something is written."""
    check(device, layout, pin_memory)
    shape = tuple(size)
    return maker(shape, _strides(shape, memory_format), dtype or torch.get_default_dtype())()


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """``empty_strided``."""
    check(device, layout, pin_memory)
    return maker(tuple(size), tuple(stride), dtype or torch.get_default_dtype())()


def _strides(shape: tuple[int, ...], memory_format: torch.memory_format | None) -> tuple[int, ...]:
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        return row_major(shape)
    like = torch.empty(shape, device="meta", memory_format=memory_format)
    return tuple(like.stride())


def check(device: Any, layout: Any, pin_memory: bool | None) -> None:
    """Refuse what the device cannot have.

    Raises:
        RuntimeError: another index than 0, a sparse layout, pinned memory.
    """
    if device is not None:
        check_index(device)
    if layout not in (None, torch.strided):
        raise RuntimeError(f"The tpu device has dense tensors only, not {layout}: make it on the CPU.")
    if pin_memory:
        raise RuntimeError("Only dense CPU tensors can be pinned.")


def check_index(device: torch.device) -> None:
    """Refuse another device of our type than the first."""
    if device.type == "tpu" and (device.index or 0) != 0:
        raise RuntimeError(
            f"The process has one tpu device, tpu:0; {device} does not exist. Start one process for each device."
        )


# ---- views: only sizes, strides and the storage's pointer are touched, which the CPU's kernels do


def view_kernel(op: OpOverload) -> Any:
    """A view op's kernel for the CPU, on tensors of this device."""
    redispatch = op.redispatch

    def view(*args: Any, **kwargs: Any) -> Any:
        return redispatch(_CPU, *args, **kwargs)

    return view


# ---- storages


def resize_(t: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    """``resize_``. A storage that has to grow is a new one to torch; all that showed the old one share its contents."""
    shape = tuple(size)
    if shape == tuple(t.shape) and memory_format is None:
        return t
    stride = _strides(shape, memory_format)
    offset = int(t.storage_offset())
    _grow(t, offset + extent(shape, stride))
    return set_window(t, shape, stride, offset)


def _grow(t: Tensor, count: int) -> None:
    """Let ``t`` stand on a storage of at least ``count`` elements."""
    cell = cell_of(t)
    assert cell is not None
    have = cell.nbytes // t.dtype.itemsize
    if have >= count:
        return
    wider = layout_of((count,), t.dtype)
    if contents.ready(cell) or cell.buffer is not None:
        contents.seen_as(cell, t.as_strided((have,), (1,), 0))
        cell.buffer = contents.widened(cell, wider)
    cell.layout = wider
    cell.grow(wider.nbytes)
    fresh = maker((count,), (1,), t.dtype).around(cell)
    aten.set_.source_Storage_storage_offset.redispatch(_CPU, t, fresh.untyped_storage(), 0, (count,), (1,))


def set_window(t: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Change what ``t`` shows of its storage, in place."""
    return aten.set_.source_Storage_storage_offset.redispatch(  # type: ignore[no-any-return]
        _CPU, t, t.untyped_storage(), offset, tuple(shape), tuple(stride)
    )


def set_storage(t: Tensor, source: Any, offset: int, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    """``set_.source_Storage_storage_offset``."""
    shape = tuple(size)
    stride = tuple(stride) or row_major(shape)
    needed = (offset + extent(shape, stride)) * t.dtype.itemsize if 0 not in shape else 0
    if source.nbytes() < needed:
        raise RuntimeError(
            f"setStorage: sizes {list(shape)}, strides {list(stride)}, storage offset {offset}, and itemsize "
            f"{t.dtype.itemsize} requiring a storage size of {needed} are out of bounds for storage of size "
            f"{source.nbytes()}"
        )
    return aten.set_.source_Storage_storage_offset.redispatch(  # type: ignore[no-any-return]
        _CPU, t, source, offset, shape, stride
    )


def set_source_storage(t: Tensor, source: Any) -> Tensor:
    """``set_.source_Storage``."""
    return set_storage(t, source, 0, (source.nbytes() // t.dtype.itemsize,), (1,))


def set_source_tensor(t: Tensor, source: Tensor) -> Tensor:
    """``set_.source_Tensor``."""
    return set_storage(t, source.untyped_storage(), int(source.storage_offset()), source.shape, source.stride())


def set_nothing(t: Tensor) -> Tensor:
    """``set_``: an empty storage."""
    return set_storage(t, maker((0,), (1,), t.dtype)().untyped_storage(), 0, (0,), (1,))
