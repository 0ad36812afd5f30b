"""The cache under real compiles: processes share it, damage costs a compile and nothing else, misses are explained."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tpu_compile
from tpu_compile.cache import CacheKey, CacheStore, open_store
from tpu_compile.cache.faults import forget_warnings
from tpu_compile.compiler import options_in_force, runtime
from tpu_compile.errors import CacheError, CacheWarning
from tpu_compile.runtime.compiling import toolchain_parts

PROGRAM = """
import json, sys, torch, tpu_compile
compiled = torch.compile(lambda a, b: torch.relu(a @ b).sum(0), backend="tpu", fullgraph=True)
a, b = torch.arange(32.0).reshape(4, 8) - 9, torch.arange(24.0).reshape(8, 3) - 7
torch.testing.assert_close(compiled(a, b), torch.relu(a @ b).sum(0))
print(json.dumps(tpu_compile.stats()))
"""


@pytest.fixture(autouse=True)
def _warn_anew() -> None:
    forget_warnings()


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compute() -> dict[str, float]:
    """Compile and check a small graph as a fresh process would, and return what that took."""
    torch._dynamo.reset()
    runtime.forget()
    tpu_compile.reset_stats()
    a, b = torch.arange(32.0).reshape(4, 8) - 9, torch.arange(24.0).reshape(8, 3) - 7
    compiled = torch.compile(lambda a, b: torch.relu(a @ b).sum(0), backend="tpu", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), torch.relu(a @ b).sum(0))
    return tpu_compile.stats()


def the_entry() -> Path:
    """The only entry's file."""
    store = open_store()
    assert store is not None
    (info,) = store.entries()
    return info.path


def test_a_second_process_compiles_nothing(run_python: Callable[..., Any], cache_dir: Path) -> None:
    first, second = figures(run_python(PROGRAM)), figures(run_python(PROGRAM))
    assert (first["xla_compiles"], first["disk_misses"], first["disk_puts"]) == (1, 1, 1)
    assert (second["xla_compiles"], second["disk_hits"], second["disk_misses"]) == (0, 1, 0)
    assert second["saved_seconds"] > 0
    (info,) = CacheStore(cache_dir).entries()
    assert info.hits == 1 and info.header.parts["arguments"] == "f32[4,8];f32[8,3]"


def test_off_means_off(cache_dir: Path) -> None:
    with tpu_compile.override(cache=False):
        assert compute()["xla_compiles"] == 1
    assert not cache_dir.exists()


def test_processes_that_start_together_compile_once(tmp_path: Path, cache_dir: Path) -> None:
    """Each is held until all are ready, so that their compiles really meet."""
    gate = tmp_path / "go"
    wait = f"""
import os, time, torch, tpu_compile.compiler
print("ready", flush=True)
while not os.path.exists({str(gate)!r}): time.sleep(0.01)
"""
    program = wait + PROGRAM
    workers = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    gate.touch()
    said = [worker.communicate(timeout=120) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), said
    counted = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert sum(one["xla_compiles"] for one in counted) == 1, said
    assert sum(one["disk_hits"] for one in counted) == 2


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    path.write_bytes(data)


def _older(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + struct.pack("<I", 0) + data[12:])


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _no_executable(path: Path) -> None:
    """Sound as an entry, and nothing that PJRT would load."""
    store = open_store()
    assert store is not None
    (info,) = store.entries()
    key = CacheKey.of("any name", dict(info.header.parts))
    assert store.folder.path(key.digest) == path
    store.put(key, b"no executable", compile_seconds=1, metadata={})


@pytest.mark.parametrize("damage", [_truncate, _flip, _older, _directory, _no_executable], ids=lambda f: f.__name__)
def test_damage_costs_a_compile_and_nothing_else(damage: Callable[[Path], None]) -> None:
    assert compute()["xla_compiles"] == 1
    damage(the_entry())
    with pytest.warns(CacheWarning):
        again = compute()
    assert (again["xla_compiles"], again["cache_faults"], again["disk_puts"]) == (1, 1, 1)
    assert compute()["xla_compiles"] == 0, "it is repaired"
    damage(the_entry())
    with (
        tpu_compile.override(raise_cache_errors=True),
        pytest.raises((CacheError, torch._dynamo.exc.BackendCompilerFailed)),
    ):
        compute()


def test_a_place_that_cannot_be_written_costs_nothing_but_the_cache(cache_dir: Path) -> None:
    cache_dir.write_text("a file is in the way")
    with pytest.warns(CacheWarning, match="a file is in the way") as caught:
        assert compute()["xla_compiles"] == 1
    assert len(caught) == 1
    cache_dir.unlink()


# ---- what decides a key


def function(source: str, folder: Path, name: str) -> Any:
    """The function ``f`` of a module file with that source."""
    path = folder / f"{name}.py"
    path.write_text(source)
    namespace: dict[str, Any] = {"torch": torch, "__name__": name}
    exec(compile(source, str(path), "exec"), namespace)
    return namespace["f"]


