"""Storages of the `tpu` device: what a torch storage holds (a Cell), how its memory is laid out, and what of it a
tensor shows.

A tensor is made from a DLPack capsule that names an external device: torch gives it a true storage, which view ops
share, and never looks behind its pointer. The Cell is an attribute of that storage's Python object, which torch keeps
as long as the storage lives: it dies with the last alias, whatever exception may be pending.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import ref

import torch

from tpu_compile.device.meter import meter
from tpu_compile.device.untyped import TpuStorage
from tpu_compile.errors import UnsupportedDtype
from tpu_compile.lowering import memory
from tpu_compile.lowering.memory import BOX, FLAT, MERGED, PLACES, WHOLE
from tpu_compile.lowering.program import dense_order, row_major

Dims = tuple[int, ...]


class Layout:
    """Sizes and dtype of a buffer; its elements lie in row-major order. One object for each, so that ``is`` compares.

    ``windows`` remembers what tensors have shown of such a buffer: looking one up is most of an op's bookkeeping.
    """

    __slots__ = ("complex", "dims", "dtype", "nbytes", "numel", "signatures", "windows")

    def __init__(self, dims: Dims, dtype: torch.dtype) -> None:
        self.dims, self.dtype, self.numel = dims, dtype, math.prod(dims)
        self.nbytes, self.complex = self.numel * dtype.itemsize, dtype.is_complex
        self.windows: dict[Any, Window] = {}
        self.signatures: dict[Any, Signature] = {}

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.dims)}"

    def window(self, size: Dims, stride: Dims, offset: int) -> Window:
        """What a tensor of these sizes, strides and offset shows of the buffer."""
        key = (size, stride, offset)
        known = self.windows.get(key)
        if known is None:
            mode, start = _place(self, size, stride, offset)
            signature = self.signatures.get((mode, size, stride))
            if signature is None:
                signature = self.signatures[mode, size, stride] = Signature(self, mode, size, stride)
            if len(self.windows) >= _REMEMBERED:
                self.windows.clear()
            known = self.windows[key] = Window(signature, start)
        return known


_REMEMBERED = 4096


@dataclass(frozen=True, eq=False)
class Signature:
    """A window but for where it begins: all that a program depends on. One object for each, so that ``is`` compares."""

    layout: Layout
    mode: str
    size: Dims
    stride: Dims

    @property
    def plain(self) -> bool:
        """Whether the tensor is the buffer, axis for axis."""
        return self.mode == WHOLE and self.size == self.layout.dims and self.stride == row_major(self.size)

    @property
    def nothing(self) -> bool:
        """Whether the tensor shows nothing of a buffer that holds something: writing to it leaves that as it is."""
        return 0 in self.size and self.layout.numel > 0


@dataclass(frozen=True, eq=False)
class Window:
    """What a tensor shows of its cell. ``start`` is where, None if it is the whole buffer or nothing at all."""

    signature: Signature
    start: tuple[int, ...] | None


def _place(layout: Layout, size: Dims, stride: Dims, offset: int) -> tuple[str, tuple[int, ...] | None]:
    count = math.prod(size)
    if not count:
        return WHOLE, None
    if not offset and count == layout.numel and dense_order(size, stride) is not None:
        return WHOLE, None
    for mode in (BOX, FLAT, MERGED):
        grid = memory.grid(layout.dims, size, stride, mode)
        start = grid and grid.start(offset)
        if start:
            return mode, start
    return PLACES, (offset,)


@cache
def layout_of(dims: Dims, dtype: torch.dtype) -> Layout:
    """The Layout of these sizes and dtype."""
    return Layout(dims, dtype)


class Cell:
    """The contents of one storage: an immutable buffer that is replaced when somebody writes.

    ``buffer`` is None while nothing has been written, or what ``contents`` turns into a buffer at the first use.
    """

    __slots__ = ("__weakref__", "buffer", "layout", "nbytes", "watchers")

    watchers: tuple[ref[Kept], ...]
    """Who keeps the buffer (of a WatchedCell)."""

    def __init__(self, layout: Layout, buffer: Any = None) -> None:
        self.layout, self.buffer = layout, buffer
        self.nbytes = layout.nbytes
        meter.cells += 1
        meter.made += 1
        meter.bytes += self.nbytes
        if meter.bytes > meter.peak:
            meter.peak = meter.bytes
        _living[id(self)] = ref(self)

    def grow(self, nbytes: int) -> None:
        """Count more bytes for it from now on."""
        meter.bytes += nbytes - self.nbytes
        meter.peak = max(meter.peak, meter.bytes)
        self.nbytes = nbytes

    def __del__(self) -> None:
        meter.cells -= 1
        meter.bytes -= self.nbytes
        _living.pop(id(self), None)


_living: dict[int, ref[Cell]] = {}


class Kept:
    """Buffers that a plan keeps between calls. None as soon as a cell that they come from is written or dies.

    ``distinct``: no buffer is there twice. ``alone``: the watchers of a cell that nobody else watches.
    """

    __slots__ = ("__weakref__", "alone", "buffers", "distinct")

    def __init__(self) -> None:
        self.buffers: list[Any] = []
        self.distinct = False
        self.alone = (ref(self),)


class WatchedCell(Cell):
    """A cell whose buffer is kept elsewhere too: a class of its own, so that writing any other costs nothing more."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        watchers = self.watchers
        object.__setattr__(self, "__class__", Cell)
        setattr(self, name, value)
        _empty(watchers)

    def __del__(self) -> None:
        _empty(self.watchers)
        super().__del__()


def _empty(watchers: Sequence[ref[Kept]]) -> None:
    for watcher in watchers:
        kept = watcher()
        if kept is not None:
            kept.buffers.clear()


