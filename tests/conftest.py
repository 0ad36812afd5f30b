"""What every test gets: its own cache, zeroed counters, a Dynamo without memory; `run_python` for new processes."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from tpu_compile.stats import reset_stats

# Before any test module is imported: no test, and no process that a test starts, may see the developer's own cache.
_SESSION = Path(tempfile.mkdtemp(prefix="tpu-compile-tests-"))
os.environ["TPU_COMPILE_CACHE_DIR"] = str(_SESSION / "collection")
os.environ["HF_HUB_OFFLINE"] = "1"
_numbers = itertools.count()


class RunPython(Protocol):
    """``run_python(code, env=None, *, check=True, timeout=300)``: see the fixture."""

    def __call__(
        self, code: str, env: Mapping[str, str] | None = None, *, check: bool = True, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cache = _SESSION / str(next(_numbers))
    monkeypatch.setenv("TPU_COMPILE_CACHE_DIR", str(cache))
    reset_stats()
    if backend := sys.modules.get("tpu_compile.backend"):
        backend._warn_once.cache_clear()  # what is said once a process is said once a test
    yield
    if dynamo := sys.modules.get("torch._dynamo"):  # the cache's tests never import torch
        dynamo.reset()
    shutil.rmtree(cache, ignore_errors=True)


@pytest.fixture
def cache_dir() -> Path:
    """This test's own cache directory; it need not exist yet."""
    return Path(os.environ["TPU_COMPILE_CACHE_DIR"])


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run a program in a fresh process, in an empty folder, with this test's cache; its output is captured as text.

    ``env`` adds to the environment. With ``check`` a non-zero exit fails the test and shows what the program wrote.
    """

    def run(
        code: str, env: Mapping[str, str] | None = None, *, check: bool = True, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(code))
        command = [sys.executable, str(program)]
        environment = {**os.environ, **(env or {})}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            pytest.fail(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
        return done

    return run


def pytest_unconfigure() -> None:
    shutil.rmtree(_SESSION, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Where the time went, by suite: with two workers these add up to about twice the wall clock."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for report in (r for reports in terminalreporter.stats.values() for r in reports if hasattr(r, "duration")):
        suite = report.nodeid.split("/")[1] if report.nodeid.count("/") > 1 else "tests"
        seconds[suite] += report.duration
        tests[suite].add(report.nodeid)
    for suite in sorted(seconds, key=seconds.__getitem__, reverse=True):
        terminalreporter.write_line(f"{suite:>10}: {len(tests[suite]):5} tests, {seconds[suite]:7.1f} s")
