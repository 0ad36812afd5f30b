"""``tpu-compile doctor``: what is installed, what will be used, what is wrong. Exit status 1 if something is broken."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

import click

import tpu_compile
from tpu_compile.cli.knobs import origin, shown, value
from tpu_compile.cli.progress import progress
from tpu_compile.cli.tables import size, table
from tpu_compile.config import KNOBS, config, environment
from tpu_compile.errors import TpuCompileError

_OPTIONAL = {"libtpu": "only for a TPU, or to compile for one: pip install 'tpu-compile[tpu]'"}
_RIVALS = {
    "torch_tpu": "it names its own device and backend 'tpu' too: use backend='tpu_compile', which nobody else claims",
    "torch_xla": "on a TPU host it opens the chip, which one process can hold: do not use both in one process",
}
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH", "JAX_PLATFORMS", "PJRT_DEVICE")


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``state`` is "ok", "note" (worth knowing) or "broken" (backend='tpu' will fail)."""

    about: str
    state: str
    text: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
def doctor(as_json: bool) -> None:
    """What is installed, what will be used, and what is wrong.

    Opens the device and runs a small program on it. Exit status 1 if something is broken.
    """
    with progress("examining"):
        found = [finding for look in LOOKS for finding in look()]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found], indent=1))
    else:
        table(("about", "", "finding"), [(f.about, f.state, f.text) for f in found])
    sys.exit(any(finding.state == "broken" for finding in found))


# ---- what is installed


def versions() -> Iterator[Finding]:
    """This package, Python, and each requirement with the version that is here."""
    where = os.path.dirname(tpu_compile.__file__)
    yield Finding("tpu-compile", "ok", f"{tpu_compile.__version__}, Python {platform.python_version()}, in {where}")
    for requirement in requires("tpu-compile") or []:
        spec, _, marker = requirement.partition(";")
        name = re.split(r"[<>=!~ \[]", spec, maxsplit=1)[0]
        if "extra ==" not in marker:
            yield _requirement(name, spec.removeprefix(name).strip(), marker)
    for name, purpose in _OPTIONAL.items():
        installed = _version(name)
        yield Finding(name, "ok" if installed else "note", installed or f"not installed; {purpose}")


def _requirement(name: str, wanted: str, marker: str) -> Finding:
    installed = _version(name)
    if not installed:
        return Finding(name, "note" if marker else "broken", f"not installed; pip install '{name}{wanted}'")
    if not satisfies(installed, wanted):
        return Finding(name, "broken", f"{installed}, and {wanted} is needed: pip install '{name}{wanted}'")
    return Finding(name, "ok", installed)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def satisfies(installed: str, wanted: str) -> bool:
    """Whether a release fulfils ``>=a,<b``; what follows its numbers (``+cpu``, ``rc1``) does not count."""
    have = _numbers(installed)
    for clause in filter(None, wanted.split(",")):
        operator, limit = clause.strip()[:2].rstrip("0123456789"), _numbers(clause)
        if not {"<": have < limit, ">=": have >= limit, "==": have == limit, "!=": have != limit}[operator]:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    found = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def rivals() -> Iterator[Finding]:
    """Other packages that want the same names or the same chip."""
    for name, advice in _RIVALS.items():
        if importlib.util.find_spec(name) is not None:
            yield Finding(name, "note", f"is installed: {advice}")


def backends() -> Iterator[Finding]:
    """Whether torch finds this package under both of its names."""
    import torch._dynamo

    known = torch._dynamo.list_backends(exclude_tags=None)
    for name in ("tpu", "tpu_compile"):
        points = entry_points(group="torch_dynamo_backends", name=name)
        others = sorted({point.value for point in points} - {"tpu_compile.backend:tpu"})
        if others:
            yield Finding(
                f"backend {name!r}",
                "broken" if name == "tpu_compile" else "note",
                f"also claimed by {', '.join(others)}",
            )
        elif name in known and points:
            yield Finding(f"backend {name!r}", "ok", "torch.compile finds it")
        else:
            yield Finding(
                f"backend {name!r}", "broken", "torch does not find it: install the package anew (pip install .)"
            )


# ---- what will be used


def device() -> Iterator[Finding]:
    """The plugins there are, the platform chosen and why, and a program run on it."""
    from tpu_compile.runtime.plugin import default_platform, installed_plugins, tpu_attached

    for plugin in installed_plugins():
        yield Finding(
            "PJRT plugin", "ok", f"{plugin.name} {plugin.version}, {plugin.how}{plugin.path and ': ' + plugin.path}"
        )
    chosen = config.platform or default_platform()
    attached = "a TPU is attached" if tpu_attached() else "no TPU is attached"
    why = f"from {origin(KNOBS['platform'])}" if config.platform else attached
    yield Finding("platform", "ok", f"{chosen} ({why})")
    try:
        yield Finding("device", "ok", _try_device())
    except (TpuCompileError, ImportError) as error:
        yield Finding("device", "broken", str(error))


def _try_device() -> str:
    import torch

    from tpu_compile.compiler import runtime

    client, unit = runtime.client, torch.eye(2, device="cpu")
    start = time.perf_counter()
    with tpu_compile.override(cache=False):
        result = tpu_compile.trace(lambda x: x @ x + 1, unit).lower().compile()(unit)
    took = time.perf_counter() - start
    if not torch.equal(result, unit + 1):
        raise TpuCompileError(f"{client.device_kind} computed I·I + 1 = {result.tolist()}")
    return f"{client.device_kind}: a small program is right, in {took:.1f} s"


def torch_device() -> Iterator[Finding]:
    """Whether torch knows the device "tpu", or why not."""
    import torch  # noqa: F401 -- which loads it

    from tpu_compile.device.autoload import load

    if load.enabled:
        yield Finding("device 'tpu'", "ok", "known to torch from its import on (TPU_COMPILE_AUTOLOAD=0: not)")
    else:
        yield Finding("device 'tpu'", "note", f"torch does not know it: {load.reason}")


def cache() -> Iterator[Finding]:
    """Where the cache is, whether it can be used, and what it holds."""
    from tpu_compile.cache import CacheStore

    if not config.cache:
        yield Finding("cache", "note", f"off (from {origin(KNOBS['cache'])})")
        return
    try:
        figures = CacheStore().stats()
    except (TpuCompileError, OSError) as error:
        yield Finding("cache", "note", f"cannot be used, so that every process compiles anew: {error}")
        return
    folder = figures.directory
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(nearest, os.W_OK):
        yield Finding("cache", "note", f"{folder} cannot be written: TPU_COMPILE_CACHE_DIR moves it")
        return
    cap = size(figures.max_size) if figures.max_size else "no cap"
    text = f"{folder}: {figures.entries} entries, {size(figures.bytes)} of {cap}, {figures.hits} hits"
    yield Finding("cache", "ok", text)


def settings() -> Iterator[Finding]:
    """Knobs that are not at their defaults, and other programs' variables that change what XLA does."""
    for knob in KNOBS.values():
        if value(knob) != knob.default:
            yield Finding(f"knob {knob.name}", "note", f"{shown(value(knob))} (from {origin(knob)})")
    for name in _VARIABLES:
        if environment(name):
            yield Finding(name, "note", environment(name))


LOOKS = (versions, rivals, backends, device, torch_device, cache, settings)