def watch(cell: Cell, kept: Kept) -> None:
    """Have ``kept`` emptied at the next change of the cell."""
    if type(cell) is not WatchedCell:
        cell.watchers = kept.alone
        cell.__class__ = WatchedCell
    elif not watched(cell, kept):
        others = [watcher for watcher in cell.watchers if watcher() is not None]
        _set_watchers(cell, (*others, *kept.alone) if others else kept.alone)


def watched(cell: Cell, kept: Kept) -> bool:
    """Whether the cell is what it was when ``kept`` began to watch it, or what ``rewrite`` made of it."""
    return type(cell) is WatchedCell and (cell.watchers is kept.alone or kept.alone[0] in cell.watchers)


def rewrite(cells: Sequence[Cell], buffers: Sequence[Any], kept: Kept) -> None:
    """Write cells on behalf of ``kept``, which then is emptied only if somebody else watches one of them too."""
    alone = kept.alone
    for cell, buffer in zip(cells, buffers, strict=True):
        if type(cell) is WatchedCell and cell.watchers is alone:
            _set_buffer(cell, buffer)
        else:
            cell.buffer = buffer


_set_buffer, _set_watchers = vars(Cell)["buffer"].__set__, vars(Cell)["watchers"].__set__


def living_cells() -> list[Cell]:
    """All cells that somebody holds."""
    return [cell for known in list(_living.values()) if (cell := known()) is not None]


@dataclass(frozen=True)
class HostBytes:
    """Contents that are still on the host (uint8, flat): they move when it is known what they are used as."""

    data: torch.Tensor = field(repr=False)


def cell_of(t: torch.Tensor) -> Cell | None:
    """The cell of a `tpu` tensor; None for a tensor of another device."""
    return getattr(t.untyped_storage(), "_tpu_cell", None)


# ---- making tensors

_EXTERNAL_DEVICE = 12  # kDLExtDev, which torch reads as PrivateUse1
_CODES = {
    torch.float32: 2,
    torch.float64: 2,
    torch.float16: 2,
    torch.bfloat16: 4,
    torch.int64: 0,
    torch.int32: 0,
    torch.int16: 0,
    torch.int8: 0,
    torch.uint8: 1,
    torch.uint16: 1,
    torch.uint32: 1,
    torch.uint64: 1,
    torch.bool: 6,
    torch.complex64: 5,
    torch.complex128: 5,
    torch.float8_e4m3fn: 10,
    torch.float8_e4m3fnuz: 11,
    torch.float8_e5m2: 12,
    torch.float8_e5m2fnuz: 13,
}
"""DLPack's type codes."""

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_from_dlpack = torch._C._from_dlpack
_ALIGNMENT = 256


class _Addresses:
    """Hands out addresses that nobody dereferences: two storages never overlap, and none is ever used again."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next = 1 << 40


_addresses = _Addresses()


class TensorMaker:
    """Makes tensors of one shape, stride and dtype. The DLManagedTensor is made once and lent to every import:
    torch copies sizes and strides, and without a deleter it never comes back to it."""

    __slots__ = ("_address", "_data", "_memory", "_numbers", "_step", "layout", "shape", "stride")

    def __init__(self, shape: Dims, stride: Dims, dtype: torch.dtype) -> None:
        if dtype not in _CODES:
            raise UnsupportedDtype(f"The tpu device has no {dtype} tensors. Convert on the CPU first.")
        self.shape, self.stride = shape, stride
        rank = len(shape)
        self._numbers = (ctypes.c_int64 * (2 * rank))(*shape, *stride)
        numbers = ctypes.addressof(self._numbers) if rank else 0
        bits = 8 if dtype == torch.bool else 8 * dtype.itemsize
        head = (0, _EXTERNAL_DEVICE, 0, rank, _CODES[dtype], bits, 1, numbers, numbers and numbers + 8 * rank, 0, 0, 0)
        self._memory = ctypes.create_string_buffer(struct.pack("<QiiiBBHQQQQQ", *head))
        self._data = ctypes.c_uint64.from_buffer(self._memory)
        self._address = ctypes.c_void_p(ctypes.addressof(self._memory))
        self.layout = storage_layout(shape, stride, dtype)
        self._step = -(-max(self.layout.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT

    def __call__(self, buffer: Any = None) -> torch.Tensor:
        """A new tensor on a storage of its own, holding ``buffer`` (laid out as ``layout``)."""
        return self.around(Cell(self.layout, buffer))

    def around(self, cell: Cell) -> torch.Tensor:
        """A tensor on a new storage that shows an existing cell."""
        address = _addresses.next
        _addresses.next = address + self._step
        self._data.value = address
        tensor: torch.Tensor = _from_dlpack(_new_capsule(self._address, b"dltensor", None))
        storage: Any = tensor.untyped_storage()
        storage.__class__ = TpuStorage
        storage._tpu_cell = cell
        return tensor


@cache
def maker(shape: Dims, stride: Dims, dtype: torch.dtype) -> TensorMaker:
    """The TensorMaker of these sizes, strides and dtype.

    Raises:
        UnsupportedDtype: DLPack has no such dtype.
    """
    return TensorMaker(shape, stride, dtype)


def storage_layout(shape: Dims, stride: Dims, dtype: torch.dtype) -> Layout:
    """How a new storage for a tensor is laid out: in the tensor's own order if it is dense, else flat."""
    order = dense_order(shape, stride)
    if order is not None and len(order) == len(shape):
        return layout_of(tuple([shape[i] for i in order]), dtype)
    return layout_of((extent(shape, stride),), dtype)


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie between the first and the last of a tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
