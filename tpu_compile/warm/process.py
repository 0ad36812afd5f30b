"""When this process started: a source file that is newer may not be what runs here."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

_IMPORTED = time.time()
_START_TICKS = 19
"""Of the fields of /proc/self/stat after the command's name."""


@functools.cache
def started() -> float:
    """Epoch seconds. Where the system does not say, when this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return _IMPORTED
    return time.time() - uptime + int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
