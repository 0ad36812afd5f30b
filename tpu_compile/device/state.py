"""The one `tpu` device of this process: its client, its generator, its mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tpu_compile.device.generator import DeviceGenerator


class Runner(Protocol):
    """How a mode runs eager ops."""

    def run(self, plan: Any, call: Any, schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one call of a plan; returns what the op returns."""

    def flush(self) -> None:
        """Run what was put off."""

    def settled(self, deferred: Any) -> None:
        """Take note that a cell is to hold a buffer in place of the Deferred that it was."""


class DeviceState:
    """What every part of the device shares. There is one: ``device``.

    ``array`` is the type of its buffers. ``runner`` runs the plans of eager ops, None in the ``strict`` mode, where
    they run by themselves; ``synchronous`` says that every op is waited for.
    """

    __slots__ = ("_client", "array", "generator", "mode", "runner", "synchronous")

    def __init__(self) -> None:
        self._client: Any = None
        self.array: Any = None
        self.generator = DeviceGenerator()
        self.mode = ""
        self.runner: Runner | None = None
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
        self.array = type(self._client.put(torch.zeros(1, device="cpu")))


device = DeviceState()
