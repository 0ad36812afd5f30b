"""``tpu-compile cache``: what it prints, for people and for programs, and its exit status."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tpu_compile.cache import CacheKey, CacheStore
from tpu_compile.cli import main

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs ``tpu-compile cache ARGUMENTS`` and checks its exit status."""

    def invoke(*arguments: object, status: int = 0) -> Result:
        result = CliRunner().invoke(main, ["cache", *map(str, arguments)])
        assert result.exit_code == status, result.output
        return result

    return invoke


@pytest.fixture
def filled(store: CacheStore) -> CacheStore:
    """Two entries of one program for two batch sizes; the first was hit twice."""
    for batch in (8, 16):
        assert store.put(key(batch), b"code" * 5000, compile_seconds=90.0, metadata={"outputs": ["f32[8]"]})
    for _ in range(2):
        store.get(key(8))
    return store


def key(batch: int) -> CacheKey:
    arguments = f"f32[{batch},128]; f32[128]"
    return CacheKey.of(f"bert_{batch}", {"program": bytes(batch), "arguments": arguments, "platform": "cpu"})


def test_ls(run: Run, filled: CacheStore) -> None:
    titles, first, second, total = (re.split(r"  +", line) for line in run("ls").output.splitlines())
    assert titles == ["key", "name", "arguments", "platform", "size", "last used", "hits", "saved"]
    assert first[:4] == [key(8).digest[:12], "bert_8", "f32[8,128]; f32[128]", "cpu"]
    assert first[6:] == ["2", "3.0 min"] and second[6:] == ["0", "0.0 s"]
    assert total[0].startswith("2 entries, ") and total[0].endswith(str(filled.folder.root))


def test_ls_for_programs(run: Run, filled: CacheStore) -> None:
    first, second = json.loads(run("ls", "--json").output)
    assert (first["name"], first["hits"], first["seconds_saved"]) == ("bert_8", 2, 180.0)
    assert second["digest"] == key(16).digest and second["metadata"] == {"outputs": ["f32[8]"]}
    assert Path(second["path"]).stat().st_size == second["size"]


def test_an_entry_cannot_steer_the_terminal(run: Run, store: CacheStore) -> None:
    for number in range(2):
        parts = {"arguments": f"\x1b[2J{number}\nx", "platform": "\x07"}
        assert store.put(CacheKey.of("\x1b]0;title\x07", parts), b"", compile_seconds=0, metadata={})
    digest = next(store.entries()).header.digest
    for command in (("ls",), ("explain", digest), ("explain", "\x1b]0;title\x07")):
        result = CliRunner().invoke(main, ["cache", *command])
        assert result.output and not set("\x1b\x07") & set(result.output)


def test_an_empty_cache(run: Run, cache_dir: Path) -> None:
    assert "\n0 entries, 0 B in " in run("ls").output
    assert json.loads(run("ls", "--json").output) == []
    assert "entries          0" in run("stats").output
    assert "All 0 entries are sound" in run("verify").output
    assert not cache_dir.exists(), "looking creates nothing"


@pytest.mark.parametrize("by", ["key", "name"])
def test_explain(run: Run, filled: CacheStore, by: str) -> None:
    output = run("explain", key(16).digest[:8] if by == "key" else "bert_16").output
    assert "arguments  f32[16,128]; f32[128]" in output
    assert f"Nearest: bert_8 ({key(8).digest[:12]})" in output
    assert "  - argument 0: f32[16,128] was f32[8,128]\n" in output
    assert "  - program " in output and "platform →" not in output


def test_explain_for_programs(run: Run, filled: CacheStore) -> None:
    answer = json.loads(run("explain", "bert_16", "--json").output)
    assert answer["parts"]["platform"] == "cpu" and answer["nearest"]["name"] == "bert_8"
    assert "argument 0: f32[16,128] was f32[8,128]" in answer["differences"]


def test_explain_alone(run: Run, store: CacheStore) -> None:
    store.put(key(8), b"", compile_seconds=0, metadata={})
    assert "no other entry" in run("explain", "bert_8").output
    assert json.loads(run("explain", "bert_8", "--json").output)["nearest"] is None


