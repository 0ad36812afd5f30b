"""Tensors as a safetensors file: written piece by piece, read as views of mapped memory.

The format is a JSON header (name → dtype, shape, place) and the tensors' bytes. A dtype that it has no name for is
written as bytes, and the manifest says what it was.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tpu_compile.exporting import archive

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SIZE = struct.Struct("<Q")
_MAX_HEADER = 100_000_000


def write(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The file, piece by piece. Tensors may be anywhere but on ``meta``."""
    header, place = {}, 0
    for name, t in tensors.items():
        end = place + t.numel() * t.dtype.itemsize
        named = _NAMES.get(t.dtype)
        shape = list(t.shape) if named else [end - place]
        header[name] = {"dtype": named or "U8", "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield _SIZE.pack(len(text)) + text
    for t in tensors.values():
        yield from archive.pieces(_bytes(t))


def _bytes(t: torch.Tensor) -> memoryview:
    """The elements in row-major order."""
    whole = t.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not whole.numel():
        return memoryview(b"")
    return memoryview(whole.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read(file: memoryview) -> dict[str, torch.Tensor]:
    """The tensors as views of ``file``, without a copy.

    Raises:
        ValueError, KeyError, TypeError, struct.error: it is no safetensors file.
    """
    (size,) = _SIZE.unpack_from(file, 0)
    if size > min(_MAX_HEADER, len(file) - _SIZE.size):
        raise ValueError("a header that is longer than the file")
    header = json.loads(bytes(file[_SIZE.size : _SIZE.size + size]))
    data = file[_SIZE.size + size :]
    return {name: _tensor(data, entry) for name, entry in header.items() if name != "__metadata__"}


def _tensor(data: memoryview, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, start, end)):
        raise ValueError("a size that is no number")
    if end - start != math.prod(shape) * dtype.itemsize or end > len(data):
        raise ValueError("a tensor that lies outside the file")
    if start == end:
        return torch.empty(shape, dtype=dtype, device="cpu")
    place = data[start:end]
    aligned = torch.frombuffer(place, dtype=torch.uint8)
    if aligned.data_ptr() % dtype.itemsize:
        aligned = aligned.clone()
    return aligned.view(dtype).reshape(shape)


def restored(t: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that was written as bytes, in the type that the manifest names.

    Raises:
        ValueError, RuntimeError: the sizes do not fit.
    """
    if t.dtype == dtype and tuple(t.shape) == shape:
        return t
    if dtype in _NAMES or t.dtype != torch.uint8 or t.numel() != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor {t.dtype}{list(t.shape)} in place of {dtype}{list(shape)}")
    return t.clone().view(dtype).reshape(shape)
