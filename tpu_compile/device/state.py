"""The one `tpu` device of this process: its client, its generator, its mode."""

from __future__ import annotations

from typing import Any

import torch

from tpu_compile.device.generator import DeviceGenerator


class DeviceState:
    """What every part of the device shares. There is one: ``device``.

    ``array`` is the type of its buffers. ``pending`` is the recorder of the ``defer`` mode, None in the other modes;
    ``synchronous`` says that every op is waited for.
    """

    __slots__ = ("_client", "array", "generator", "mode", "pending", "synchronous")

    def __init__(self) -> None:
        self._client: Any = None
        self.array: Any = None
        self.generator = DeviceGenerator()
        self.mode = "strict"
        self.pending: Any = None
        self.synchronous = False

    @property
    def client(self) -> Any:
        """The PJRT client, of the platform in force when the device was first used."""
        if self._client is None:
            self.open()
        return self._client

    @property
    def opened(self) -> bool:
        """Whether anything has used the device yet."""
        return self._client is not None

    def open(self) -> None:
        """Open the client."""
        from tpu_compile.compiler import runtime

        self._client = runtime.client
        self.array = type(self._client.put(torch.zeros(1)))


device = DeviceState()
