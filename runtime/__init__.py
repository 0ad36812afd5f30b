"""The device: a PJRT client, buffers exchanged with torch, compiled programs. It knows no FX and builds no MLIR.

    client = open_client()                                  the TPU of this machine, else the CPU
    program = client.compile(bytecode, "graph 0", CompileOptions())
    results = program.execute([client.share(tensor)])
    client.ready(results)
    tensors = [client.fetch(result) for result in results]

Importing this package costs nothing: jaxlib and torch are loaded by the first ``open_client``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tpu_compile.config import set_environment_default
from tpu_compile.runtime.options import CompileOptions

if TYPE_CHECKING:
    from tpu_compile.runtime.client import Client

__all__ = ["CompileOptions", "open_client"]


def open_client(platform: str = "", plugin_options: Mapping[str, str] | None = None) -> Client:
    """The process's client for a platform; opened once, then shared by all threads.

    Args:
        platform: ``cpu``, ``tpu``, ``cuda``, or the path or name of a PJRT plugin. Empty: the TPU of this machine if it
            has one, else ``cpu``.
        plugin_options: client options of the plugin, as text.

    Raises:
        PluginNotFound: nothing on this machine serves the platform.
        ConfigError: options that the platform does not take.
    """
    # XLA reads it once, when jaxlib is loaded: without it every client announces its devices on stderr.
    set_environment_default(TF_CPP_MIN_LOG_LEVEL="1")
    from tpu_compile.runtime import client

    return client.open_client(platform, plugin_options or {})
