"""PJRT plugins: which library serves a platform, and opening it."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Any

from tpu_compile.errors import PluginNotFound


def default_platform() -> str:
    """``tpu`` where a TPU is attached to this machine, else ``cpu``. Loads nothing."""
    return "tpu" if glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*") else "cpu"


def open_plugin(platform: str, options: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    raise PluginNotFound(f"No PJRT plugin for {platform!r}")
