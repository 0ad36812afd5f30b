"""Whether the Python that Dynamo traced is what it was: module by module, by its syntax tree.

Comments, docstrings, blank lines and a move of the file change nothing. Whole modules count, not the traced functions
alone: a method that is added to a class can take the place of an inherited one. torch, Python's own library and this
package are in the key of whatever is kept, and not looked at here.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpu_compile.warm import process

_IN_THE_KEY = frozenset({"torch", "tpu_compile", *sys.stdlib_module_names}) - {"__main__"}

_CLOCKS = 1.0
"""Seconds by which a file's clock may differ from the process's. Nothing is imported in the first second."""

Digests = Mapping[str, Sequence[str]]
"""Module → SHA-256 of its text, and of its syntax tree."""


class Unrecordable(Exception):
    """A module has changed on disk since it was imported: what was traced is not what is there."""


def digests(modules: Iterable[str]) -> dict[str, list[str]]:
    """What ``changed`` compares with. Modules without Python source are left out.

    Raises:
        Unrecordable: a file is newer than this process.
    """
    found = {}
    for module in sorted(set(modules)):
        path = _file(module)
        if path is None:
            continue
        if path.stat().st_mtime > process.started() + _CLOCKS:
            raise Unrecordable(f"{path} has changed since this process started")
        text = path.read_bytes()
        found[module] = [_sha(text), _sha(_meaning(text))]
    return found


def changed(then: Digests) -> str:
    """The first module whose code differs from what it was; empty if none does."""
    return next((module for module, (text, tree) in then.items() if not _same(module, text, tree)), "")


def modules_of(types: Iterable[type]) -> set[str]:
    """The modules of classes and of all that they inherit from."""
    return {base.__module__ for cls in types for base in cls.__mro__}


def _same(module: str, text: str, tree: str) -> bool:
    path = _file(module)
    if path is None:
        return False
    now = path.read_bytes()
    return _sha(now) == text or _sha(_meaning(now)) == tree


def _file(module: str) -> Path | None:
    if module.partition(".")[0] in _IN_THE_KEY:
        return None
    loaded = sys.modules.get(module)
    try:
        name: Any = inspect.getsourcefile(loaded) if loaded is not None else getattr(find_spec(module), "origin", None)
    except (TypeError, ImportError, ValueError):  # it is built in, or gone
        return None
    path = Path(name) if name else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _meaning(text: bytes) -> bytes:
    """A module's syntax tree without positions and docstrings."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return text
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            assert body, "a docstring is in a body"
            del body[0]
    return ast.dump(tree).encode("utf-8", "surrogatepass")


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
