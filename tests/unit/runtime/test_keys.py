"""Flags, libraries and the host's CPU as parts of the cache key."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tpu_compile.runtime import keys


def test_flags_are_sorted_and_the_last_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=2  --xla_a=1 --xla_b=3 --xla_c")
    assert keys.flags_part("XLA_FLAGS") == "xla_a=1 xla_b=3 xla_c=true"


@pytest.mark.parametrize("inert", ["xla_dump_to=/tmp/x", "xla_dump_hlo_as_text", "vmodule=a=3", "minloglevel=2"])
def test_flags_that_leave_the_binary_alone_are_dropped(inert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{inert} --xla_tpu_x=1")
    assert keys.flags_part("LIBTPU_INIT_ARGS") == "xla_tpu_x=1"


@pytest.mark.parametrize("name", ["xla_tpu_debug_x", "xla_gpu_autotune_level_log", "xla_backend_trace", "xla_profiled"])
def test_a_name_that_sounds_harmless_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=1")
    assert keys.flags_part("XLA_FLAGS") == f"{name}=1"


def test_a_file_of_flags_counts_by_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flags").write_text("--xla_b=2\n--xla_a=1\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    assert keys.flags_part("XLA_FLAGS") == "xla_a=1 xla_b=2"


def test_no_flags_are_an_empty_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert keys.flags_part("XLA_FLAGS") == ""


def facts(**changed: str) -> dict[str, str]:
    return {"model name": "Some CPU", "model": "1", "flags": "avx2 fma sse", "cpu MHz": "3000", **changed}


def test_the_host_is_its_model_and_its_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(**changed: str) -> str:
        monkeypatch.setattr(keys, "_cpu_facts", lambda: facts(**changed))
        return keys.host_cpu()

    assert host().startswith("Some CPU #")
    assert host() == host(**{"flags": "sse fma avx2", "cpu MHz": "2100"}), "order and speed do not decide the code"
    assert host() == host(flags="avx2 fma sse ibrs md_clear hypervisor"), "a kernel's mitigations do not either"
    assert host() != host(flags="avx2 fma sse avx512f")
    assert host() != host(model="2")


def test_an_arm_host_has_other_words_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_cpu_facts", lambda: {"CPU part": "0xd0c", "Features": "fp asimd sve"})
    sve = keys.host_cpu()
    monkeypatch.setattr(keys, "_cpu_facts", lambda: {"CPU part": "0xd0c", "Features": "fp asimd"})
    assert sve.startswith("0xd0c #") and sve != keys.host_cpu()


def test_a_host_without_cpuinfo_still_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_cpu_facts", dict)
    name, _, digest = keys.host_cpu().rpartition(" #")
    assert name and len(digest) == 16


def test_this_host_reads_the_same_twice() -> None:
    assert keys.host_cpu() == keys.host_cpu()


# ---- libraries


def test_builds_of_one_version_differ(tmp_path: Path) -> None:
    """A byte changed at any of the places that are read; and a file of another size."""
    library = tmp_path / "lib.so"
    library.write_bytes(os.urandom(3_000_000))
    before = keys.file_fingerprint(library)
    assert keys.file_fingerprint(library) == before
    for place in (0, 2_999_999):
        data = bytearray(library.read_bytes())
        data[place] ^= 1
        library.write_bytes(data)
        assert keys.file_fingerprint(library) != before
        data[place] ^= 1
        library.write_bytes(data)
    assert keys.file_fingerprint(library) == before
    library.write_bytes(library.read_bytes() + b"x")
    assert keys.file_fingerprint(library) != before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which files a process maps")
def test_a_library_replaced_while_it_is_loaded_equals_nothing(run_python: Any, tmp_path: Path) -> None:
    """As an upgrade does it: the process goes on with the old code, and the file on disk is another."""
    done = run_python(f"""
        import mmap, os
        from tpu_compile.runtime import keys
        path = {str(tmp_path / "lib.so")!r}
        open(path, "wb").write(b"x" * 8192)
        loaded = mmap.mmap(os.open(path, os.O_RDONLY), 0, prot=mmap.PROT_READ)
        first = keys.library_build(path)
        assert first == keys.file_fingerprint(path) and not keys._replaced(path)
        os.unlink(path)
        open(path, "wb").write(b"x" * 8192)
        assert keys.library_build(path) == first, "what was loaded stays what it was"
        keys.library_build.cache_clear()
        print(keys.library_build(path), keys.file_fingerprint(path))
        """)
    told, fingerprint = done.stdout.strip().rsplit(" ", 1)
    assert told.startswith("replaced since process") and fingerprint not in told


def test_the_library_with_the_code_is_the_largest(tmp_path: Path) -> None:
    for name, size in {"a.so": 10, "b.so": 1000, "c.py": 5000}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    assert keys.largest_library(tmp_path).name == "b.so"