PLAIN = "def f(a, b):\n    return torch.relu(a @ b).sum(0)\n"
MOVED = "# a comment\n\n\ndef f(a, b):\n\n    c = a @ b  # another\n    return (torch.relu(c)\n            .sum(0))\n"


def new_keys(f: Any, *arguments: torch.Tensor, **options: Any) -> int:
    """How many entries a compile in a fresh state adds."""
    store = open_store()
    assert store is not None
    before = len(list(store.entries()))
    torch._dynamo.reset()
    runtime.forget()
    torch.compile(f, backend="tpu", fullgraph=True, options=options or None)(*arguments)
    return len(list(store.entries())) - before


def test_comments_lines_and_files_never_change_a_key(tmp_path: Path) -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 3)
    assert new_keys(function(PLAIN, tmp_path, "one"), a, b) == 1
    (tmp_path / "elsewhere").mkdir()
    assert new_keys(function(MOVED, tmp_path / "elsewhere", "two"), a + 1, b) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: ((a.double(), b.double()), {}),
        lambda a, b: ((a[:3], b), {}),
        lambda a, b: ((a.bfloat16(), b.bfloat16()), {}),
        lambda a, b: ((a, b), {"optimization_level": 0}),
        lambda a, b: ((a, b), {"excess_precision": True}),
        lambda a, b: ((a, b), {"xla_options": {"xla_cpu_enable_fast_math": "true"}}),
    ],
    ids=["float64", "rows", "bfloat16", "level", "precision", "flag"],
)
def test_what_decides_the_program_changes_the_key(change: Any) -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 3)
    arguments, options = change(a, b)

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a @ b).sum(0)

    assert new_keys(f, a, b) == 1
    assert new_keys(f, *arguments, **options) == 1
    assert new_keys(f, *arguments, **options) == 0


@pytest.mark.parametrize(
    ("variable", "value", "keyed"),
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_min_max=true", True),
        ("XLA_FLAGS", "--xla_dump_max_hlo_modules=3", False),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_some_flag=1", True),
    ],
)
def test_flags_in_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, keyed: bool) -> None:
    """As a fresh process reads them; this one has read them when it first needed a key."""
    assert new_keys(torch.relu, torch.ones(4)) == 1
    monkeypatch.setenv(variable, value)
    toolchain_parts.cache_clear()
    try:
        assert new_keys(torch.relu, torch.ones(4)) == (1 if keyed else 0)
    finally:
        toolchain_parts.cache_clear()


@pytest.mark.parametrize("part", ["host_cpu", "jaxlib"])
def test_an_entry_of_another_machine_or_version_is_not_even_tried(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    assert new_keys(torch.relu, torch.ones(4)) == 1
    true_parts = type(runtime.client).key_parts

    def other_parts(self: Any, options: Any) -> dict[str, str]:
        return {**true_parts(self, options), part: "another"}

    monkeypatch.setattr(type(runtime.client), "key_parts", other_parts)
    tpu_compile.reset_stats()
    assert new_keys(torch.relu, torch.ones(4)) == 1
    assert tpu_compile.stats()["cache_faults"] == 0


def test_a_miss_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    new_keys(torch.matmul, torch.ones(4, 8), torch.ones(8, 3))
    caplog.set_level(logging.WARNING, "tpu_compile")
    with tpu_compile.override(explain_cache_misses=True):
        new_keys(torch.matmul, torch.ones(4, 8), torch.ones(8, 5))
    (message,) = [record.getMessage() for record in caplog.records if "cache miss" in record.getMessage()]
    assert "argument 1: f32[8,5] was f32[8,3]" in message and "result 0: f32[4,5] was f32[4,3]" in message
    caplog.clear()
    with tpu_compile.override(explain_cache_misses=True):
        new_keys(lambda a, b: (a @ b).relu(), torch.ones(4, 8), torch.ones(8, 3))
    assert "op aten.relu=1 added" in caplog.text


# ---- what a hit costs


def test_a_hit_costs_little_more_than_loading_its_executable() -> None:
    """The cache's own share of a hit against PJRT's deserialisation alone, on a graph of some size: at most a fifth."""

    def deep(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.softmax(torch.relu(x @ weight) @ weight.T, -1)
        return x

    new_keys(deep, torch.ones(8, 32), *(torch.ones(32, 33 + i) for i in range(12)))
    store = open_store()
    assert store is not None
    (info,) = store.entries()
    key = CacheKey.of(info.header.name, dict(info.header.parts))
    hits, loads = [], []
    for _ in range(7):
        began = time.perf_counter()
        entry = store.get(key)
        found = time.perf_counter()
        assert entry is not None
        runtime.client.load(entry.payload, info.header.name, options_in_force())
        hits.append(found - began)
        loads.append(time.perf_counter() - found)
    print(f"{len(entry.payload):,} bytes: found in {min(hits) * 1e3:.2f} ms, loaded in {min(loads) * 1e3:.2f} ms")
    assert min(hits) <= 0.2 * min(loads)
