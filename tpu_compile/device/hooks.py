"""What torch's C++ asks a backend for."""

from __future__ import annotations

from typing import Any

import torch


class Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc, name-defined]
    """Answers about the device as a whole."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc, name-defined]
    """Says which device type the guard is for; with one device there is nothing to switch."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]
