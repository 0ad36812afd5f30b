"""The end-to-end tests once more, through a CPU client behind the PJRT C interface: the very path that a TPU takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("suite", ["test_backend.py", "test_calling.py", "test_shapes.py"])
def test_suite_passes_through_the_plugin(suite: str) -> None:
    environment = {**os.environ, "TPU_COMPILE_PLATFORM": "xla_cpu_pjrt"}
    command = [sys.executable, "-m", "pytest", str(HERE / suite), "-q", "--show-capture=no", "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
