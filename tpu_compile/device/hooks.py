"""What torch's C++ asks a backend for."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """Answers about the device as a whole."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class Guard(torch._C._acc.DeviceGuard):
    """Says which device type the guard is for; with one device there is nothing to switch."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def avoid_null_allocator() -> None:
    """``torch.UntypedStorage(n, device="tpu")`` calls the backend's allocator, which nobody can set from Python, and
    crashes. With that of the meta device it makes a storage without memory, and using that raises."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    get = library._ZN3c1012GetAllocatorERKNS_10DeviceTypeE
    put = library._ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.POINTER(ctypes.c_int8)]
    put.restype, put.argtypes = None, [ctypes.c_int8, ctypes.c_void_p, ctypes.c_uint8]
    kinds: Any = torch._C._autograd.DeviceType
    put(int(kinds.PrivateUse1), get(ctypes.byref(ctypes.c_int8(int(kinds.Meta)))), 0)
