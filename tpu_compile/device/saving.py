"""``torch.load`` onto the device: torch's own way asks for an allocator, which a backend in Python does not have."""

from __future__ import annotations

import re
from typing import Any

import torch

_PRIORITY = 19
"""Before torch's package for PrivateUse1 (23)."""


def register() -> None:
    """Tell ``torch.save`` and ``torch.load`` about storages of the device."""
    torch.serialization.register_package(_PRIORITY, _tag, _restore)


def _tag(storage: Any) -> str | None:
    return "tpu:0" if storage.device.type == "tpu" else None


def _restore(storage: Any, location: str) -> Any:
    if not re.fullmatch(r"tpu(:\d+)?", location):
        return None
    from tpu_compile.device import contents, module

    module.set_device(location)
    if storage.device.type == "tpu":
        return storage
    return contents.from_bytes(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
