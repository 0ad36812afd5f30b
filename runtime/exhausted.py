"""Memory that a device refused, as this package and torch know it."""

from __future__ import annotations

import torch

from tpu_compile.errors import OutOfMemory


class DeviceOutOfMemory(OutOfMemory, torch.OutOfMemoryError):
    """Also torch's own error, which training loops catch to go on with a smaller batch."""
