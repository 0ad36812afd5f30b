"""Which library serves a platform, and whether a TPU is attached: nothing is loaded here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tpu_compile.errors import PluginNotFound
from tpu_compile.runtime import plugin


def fake_wheel(site: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str, *libraries: str) -> Path:
    """A wheel with an entry point and libraries beside it; importing its module fails the test."""
    package = site / group / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    for library in libraries:
        (package / library).touch()
    about = site / f"{name}-1.2.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {group}.{name}\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, group, raising=False)
    return package


def named(name: str) -> plugin.PluginInfo:
    return next(info for info in plugin.installed_plugins() if info.name == name)


def test_the_client_inside_jaxlib_is_listed_first() -> None:
    first = plugin.installed_plugins()[0]
    assert (first.name, first.path, first.how) == ("cpu", "", "inside jaxlib")


@pytest.mark.parametrize("group", ["jax_plugins", "xla_plugins"])
def test_a_wheel_is_found_by_its_entry_point(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = fake_wheel(tmp_path, monkeypatch, group, "some_chip", "libhelper.so", "some_pjrt.so")
    found = plugin.find("some_chip")
    assert found == plugin.PluginInfo("some_chip", str(package / "some_pjrt.so"), "1.2.3", f"entry point of {group}")


def test_a_wheel_without_a_library_is_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(tmp_path, monkeypatch, "jax_plugins", "only_python")
    assert "only_python" not in {info.name for info in plugin.installed_plugins()}


def test_cuda_is_the_newest_cuda_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("xla_cuda12", "xla_cuda13"):
        fake_wheel(tmp_path, monkeypatch, "jax_plugins", release, "xla_cuda_plugin.so")
    assert plugin.find("cuda").name == "xla_cuda13"
    assert plugin.find("xla_cuda12").name == "xla_cuda12"


def test_a_path_is_a_plugin_of_its_own(tmp_path: Path) -> None:
    library = tmp_path / "my.so"
    library.write_bytes(b"1234")
    found = plugin.find(str(library))
    assert found.path == str(library) and found.how == "path" and found.version.startswith("4 bytes of ")


def test_tpu_library_path_names_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libtpu.so"
    library.write_bytes(b"")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    assert (named("tpu").path, named("tpu").how) == (str(library), "TPU_LIBRARY_PATH")


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        ("cuda", ["jax-cuda13-pjrt", "jax_plugins"]),
        ("/no/such/plugin.so", ["a file at /no/such/plugin.so"]),
        ("metal", ["entry points of jax_plugins and xla_plugins", "Installed: cpu"]),
    ],
)
def test_nothing_found_says_what_was_looked_for(platform: str, said: list[str]) -> None:
    with pytest.raises(PluginNotFound) as caught:
        plugin.find(platform)
    assert caught.value.code == "NOT_FOUND"
    assert [words for words in said if words not in str(caught.value)] == []


def test_without_libtpu_the_pip_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "libtpu", lambda: None)
    with pytest.raises(PluginNotFound, match=r"pip install 'tpu-compile\[tpu\]'"):
        plugin.find("tpu")


def machine(root: Path, *, node: str = "", vendor: str = "") -> Path:
    if node:
        (root / "dev" / node).parent.mkdir(parents=True)
        (root / "dev" / node).touch()
    if vendor:
        device = root / "sys/bus/pci/devices/0000:00:05.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
    return root


@pytest.mark.parametrize(
    ("node", "vendor", "attached"),
    [
        ("accel0", "", True),
        ("vfio/0", "0x1ae0", True),
        ("vfio/0", "0x10de", False),
        ("vfio/vfio", "0x1ae0", False),
        ("accel/accel0", "", False),
        ("", "0x1ae0", False),
        ("", "", False),
    ],
)
def test_a_tpu_is_seen_by_its_device_nodes(node: str, vendor: str, attached: bool, tmp_path: Path) -> None:
    assert plugin.tpu_attached(machine(tmp_path, node=node, vendor=vendor)) is attached


def test_the_default_platform(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(plugin, "tpu_attached", lambda: False)
    assert plugin.default_platform() == "cpu"
    monkeypatch.setattr(plugin, "tpu_attached", lambda: True)
    monkeypatch.setattr(plugin, "libtpu", lambda: plugin.PluginInfo("tpu", "/x.so", "1", "test"))
    assert plugin.default_platform() == "tpu"
    assert caplog.text == ""
    monkeypatch.setattr(plugin, "libtpu", lambda: None)
    assert plugin.default_platform() == "cpu"
    assert "pip install" in caplog.text


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("False", False), ("4", 4), ("-1", -1), ("0.75", 0.75), ("bfc", "bfc"), ("1e9", 1e9)],
)
def test_client_options_get_the_type_they_look_like(text: str, value: object) -> None:
    parsed = plugin.option_value(text)
    assert (type(parsed), parsed) == (type(value), value)
