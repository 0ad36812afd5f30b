"""Flags and the host's CPU as parts of the cache key."""

from __future__ import annotations

import pytest

from tpu_compile.runtime import keys


def test_flags_are_sorted_and_the_last_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=2  --xla_a=1 --xla_b=3 --xla_c")
    assert keys.flags_part("XLA_FLAGS") == "xla_a=1 xla_b=3 xla_c=true"


@pytest.mark.parametrize(
    "inert", ["xla_dump_to=/tmp/x", "xla_dump_hlo_as_text", "xla_tpu_debug_x=1", "vmodule=a=3", "xla_log_level=2"]
)
def test_flags_that_leave_the_binary_alone_are_dropped(inert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{inert} --xla_tpu_x=1")
    assert keys.flags_part("LIBTPU_INIT_ARGS") == "xla_tpu_x=1"


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
