"""PJRT plugins: which library serves a platform, where it was looked for, and opening it.

A plugin is a shared library with one exported symbol, ``GetPjrtApi``. Wheels announce theirs as entry points of the
groups ``jax_plugins`` and ``xla_plugins``; libtpu is a package of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from tpu_compile.config import environment
from tpu_compile.errors import ConfigError, DeviceError, PluginNotFound
from tpu_compile.runtime import keys, status

_log = logging.getLogger(__name__)
_GROUPS = ("jax_plugins", "xla_plugins")
_GOOGLE_PCI_VENDOR = "0x1ae0"
_TPU_PIP = "pip install 'tpu-compile[tpu]'"
_CUDA_PIP = "pip install jax-cuda13-pjrt   (or jax-cuda12-pjrt, with the CUDA libraries of that version)"


@dataclass(frozen=True)
class PluginInfo:
    """One PJRT plugin on this machine.

    Args:
        name: what ``platform=`` takes.
        path: its shared library; empty for the client inside jaxlib.
        version: its wheel's version, or the file's size and time.
        how: how it was found.
    """

    name: str
    path: str
    version: str
    how: str


# Finding


def installed_plugins() -> list[PluginInfo]:
    """Every plugin that this environment holds, the CPU client inside jaxlib first. Loads none of them."""
    embedded = PluginInfo("cpu", "", version("jaxlib"), "inside jaxlib")
    return [embedded, *filter(None, [libtpu()]), *(p for point in _points() if (p := _announced(point)))]


def _points() -> Iterator[EntryPoint]:
    for group in _GROUPS:
        yield from entry_points(group=group)


def _announced(point: EntryPoint) -> PluginInfo | None:
    """The library beside a wheel's entry point. The module is not imported: jax's own start CUDA."""
    try:
        spec = importlib.util.find_spec(point.module)
    except ImportError:
        return None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    library = _library(folders)
    release = point.dist.version if point.dist else "unknown"
    return PluginInfo(point.name, str(library), release, f"entry point of {point.group}") if library else None


def _library(folders: list[Path]) -> Path | None:
    """A wheel may carry other libraries too: the plugin's is the one called so."""
    for pattern in ("*pjrt*", "*plugin*", "*"):
        for folder in folders:
            for suffix in (".so", ".dylib"):
                if found := sorted(folder.glob(pattern + suffix)):
                    return found[0]
    return None


def libtpu() -> PluginInfo | None:
    """The library that drives TPUs and compiles for them, or nothing. Does not load it."""
    if (named := environment("TPU_LIBRARY_PATH")) and Path(named).is_file():
        return PluginInfo("tpu", named, _libtpu_version(named), "TPU_LIBRARY_PATH")
    spec = importlib.util.find_spec("libtpu")
    path = Path(spec.origin).with_name("libtpu.so") if spec and spec.origin else Path()
    return PluginInfo("tpu", str(path), _libtpu_version(str(path)), "package libtpu") if path.is_file() else None


def _libtpu_version(path: str) -> str:
    """The wheel's, when this is the wheel's library (importing libtpu sets TPU_LIBRARY_PATH to it)."""
    spec = importlib.util.find_spec("libtpu")
    ours = spec is not None and spec.origin is not None and Path(spec.origin).with_name("libtpu.so") == Path(path)
    return (_version("libtpu") if ours else "") or _file_version(Path(path))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _file_version(path: Path) -> str:
    facts = path.stat()
    return f"{facts.st_size} bytes of {facts.st_mtime_ns}"


def find(platform: str) -> PluginInfo:
    """The plugin for a platform name, a plugin's name or a library's path.

    Raises:
        PluginNotFound: there is none; says what was looked for and where.
    """
    path = Path(platform).expanduser()
    if path.is_file():
        return PluginInfo(str(path), str(path.resolve()), _file_version(path), "path")
    known = installed_plugins()
    prefixes = ("xla_cuda", "cuda") if platform in ("cuda", "gpu") else (platform,)
    # The newest CUDA first, as its wheel's name sorts last.
    near = sorted((p for p in known if p.path and p.name.startswith(prefixes)), key=lambda p: p.name, reverse=True)
    exact = [p for p in known if p.path and p.name == platform]
    if exact or (near and platform in ("cuda", "gpu")):
        return (exact or near)[0]
    raise _not_found(platform, known)


