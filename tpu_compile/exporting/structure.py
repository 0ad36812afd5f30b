"""How arguments and results nest, as JSON: torch's own form of it names Python classes, which a reader need not have.

A tree's leaves are numbered in order. Tuples, lists, dicts and named tuples are rebuilt as such; any other container
that torch can take apart and that has names for its parts (dataclasses, the outputs of Hugging Face's models) becomes
a ``Record``.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch.utils import _pytree as pytree

from tpu_compile.errors import BadCall, ExportError

Tree = Any
"""None (a leaf), or ``[kind, keys or None, children, name]``."""


class Record(dict[str, Any]):
    """A result with named parts: ``r["hidden"]``, ``r.hidden``, and by position, ``r[0]``."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"this result has no {name!r}; it has {', '.join(self)}")
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)


def describe(spec: Any) -> Tree:
    """A torch TreeSpec as a tree.

    Raises:
        ExportError: a container whose parts have no names.
    """
    if spec.is_leaf():
        return None
    children = [describe(child) for child in spec.children()]
    kind, context = spec.type, spec.context
    if kind in (dict, OrderedDict):
        return [kind.__name__, [_key(k) for k in context], children, ""]
    if kind is namedtuple:
        return ["namedtuple", list(context._fields), children, context.__name__]
    if issubclass(kind, (tuple, list)):  # torch.Size and what torch.max returns are tuples too
        return ["list" if issubclass(kind, list) else "tuple", None, children, ""]
    names = _names(kind, context, len(children))
    if names is None:
        raise ExportError(
            f"a {kind.__name__} among the model's arguments or results has no names for its parts, so that a file "
            "cannot describe it. Take or return a tuple, a list, a dict, a named tuple or a dataclass."
        )
    return ["record", names, children, kind.__name__]


def _key(key: Any) -> str | int:
    if type(key) in (str, int):
        return key  # type: ignore[no-any-return]
    raise ExportError(f"a dict among the model's arguments or results has the key {key!r}; only str and int are kept")


def _names(kind: type, context: Any, count: int) -> list[str] | None:
    """The names of a container's parts, if its context gives one for each (and perhaps names of absent ones)."""
    for found in (context, *(context if isinstance(context, (tuple, list)) else ())):
        if isinstance(found, (tuple, list)) and len(found) == count and all(isinstance(n, str) for n in found):
            return list(found)
    return None


def build(tree: Tree, leaves: Iterator[Any]) -> Any:
    """The nested value whose leaves come from the iterator, in order."""
    if tree is None:
        return next(leaves)
    kind, keys, children, name = tree
    parts = [build(child, leaves) for child in children]
    return _BUILDERS[kind](keys, parts, name)


def flatten(tree: Tree, value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a value that is nested like the tree, each with what the user would call it.

    Raises:
        BadCall: it is nested otherwise.
    """
    if tree is None:
        yield where, value
        return
    kind, keys, children, _ = tree
    if kind in ("tuple", "list"):
        parts: Sequence[Any] = value if isinstance(value, (tuple, list)) else ()
        steps: list[Any] = [f"[{i}]" for i in range(len(children))]
    else:
        parts = _values(value, keys)
        steps = [f"[{key!r}]" for key in keys]
    if len(parts) != len(children):
        raise BadCall(f"{where} is {_said(value)}; the program takes {_wanted(tree)}", "INVALID_ARGUMENT")
    for child, part, step in zip(children, parts, steps, strict=True):
        yield from flatten(child, part, where + step)


def _values(value: Any, keys: Sequence[Any]) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return [value[key] for key in keys] if set(value) == set(keys) else ()
    if isinstance(value, (str, bytes, int, float)) or value is None:
        return ()
    return [getattr(value, key) for key in keys if isinstance(key, str) and hasattr(value, key)]


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _wanted(tree: Tree) -> str:
    kind, keys, children, name = tree
    return f"a {kind} of {len(children)}" if keys is None else f"a {name or kind} with keys {keys}"


def _named(keys: Sequence[str], parts: Sequence[Any], name: str) -> Any:
    return _named_tuple(name, tuple(keys))(*parts)


@lru_cache(maxsize=256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


_BUILDERS: dict[str, Callable[[Any, list[Any], str], Any]] = {
    "tuple": lambda _, parts, __: tuple(parts),
    "list": lambda _, parts, __: parts,
    "dict": lambda keys, parts, _: dict(zip(keys, parts, strict=True)),
    "OrderedDict": lambda keys, parts, _: OrderedDict(zip(keys, parts, strict=True)),
    "namedtuple": _named,
    "record": lambda keys, parts, _: Record(zip(keys, parts, strict=True)),
}


def check(tree: Tree) -> int:
    """The number of leaves of a tree from a file.

    Raises:
        ValueError: it is none.
    """
    if tree is None:
        return 1
    kind, keys, children, name = tree
    named = kind not in ("tuple", "list")
    if kind not in _BUILDERS or type(name) is not str or (keys is not None) != named:
        raise ValueError(f"{kind!r} is no container")
    if named and len(keys) != len(children):
        raise ValueError("a container with as many names as parts was expected")
    if kind == "namedtuple":
        _named_tuple(name, tuple(keys))
    return sum(check(child) for child in children)


def tree_of(value: Any) -> Tree:
    """The tree of a nested value.

    Raises:
        ExportError: see ``describe``.
    """
    return describe(pytree.tree_structure(value))
