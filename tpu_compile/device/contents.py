"""What the cells hold: buffers put where they belong, read back, and seen as another dtype."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from tpu_compile.device import storage
from tpu_compile.device.background import background
from tpu_compile.device.state import device
from tpu_compile.device.storage import Cell, Dims, HostBytes, Layout, layout_of, living_cells
from tpu_compile.errors import DeviceError, UnsupportedDtype
from tpu_compile.lowering.program import dense_order, row_major


def contents(cell: Cell) -> Any:
    """The buffer of a cell. What was never written reads as zeros."""
    buffer = cell.buffer
    if buffer is None:
        layout = cell.layout
        buffer = cell.buffer = device.client.put(torch.zeros(layout.dims, dtype=layout.dtype, device="cpu"))
    elif type(buffer) is HostBytes:
        layout = cell.layout
        flat = _reinterpreted(buffer.data, layout.dtype)
        buffer = cell.buffer = device.client.put(flat.view(layout.dims))
    elif type(buffer) is not device.array:
        buffer = cell.buffer = _settled(buffer)
    return buffer


def _settled(deferred: Any) -> Any:
    """The buffer of a Deferred: it is waited for.

    Raises:
        DeviceError: the program that was to compute it has failed.
    """
    if deferred.number >= 0 and device.runner is not None:
        device.runner.flush()
    if deferred.buffer is None and deferred.over is not None:
        with deferred.over:
            pass
    if deferred.buffer is None:
        background.drain()
        raise DeviceError("The deferred program that was to compute this tensor has failed.", "FAILED_PRECONDITION")
    if device.runner is not None:
        device.runner.settled(deferred)
    return deferred.buffer


def ready(cell: Cell) -> bool:
    """Whether the cell holds a buffer of its layout already, or will."""
    return cell.buffer is not None and type(cell.buffer) is not HostBytes


def seen_as(cell: Cell, t: torch.Tensor) -> Layout:
    """The cell in ``t``'s dtype, and in its order of axes if that shows all of it; returns the layout.

    Raises:
        UnsupportedDtype: the storage is no whole number of elements.
    """
    shape, dtype = tuple(t.shape), t.dtype
    if cell.nbytes % dtype.itemsize:
        raise UnsupportedDtype(f"A storage of {cell.nbytes} bytes cannot be seen as {dtype} on the tpu device.")
    count = cell.nbytes // dtype.itemsize
    layout = storage.storage_layout(shape, tuple(t.stride()), dtype)
    if layout.numel != count or t.storage_offset():
        layout = layout_of((count,), dtype)
    if ready(cell):
        cell.buffer = converted(cell, layout)
    cell.layout = layout
    return layout


def converted(cell: Cell, layout: Layout) -> Any:
    """The cell's bytes as a buffer of another layout with as many bytes."""
    from tpu_compile.device.programs import reinterpretation

    return reinterpretation(cell.layout, layout)(contents(cell))


# ---- host to device and back


def upload(source: torch.Tensor, order: Dims) -> Any:
    """A CPU tensor as a buffer whose axes are ``source``'s in the given order."""
    ordered = source.detach().permute(order).resolve_conj().resolve_neg()
    return device.client.put(ordered.contiguous())


def download(buffer: Any) -> torch.Tensor:
    """A buffer as a CPU tensor that must not be written."""
    fetched: torch.Tensor = device.client.fetch(buffer)
    return fetched


def host_bytes(cell: Cell) -> torch.Tensor:
    """All of a cell as flat bytes on the CPU. They may be the device's own memory: not to be written."""
    kept = cell.buffer
    flat = kept.data if type(kept) is HostBytes else download(contents(cell)).reshape(-1)
    return _reinterpreted(flat, torch.uint8)


def on_host(t: torch.Tensor, cell: Cell) -> torch.Tensor:
    """The elements of ``t``, by way of its whole cell: for tensors that show most of it, and any dtype of it.

    The result may share the device's memory: it must not be written.
    """
    return _reinterpreted(host_bytes(cell), t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())


