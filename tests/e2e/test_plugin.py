"""Plugins that are installed: opening them, and what is said when one cannot be opened.

What an open one can do is in test_runtime, which runs on a plugin too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import RunPython
from tpu_compile.errors import ConfigError, DeviceError, PluginNotFound
from tpu_compile.runtime import CompileOptions, open_client, plugin

DEFAULT = CompileOptions()


def test_a_plugin_opens_by_its_name_and_by_its_path() -> None:
    info = plugin.find("xla_cpu_pjrt")
    by_name, by_path = open_client("xla_cpu_pjrt"), open_client(info.path)
    assert (by_name.platform, by_name.family, by_name.host_memory) == ("cpu", "cpu", True)
    assert by_name.key_parts(DEFAULT)["plugin"] == f"xla_cpu_pjrt {info.version}"
    path = Path(info.path)
    assert (
        by_path.key_parts(DEFAULT)["plugin"] == f"{path.name} {path.stat().st_size} bytes of {path.stat().st_mtime_ns}"
    )


def test_client_options_reach_the_plugin() -> None:
    two = open_client("xla_cpu_pjrt", {"cpu_device_count": "2"})
    assert two is not open_client("xla_cpu_pjrt")
    assert two.key_parts(DEFAULT)["device_assignment"] == "[[0]] of 2"


def test_an_option_of_the_wrong_type_is_named() -> None:
    with pytest.raises(ConfigError, match="cpu_device_count"):
        open_client("xla_cpu_pjrt", {"cpu_device_count": "many"})


def test_the_client_inside_jaxlib_takes_no_options() -> None:
    with pytest.raises(ConfigError, match="cpu_device_count"):
        open_client("cpu", {"cpu_device_count": "2"})


def test_a_library_that_is_no_plugin_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(DeviceError, match=r"text\.so cannot be used as a PJRT plugin"):
        open_client(str(text))


def test_a_library_without_the_entry_symbol_is_refused() -> None:
    import _ctypes  # any shared library will do, if it is one

    with pytest.raises(DeviceError, match="GetPjrtApi"):
        open_client(_ctypes.__file__)


def test_the_embedded_client_and_a_plugin_have_one_interface() -> None:
    clients = [open_client("cpu"), open_client("xla_cpu_pjrt")]
    assert len({tuple(client.key_parts(DEFAULT)) for client in clients}) == 1
    assert [repr(client) for client in clients] == ["Client(cpu, cpu)"] * 2


@pytest.mark.skipif(plugin.tpu_attached(), reason="this machine has a TPU: it would be opened")
def test_no_tpu_is_said_at_once_and_points_to_compiling_for_one(run_python: RunPython) -> None:
    done = run_python("""
        import time
        from tpu_compile.errors import PluginNotFound
        from tpu_compile.runtime import open_client
        start = time.perf_counter()
        try:
            open_client("tpu")
        except PluginNotFound as error:
            print(time.perf_counter() - start < 10, error.code, error)
    """)
    assert done.stdout.startswith("True NOT_FOUND No TPU is attached"), done.stdout
    assert "topology('v5e:2x2')" in done.stdout


@pytest.mark.skipif(plugin.tpu_attached(), reason="this machine has a TPU: it is the default")
def test_without_a_tpu_the_default_is_the_cpu() -> None:
    assert open_client() is open_client("cpu")


def test_what_is_not_installed_comes_with_a_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "entry_points", lambda group: [])
    with pytest.raises(PluginNotFound, match="pip install jax-cuda13-pjrt"):
        open_client("cuda")