def _not_found(platform: str, known: list[PluginInfo]) -> PluginNotFound:
    pip = {"tpu": _TPU_PIP, "cuda": _CUDA_PIP, "gpu": _CUDA_PIP}.get(platform, "the plugin's wheel, or give its path")
    looked = [
        f"a file at {platform}" if "/" in platform or platform.endswith((".so", ".dylib")) else "",
        "TPU_LIBRARY_PATH and the package libtpu" if platform == "tpu" else "",
        f"entry points of {' and '.join(_GROUPS)}",
    ]
    return PluginNotFound(
        f"No PJRT plugin serves {platform!r}. Looked for: {'; '.join(filter(None, looked))}. "
        f"Installed: {', '.join(p.name for p in known)}. To install: {pip}",
        "NOT_FOUND",
    )


# The TPU of this machine


def tpu_attached(root: Path = Path("/")) -> bool:
    """Whether this machine has a TPU: a device node of one, or a PCI device of Google's behind VFIO. Loads nothing."""
    if any((root / "dev").glob("accel[0-9]*")):
        return True
    # Other devices are passed through VFIO too, so that its nodes alone say nothing.
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any((root / "dev/vfio").glob("[0-9]*")) and any(_reads(v, _GOOGLE_PCI_VENDOR) for v in vendors)


def _reads(file: Path, text: str) -> bool:
    try:
        return file.read_text().strip() == text
    except OSError:
        return False


def default_platform() -> str:
    """``tpu`` where a TPU is attached and libtpu is installed, else ``cpu``. Loads nothing."""
    if not tpu_attached():
        return "cpu"
    if libtpu():
        return "tpu"
    _log.warning("This machine has a TPU but no libtpu: running on the CPU. Install it with: %s", _TPU_PIP)
    return "cpu"


# Opening


def open_plugin(platform: str, options: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """jaxlib's client of a plugin, and what identifies the plugin in a cache key.

    Raises:
        PluginNotFound: no plugin, or nothing attached that it could drive.
        ConfigError: options that the plugin does not take.
        DeviceError: the library is no plugin, or it could not start.
    """
    info = find(platform)
    if info.name == "tpu" and not tpu_attached():
        raise PluginNotFound(
            "No TPU is attached to this machine: no /dev/accel*, and no Google device behind /dev/vfio. (libtpu is not "
            "loaded to ask: it would hang.) To compile for a TPU without one, use tpu_compile.runtime.topology: "
            "topology('v5e:2x2').",
            "NOT_FOUND",
        )
    from jaxlib import xla_client as xc

    registered = _register(info)
    given = {name: option_value(text) for name, text in options.items()}
    base = xc.generate_pjrt_gpu_plugin_options() if info.name.startswith(("cuda", "xla_cuda")) else {}
    try:
        client = xc.make_c_api_client(registered, {**base, **given})
    except RuntimeError as error:
        raise _open_error(error, info, given) from error
    name = info.name if info.how != "path" else Path(info.path).name
    return client, {"plugin": f"{name} {info.version}", "plugin_build": keys.library_build(info.path)}


def _open_error(error: RuntimeError, info: PluginInfo, given: Mapping[str, Any]) -> DeviceError | ConfigError:
    message = str(error)
    # A value of the wrong type has no status: "Unexpected index".
    if given and status.code(message) in ("INVALID_ARGUMENT", "UNKNOWN"):
        return ConfigError(f"plugin_options={dict(given)} for {info.name}: {status.excerpt(message)}")
    return status.device_error(error, f"The PJRT plugin {info.name} ({info.path}) could not start")


def _register(info: PluginInfo) -> str:
    """Load and initialise the library, once in the process; the name that jaxlib now knows it by."""
    from jaxlib import xla_client as xc

    # libtpu insists on its name, which jax may have registered before; others may not share one, nor clash with jax's.
    name = "tpu" if info.name == "tpu" else f"tpu_compile_{hashlib.sha256(info.path.encode()).hexdigest()[:12]}"
    try:
        if not xc.pjrt_plugin_loaded(name):
            xc.load_pjrt_plugin_dynamically(name, info.path)
        if not xc.pjrt_plugin_initialized(name):
            xc.initialize_pjrt_plugin(name)
    except RuntimeError as error:
        raise status.device_error(error, f"{info.path} cannot be used as a PJRT plugin") from error
    return name


def option_value(text: str) -> bool | int | float | str:
    """A client option as the type it looks like: plugins check types, and ``4`` is not ``"4"`` to them."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