def test_explain_asks_back(run: Run, filled: CacheStore) -> None:
    assert "see `tpu-compile cache ls`" in run("explain", "fff", status=1).output
    same_name = CacheKey.of("bert_8", {"a": "b"})
    filled.put(same_name, b"", compile_seconds=0, metadata={})
    output = run("explain", "bert_8", status=1).output
    assert "fits 2 entries" in output and same_name.digest[:16] in output and key(8).digest[:16] in output


def test_verify_and_repair(run: Run, filled: CacheStore) -> None:
    assert "All 2 entries are sound." in run("verify").output
    path = filled.folder.path(key(8).digest)
    os.truncate(path, 100)
    output = run("verify", status=1).output
    assert f"{path}: damaged: it ends inside its header" in output and "--repair" in output
    (problem,) = json.loads(run("verify", "--json", status=1).output)
    assert problem["path"] == str(path) and problem["kind"] == "damaged"
    assert "1 problems removed" in run("verify", "--repair", status=1).output
    assert "All 1 entries are sound." in run("verify").output


def test_stats(run: Run, filled: CacheStore) -> None:
    output = run("stats").output
    assert "hits             2" in output and "3.0 min spent, 3.0 min saved" in output and "of 21.5 GB" in output
    figures = json.loads(run("stats", "--json").output)
    assert (figures["entries"], figures["seconds_saved"], figures["payload_bytes"]) == (2, 180.0, 40_000)


def test_prune(run: Run, filled: CacheStore) -> None:
    old = time.time() - 3 * 86400
    os.utime(filled.folder.path(key(16).digest), (old, old))
    assert run("prune", "--older-than", "4d").output.startswith("Removed 0 entries")
    assert run("prune", "--older-than", "2d").output.startswith("Removed 1 entries")
    assert run("prune").output.startswith("Removed 0 entries"), "within the configured cap"
    assert run("prune", "--max-size", "0").output.startswith("Removed 1 entries")


@pytest.mark.parametrize(
    ("option", "value", "help"),
    [("--max-size", "12 parsecs", "512MiB or 20GB"), ("--older-than", "soon", "45m, 12h, 30d or 2w")],
)
def test_a_wrong_size_or_duration(run: Run, filled: CacheStore, option: str, value: str, help: str) -> None:
    assert help in run("prune", option, value, status=2).output
    assert len(list(filled.entries())) == 2


def test_clear(run: Run, filled: CacheStore) -> None:
    output = run("clear").output
    assert output.startswith("Removed 2 entries, ") and output.endswith(f" kB, from {filled.folder.root}.\n")
    assert list(filled.entries()) == []


def test_export_and_import(run: Run, filled: CacheStore, tmp_path: Path) -> None:
    file, other = tmp_path / "warm.tar", tmp_path / "other"
    assert run("export", file).output.startswith("Exported 2 entries, ")
    assert "Imported 2 entries" in run("--dir", other, "import", file).output
    assert "Imported 0 entries, 0 B; 2 were there." in run("--dir", other, "import", file).output
    assert len(list(CacheStore(other).entries())) == 2


def test_what_is_refused_is_said_and_is_a_failure(run: Run, filled: CacheStore, tmp_path: Path) -> None:
    os.truncate(filled.folder.path(key(8).digest), 100)
    result = run("export", tmp_path / "warm.zip", status=1)
    assert f"refused {key(8).digest[:12]}: it ends inside its header" in result.output
    assert "Exported 1 entries" in result.output


def test_faults_are_one_line(run: Run, store: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "archive.tar").write_text("no archive")
    result = run("import", tmp_path / "archive.tar", status=1)
    assert result.output.startswith("Error: Cannot read ") and result.output.count("\n") == 1
    store.folder.root.mkdir()
    store.folder.entries.write_text("a file")
    for command in ("ls", "stats", "verify", "prune", "clear"):
        assert "Error: " in run(command, status=1).output
    run("import", tmp_path / "absent.tar", status=2)
    monkeypatch.setenv("TPU_COMPILE_CACHE_MAX_SIZE", "much")
    assert "TPU_COMPILE_CACHE_MAX_SIZE" in run("ls", status=2).output
