"""Waiting for the device."""

from __future__ import annotations

from tpu_compile.device import contents
from tpu_compile.device.state import device
from tpu_compile.device.storage import living_cells


def synchronize() -> None:
    """Wait until every buffer that a tensor holds is computed.

    Raises:
        DeviceError: the program that makes one of them failed.
    """
    if device.runner is not None:
        device.runner.flush()
    client = device.client
    client.ready([contents.contents(cell) for cell in living_cells() if contents.ready(cell)])
