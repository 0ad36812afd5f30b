"""Waiting for the device."""

from __future__ import annotations

import gc

from tpu_compile.device import contents
from tpu_compile.device.state import device
from tpu_compile.device.storage import Cell


def synchronize() -> None:
    """Wait until every buffer that a tensor holds is computed.

    Raises:
        DeviceError: the program that makes one of them failed.
    """
    if device.runner is not None:
        device.runner.flush()
    client = device.client
    cells = [cell for cell in gc.get_objects() if type(cell) is Cell]
    client.ready([contents.contents(cell) for cell in cells if contents.ready(cell)])
