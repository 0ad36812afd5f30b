"""Keys, stores and broken places for the cache's tests, which need neither torch nor jaxlib."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpu_compile.cache import CacheKey, CacheStore, disk
from tpu_compile.cache.faults import forget_warnings

NOBODY = 65534


@pytest.fixture(autouse=True)
def _warn_anew() -> None:
    forget_warnings()


@pytest.fixture
def store(cache_dir: Path) -> CacheStore:
    """A store in this test's own directory, without a size cap."""
    return CacheStore(cache_dir, max_size=0)


@pytest.fixture
def key() -> CacheKey:
    """A key like the compiler's."""
    return CacheKey.of(
        "bert_layer",
        {
            "program": b"\x00stablehlo bytecode\xff" * 40,
            "arguments": "f32[8,128]; f32[128,64]; s64[8]",
            "platform": "cpu",
            "xla_flags": "xla_cpu_enable_fast_math=false",
            "jaxlib": "0.10.2",
        },
    )


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory of a user whom file permissions bind (root is not), and that user's identity while the test runs."""
    folder = Path(tempfile.mkdtemp(prefix="tpu-compile-unprivileged-"))
    before = os.geteuid()
    if before == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        os.seteuid(before)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o700)
        shutil.rmtree(folder)


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a path somebody else's: really, where this process may do that, else by being somebody else."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        else:
            monkeypatch.setattr(disk, "_user", lambda: NOBODY)

    return give