def _reinterpreted(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if flat.dtype == dtype:
        return flat
    usable = flat.numel() * flat.dtype.itemsize // dtype.itemsize * dtype.itemsize
    return flat.view(torch.uint8)[:usable].view(dtype)


def shows_most(t: torch.Tensor, cell: Cell) -> bool:
    """Whether reading the whole cell costs little more than reading ``t``."""
    return t.dtype is not cell.layout.dtype or 4 * t.numel() * t.dtype.itemsize >= cell.nbytes or cell.nbytes <= 4096


def covers(t: torch.Tensor, cell: Cell) -> Dims | None:
    """The order of ``t``'s axes in memory if it shows all of its cell, densely; else None."""
    shape = tuple(t.shape)
    if t.storage_offset() or math.prod(shape) * t.dtype.itemsize != cell.nbytes:
        return None
    return dense_order(shape, tuple(t.stride()))


def to_cpu(t: torch.Tensor, cell: Cell) -> torch.Tensor:
    """A copy of a `tpu` tensor on the CPU, with its strides if they are dense."""
    source = t if shows_most(t, cell) else t.clone()
    source_cell = cell if source is t else source.untyped_storage()._tpu_cell  # type: ignore[attr-defined]
    host = on_host(source, source_cell)
    if source.is_conj():
        host = host.conj()
    if source.is_neg():
        host = torch._neg_view(host)
    return host.resolve_conj().resolve_neg().clone()


def to_device(t: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor on the device, with its strides if they are dense."""
    shape, stride = tuple(t.shape), tuple(t.stride())
    order = dense_order(shape, stride)
    if order is None:
        stride, order = row_major(shape), tuple(range(len(shape)))
    return storage.maker(shape, stride, t.dtype)(upload(t, order))


def widened(cell: Cell, layout: Layout) -> Any:
    """The contents of a flat cell, followed by zeros up to the size of another flat layout of its dtype."""
    from tpu_compile.device.programs import widening

    return widening(cell.layout, layout)(contents(cell))


def copied(cell: Cell) -> Any:
    """A new storage (its Python object) with a copy of a cell's contents."""
    from tpu_compile.device.programs import duplicate

    if ready(cell):
        fresh = Cell(cell.layout, duplicate(contents(cell), cell.layout))
    else:
        kept = cell.buffer
        fresh = Cell(cell.layout, HostBytes(kept.data.clone()) if type(kept) is HostBytes else kept)
    return storage.maker((cell.nbytes,), (1,), torch.uint8).around(fresh).untyped_storage()


def release(cell: Cell, nbytes: int) -> None:
    """Forget the contents and count ``nbytes`` for the cell from now on; nothing happens if that is what it has."""
    if nbytes != cell.nbytes:
        cell.buffer = None
        cell.grow(nbytes)
        cell.layout = layout_of((nbytes,), torch.uint8)


def from_bytes(data: torch.Tensor) -> Any:
    """A new storage (its Python object) with a copy of bytes on the CPU, which move to the device when used."""
    nbytes = data.numel()
    cell = Cell(layout_of((nbytes,), torch.uint8), HostBytes(data.clone()))
    return storage.maker((nbytes,), (1,), torch.uint8).around(cell).untyped_storage()


def refill(cell: Cell, data: torch.Tensor) -> None:
    """Replace the contents by bytes on the CPU, which move to the device when they are used."""
    cell.buffer = HostBytes(data)


def _allocated(cell: Cell) -> bool:
    """Whether the cell takes memory of the device now, and not only after what was put off has run."""
    return type(cell.buffer) is device.array or getattr(cell.buffer, "buffer", None) is not None


def living(most: int = 8) -> str:
    """What the device holds: a line for each kind of buffer, the largest first, for errors about memory."""
    cells = [cell for cell in living_cells() if _allocated(cell)]
    sizes: Counter[Layout] = Counter()
    for cell in cells:
        sizes[cell.layout] += cell.nbytes
    lines = [
        f"  {total:,} bytes in {total // max(layout.nbytes, 1)} x {layout}" for layout, total in sizes.most_common(most)
    ]
    return "\n".join([f"{len(cells)} buffers of {sum(sizes.values()):,} bytes were alive on the tpu device:", *lines])
