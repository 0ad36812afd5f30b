"""How eager ops run: ``strict``, ``debug`` or ``defer``."""

from __future__ import annotations

from tpu_compile.config import KNOBS
from tpu_compile.device.state import device


def choose(mode: str, nans: bool = False) -> None:
    """Change the mode. What was put off runs first.

    Args:
        nans: in the ``debug`` mode, raise where a result holds a NaN and no argument did.

    Raises:
        ConfigError: there is no such mode.
    """
    KNOBS["eager_mode"].check(mode, "torch.tpu.set_mode")
    if device.runner is not None:
        device.runner.flush()
    device.mode, device.synchronous, device.runner = mode, mode == "debug", None
    if mode == "debug":
        from tpu_compile.device.debug import Debugger

        device.runner = Debugger(nans)
    elif mode == "defer":
        from tpu_compile.device.defer import Recorder

        device.runner = Recorder()
