"""Copies between the device and the CPU, and what reads a number: these cannot be programs alone."""

from __future__ import annotations

from typing import Any

import torch

from tpu_compile.device import contents, memory
from tpu_compile.device.storage import Cell, HostBytes, cell_of, storage_layout

aten = torch.ops.aten
Tensor = torch.Tensor


def copy_(generic: Any) -> Any:
    """The kernel of ``copy_``. Between tensors of the device it is an op like any other, ``generic``."""

    def copy(dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        to, source = cell_of(dst), cell_of(src)
        if to is not None and source is not None:
            return dst if dst is src else generic(dst, src)
        if to is not None:
            _from_host(dst, to, src, generic)
        else:
            assert source is not None, "copy_ of two CPU tensors"
            dst.copy_(_readable(src, source).expand(dst.shape))
        return dst

    return copy


def _from_host(dst: Tensor, cell: Cell, src: Tensor, generic: Any) -> None:
    """Overwrite a tensor with a CPU tensor: straight into its cell if it shows all of it."""
    order = contents.covers(dst, cell)
    source = src.detach().to(dst.dtype).expand(dst.shape)
    if order is None or dst.is_conj() or dst.is_neg():
        generic(dst, contents.to_device(source))
        return
    if dst.dtype == torch.uint8 and cell.layout.dtype != torch.uint8:
        cell.buffer = HostBytes(source.clone().reshape(-1))  # bytes of a storage: they get a dtype when they are used
        return
    layout = storage_layout(tuple(dst.shape), tuple(dst.stride()), dst.dtype)
    cell.buffer, cell.layout = contents.upload(source, order), layout


def _readable(src: Tensor, cell: Cell) -> Tensor:
    """A tensor's elements on the CPU; not to be written."""
    if src.is_conj() or src.is_neg() or not contents.shows_most(src, cell):
        return contents.to_cpu(src, cell)
    return contents.on_host(src, cell)


def to_copy(generic: Any) -> Any:
    """The kernel of ``_to_copy``, which torch asks for where either end is this device. ``generic`` stays on it."""

    def to(t: Tensor, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None) or t.device
        wanted = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format") and v is not None}
        cell = cell_of(t)
        if device.type == "tpu":
            memory.check(device, kwargs.get("layout"), kwargs.get("pin_memory"))
            if cell is not None:
                return generic(t, **wanted)  # type: ignore[no-any-return]
            return contents.to_device(aten._to_copy(t, device=torch.device("cpu"), **wanted))
        assert cell is not None, "_to_copy between two other devices"
        host = contents.to_cpu(t, cell)
        return aten._to_copy(host, device=device, **wanted) if wanted or device.type != "cpu" else host

    return to


def copy_from(src: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    """``_copy_from``: the same as ``dst.copy_(src)``, asked for by the CPU's kernels."""
    return dst.copy_(src)


def copy_from_and_resize(src: Tensor, dst: Tensor) -> Tensor:
    """``_copy_from_and_resize``: what results of the CPU reach their ``out=`` by."""
    dst.resize_(src.shape)
    return dst.copy_(src)


def index_put_impl(generic: Any) -> Any:
    """The kernel of ``_index_put_impl_``, which backward passes call: ``index_put_`` has the rule."""

    def put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Tensor:
        return aten.index_put_(x, indices, values, accumulate)  # type: ignore[no-any-return]

    return put


def item(t: Tensor) -> Any:
    """``_local_scalar_dense``: waits for the value."""
    cell = cell_of(t)
    assert cell is not None
    return _readable(t, cell).item()


def equal(a: Tensor, b: Tensor) -> bool:
    """``torch.equal``: compared on the device, one bit comes back."""
    if a.shape != b.shape:
        return False
    return True if not a.numel() else bool((a == b).all().item())
