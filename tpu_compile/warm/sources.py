"""Which code lowers a graph here: our own sources and the libraries they stand on, and rules that others registered."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tpu_compile.lowering.registry import registry

_LIBRARIES = ("jax", "jaxlib", "ml_dtypes", "numpy", "torch-mlir")


@functools.cache
def digest() -> str:
    """SHA-256 over every source file of this package, as they were when this process first asked. It asks before its
    first lowering."""
    return _read()


def unchanged() -> bool:
    """Whether the files still are what ``digest`` stands for: a module that is imported later runs as it is then."""
    return _read() == digest()


def _read() -> str:
    total = hashlib.sha256()
    for name, path in sorted(_files()):
        text = path.read_bytes()
        total.update(f"{name}\0{len(text)}\0".encode() + text)
    return total.hexdigest()


def _files() -> Iterator[tuple[str, Path]]:
    """Dotted-path name and file of every module; the folders of an editable install lie apart."""
    for package in ("tpu_compile", "tpu_compile.lowering", "tpu_compile.runtime", "tpu_compile.cache"):
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations, f"{package} is a package of ours"
        for folder in map(Path, spec.submodule_search_locations):
            for path in folder.rglob("*.py"):
                yield f"{package}/{path.relative_to(folder).as_posix()}", path


@functools.cache
def libraries() -> str:
    """The versions that decide what a rule builds, as words for a key part."""
    words = [f"python={platform.python_version()}", f"torch={torch.__version__}+{torch.version.git_version}"]
    return " ".join([*words, *(f"{name}={_version(name)}" for name in _LIBRARIES)])


def _version(name: str) -> str:
    """Of the module in this process, if it is: an upgrade on disk does not reach it. Nothing is imported."""
    loaded = getattr(sys.modules.get(name.replace("-", "_")), "__version__", None)
    try:
        return str(loaded or version(name))
    except PackageNotFoundError:
        return "absent"


def foreign_rules() -> frozenset[str]:
    """Names of the operators whose rules are not ours. What such a rule does is decided by code that we cannot name."""
    return frozenset(str(op) for op, rule in registry.registered() if not _ours(rule.function))


def _ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("tpu_compile.")
