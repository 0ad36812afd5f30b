"""A cache that is filled before anybody waits for it, also for a TPU that is not here; and contents that are checked by
compiling anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import tpu_compile
from tpu_compile import stages
from tpu_compile.cache import CacheStore, open_store
from tpu_compile.cache.store import tracing_store
from tpu_compile.cli import main
from tpu_compile.compiler import options_in_force, record, runtime
from tpu_compile.executables import Runtime, cache_key, metadata
from tpu_compile.runtime import open_client
from tpu_compile.warm import elsewhere

MODELS = """
import torch

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.softmax(self.linear(x).sin(), -1)

def small():
    return Small().eval(), (torch.randn(3, 8),)

def broken():
    return Small().eval().register_forward_hook(print) and Hooked(), (torch.randn(3, 8),)

class Hooked(Small):
    def __call__(self, x):
        return super().__call__(x) + 1
"""


def tpu(*arguments: str, status: int = 0) -> Result:
    """A command as in a process of its own."""
    torch._dynamo.reset()
    runtime.forget()
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == status, done.output
    return done


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = tmp_path / "models_to_warm.py"
    module.write_text(MODELS)
    os.utime(module, (0, 0))  # older than this process
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "models_to_warm", raising=False)
    monkeypatch.chdir(tmp_path)
    return "models_to_warm"


def store() -> CacheStore:
    found = open_store()
    assert found is not None
    return found


def test_what_the_command_stores_a_program_finds(models: str, run_python: Any) -> None:
    tool = [str(Path(sys.executable).with_name("tpu-compile")), "aot", f"{models}:small"]
    for said in ("Small is stored: ", "Small was stored before: "):
        assert said in subprocess.run(tool, capture_output=True, text=True, check=True, timeout=300).stdout
    done = run_python("""
        import torch, tpu_compile
        from torch._dynamo.utils import counters
        from models_to_warm import small
        model, args = small()
        with torch.no_grad():
            f = tpu_compile.aot(model, args)
            torch.testing.assert_close(f(*args), model(*args))
        assert f.found and model.calls == 2 and not counters["stats"]["calls_captured"]
        assert tpu_compile.stats()["lowerings"] == tpu_compile.stats()["xla_compiles"] == 0
        """)
    assert done.returncode == 0


def test_what_cannot_be_stored_is_an_error_of_the_command(models: str) -> None:
    assert "has a __call__ of its own" in tpu("aot", f"{models}:broken", status=1).stderr
    with tpu_compile.override(cache=False):
        assert "the knob `cache` is off" in tpu("aot", f"{models}:small", status=1).stderr


def test_warm_here(models: str) -> None:
    rows = json.loads(tpu("cache", "warm", f"{models}:small", "--grad", "--json").stdout)
    assert {row["name"]: row["compiled"] for row in rows} == {
        f"Small_{kind}": True for kind in ("inference", "forward", "backward")
    }
    assert "0 programs compiled, 3 were there" in tpu("cache", "warm", f"{models}:small", "--grad").stdout


class OnTheMachine:
    """The client of a machine with four v5e chips, as far as the cache sees it."""

    platform = family = "tpu"

    def __init__(self, parts: Any) -> None:
        self.key_parts, self.loaded = parts, list[bytes]()

    def load(self, blob: bytes, name: str, options: Any) -> str:
        self.loaded.append(blob)
        return "an executable"


def test_warm_for_a_tpu_that_is_not_here(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(tpu("cache", "warm", f"{models}:small", "--target", "v5e:2x2", "--json").stdout)
    assert rows and all(row["name"] == "Small_inference" and row["compiled"] for row in rows)
    entries = {info.header.digest: info for info in store().entries()}
    assert {entries[row["key"]].header.parts["platform"] for row in rows} == {"tpu"}
    again = json.loads(tpu("cache", "warm", f"{models}:small", "--target", "v5e:2x2", "--json").stdout)
    assert [row["compiled"] for row in again] == [False] * len(rows)

    from models_to_warm import small

    model, args = small()
    torch._dynamo.reset()
    runtime.forget()
    with record() as seen, torch.no_grad():
        torch.compile(model, backend="tpu")(*args)
    there = OnTheMachine(elsewhere.Attached(elsewhere.topology("v5e:2x2")).key_parts)
    monkeypatch.setattr(Runtime, "client", there)
    (lowering,) = seen.lowerings
    program = tpu_compile.compiler.lower_graph(lowering.graph, lowering.name, {}, "tpu")
    before = tpu_compile.stats()
    assert Runtime().executable(program, options_in_force()).origin == "disk"
    assert tpu_compile.stats()["disk_hits"] == before["disk_hits"] + 1
    assert there.loaded and tpu_compile.stats()["xla_compiles"] == before["xla_compiles"]


def test_a_machine_asks_with_the_labels_that_warm_writes() -> None:
    options = options_in_force()
    written = elsewhere.Attached(elsewhere.topology("v5e:1x1")).key_parts(options)
    asked = open_client("xla_cpu_pjrt").key_parts(options)
    assert set(written) == set(asked) - {"host_cpu"}
    assert written["device_assignment"] == "[[0]] of 1" and asked["device_assignment"].startswith("[[0]] of ")
    assert written["plugin"].startswith("tpu ") and written["plugin_build"]


# ---- what is in it


def test_contents_are_compared_with_a_fresh_compile(models: str) -> None:
    tpu("cache", "warm", f"{models}:small", "--grad")
    tpu("aot", f"{models}:small")
    assert "3 executables compared with a fresh compile.\n" in tpu("cache", "verify", "--check-contents").stdout
    right = stages.trace(lambda x: x * 2, torch.ones(4)).lower().program
    wrong = stages.trace(lambda x: x * 3, torch.ones(4)).lower().program
    options, client = options_in_force(), runtime.client
    torch.compile(lambda x: x * 2, backend="tpu")(torch.ones(4))
    key = cache_key(right, options, client)
    assert store().look(key) is not None
    payload = client.compile(wrong.bytecode, "other", options).serialize()
    assert store().put(key, payload, compile_seconds=1.0, metadata=metadata(right))
    assert tpu("cache", "verify").stdout.startswith("All ")
    said = tpu("cache", "verify", "--check-contents", status=1).stdout
    assert "4 executables compared" in said and f"{key.digest}: contents: " in said
    assert "1 problems removed" in tpu("cache", "verify", "--check-contents", "--repair", status=1).stdout
    assert "3 executables compared" in tpu("cache", "verify", "--check-contents").stdout


def test_the_commands_know_what_torch_pickled_and_do_not_ship_it(models: str, tmp_path: Path) -> None:
    tpu("cache", "warm", f"{models}:small")
    tpu("aot", f"{models}:small")
    kinds = [row["parts"] for row in json.loads(tpu("cache", "ls", "--all", "--json").stdout)]
    assert len(kinds) == 4 and len(json.loads(tpu("cache", "ls", "--json").stdout)) == 1
    assert "1 executables, 1 functions, 1 programs, 1 traces" in tpu("cache", "stats").stdout
    assert "Exported 2 entries" in tpu("cache", "export", str(tmp_path / "all.tar")).stdout
    (info,) = tracing_store(store()).entries(of="function")
    data = info.path.read_bytes()
    assert "Removed 4 entries" in tpu("cache", "clear").stdout
    assert "Imported 2 entries" in tpu("cache", "import", str(tmp_path / "all.tar")).stdout
    # An archive that somebody made by hand puts a pickle only where nothing unpickles.
    import io
    import tarfile

    with tarfile.open(tmp_path / "made.tar", "w") as archive:
        member = tarfile.TarInfo(f"entries/{info.header.digest}")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    said = tpu("cache", "import", str(tmp_path / "made.tar"), status=1)
    assert "pickled by torch" in said.stderr and not list(tracing_store(store()).entries(of=""))


def test_a_damaged_trace_is_found_and_repaired(models: str) -> None:
    tpu("aot", f"{models}:small")
    (info,) = tracing_store(store()).entries(of="function")
    info.path.write_bytes(info.path.read_bytes()[:-1])
    assert "1 problems found" in tpu("cache", "verify", status=1).stdout
    assert "1 problems removed" in tpu("cache", "verify", "--repair", status=1).stdout
    assert tpu("cache", "verify").stdout.startswith("All ")
