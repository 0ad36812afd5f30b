"""Key parts of the machine: the same where they mean the same, different where they do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpu_compile.cache import cpu_features, file_fingerprint, keyed_flags, package_version


@pytest.mark.parametrize(
    "text",
    [
        "--xla_b=2 --xla_a=1 --xla_c",
        "  --xla_a=1   --xla_c=true --xla_b=2 ",
        "--xla_a=0 --xla_c --xla_b=2 --xla_a=1",
        "--xla_dump_to=/tmp/x --xla_a=1 --xla_b=2 --xla_c --xla_dump_hlo_as_text",
        "--xla_a='1' --v=3 --vmodule=a=1 --xla_b=2 --xla_c --xla_force_host_platform_device_count=8",
    ],
)
def test_what_means_the_same_is_written_the_same(text: str) -> None:
    assert keyed_flags(text) == "--xla_a=1 --xla_b=2 --xla_c"


@pytest.mark.parametrize(
    "text", ["--xla_a=2 --xla_b=2 --xla_c", "--xla_a=1 --xla_b=2", "--xla_a=1 --xla_b=2 --xla_c=0", ""]
)
def test_what_differs_is_written_differently(text: str) -> None:
    assert keyed_flags(text) != keyed_flags("--xla_a=1 --xla_b=2 --xla_c")
    assert keyed_flags("--xla_dumpling") == "--xla_dumpling"


def test_flags_in_a_file_count_as_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "flags"
    file.write_text("--xla_b\n--xla_a=1\n")
    assert keyed_flags(str(file)) == keyed_flags("--xla_a=1 --xla_b")
    assert keyed_flags(str(tmp_path / "absent")) == str(tmp_path / "absent")


def _cpuinfo(path: Path, flags: str) -> Path:
    path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: other\n")
    return path


def test_cpu_features_are_those_of_code_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    one = cpu_features(_cpuinfo(tmp_path / "a", "fpu sse4_2 avx2 pti ibrs hypervisor"))
    same = cpu_features(_cpuinfo(tmp_path / "b", "avx2 sse4_2 fpu retbleed"))
    other = cpu_features(_cpuinfo(tmp_path / "c", "fpu sse4_2 avx2 avx512f"))
    assert one == same == "x86_64 avx2 sse4_2" and other == "x86_64 avx2 avx512f sse4_2"


def test_cpu_features_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (tmp_path / "arm").write_text("Features\t: fp asimd sve\n")
    assert cpu_features(tmp_path / "arm") == "aarch64 asimd fp sve"
    assert cpu_features(tmp_path / "absent").startswith("aarch64")


def test_this_machine_has_features() -> None:
    assert cpu_features() == cpu_features() and len(cpu_features()) > len(os.uname().machine)


def test_package_versions() -> None:
    assert package_version("tpu-compile").count(".") == 2
    assert package_version("no-such-distribution-anywhere") == "absent"


def test_a_library_changed_in_place_has_another_fingerprint(tmp_path: Path) -> None:
    library, copy = tmp_path / "lib.so", tmp_path / "copy.so"
    data = bytearray(os.urandom(300_000))
    library.write_bytes(data)
    copy.write_bytes(data)
    os.utime(copy, (1, 1))
    first = file_fingerprint(library)
    assert file_fingerprint(copy) == first, "not the file's time or place"
    changed = {first}
    for place in (0, 100, len(data) - 1):
        library.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        changed.add(file_fingerprint(library))
    library.write_bytes(data + b"x")
    changed.add(file_fingerprint(library))
    assert len(changed) == 5
    (tmp_path / "empty").touch()
    assert file_fingerprint(tmp_path / "empty").startswith("0-")
