"""Guards that compare objects by identity, in words that another process can check.

torch writes down guards on values, types and tensors. Guards on functions, classes and modules compare addresses; it
leaves them out of an artifact. Here each of them becomes an expression and the name of what it stood for: a function
that somebody replaced is noticed when the artifact is loaded. A guard on any other object's identity has no words.
"""

from __future__ import annotations

import builtins
import enum
import hashlib
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import guards as torch_guards

_BY_ADDRESS = frozenset(torch_guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
_BUILTINS = re.compile(r"G\['__builtins_dict__\w*'\]")
"""Dynamo's name for the builtins, which it puts among a function's globals."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


class Guards:
    """Dynamo's guard filter for an artifact.

    Attributes:
        identities: expression → what it must stand for.
        types: of every value that a guard looks at.
        unspeakable: the first guard that neither torch nor ``identities`` can write down; empty if there is none.
    """

    def __init__(self) -> None:
        self.identities: dict[str, str] = {}
        self.types: set[type] = set()
        self.unspeakable = ""

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        return [self._keep(entry) for entry in entries]

    def _keep(self, entry: Any) -> bool:
        if entry.has_value:
            self.types.add(entry.value if isinstance(entry.value, type) else type(entry.value))
        if not _BY_ADDRESS.intersection((entry.guard_type, *entry.derived_guard_types)):
            return True
        words = describe(entry.value) if entry.has_value else None
        if words is None:
            self.unspeakable = self.unspeakable or f"{entry.guard_type} on {entry.name}"
        else:
            self.identities[_BUILTINS.sub("BUILTINS", entry.orig_guard.name)] = words
        return False


def broken(identities: Mapping[str, str], f_locals: Mapping[str, Any], f_globals: Mapping[str, Any]) -> str:
    """The first identity that does not hold; empty if all do."""
    scope = {"L": f_locals, "G": f_globals, "BUILTINS": vars(builtins)}
    names = torch_guards._get_closure_vars()
    for expression, words in identities.items():
        try:
            now = describe(eval(expression, scope, names))
        except (AttributeError, KeyError, IndexError, NameError, TypeError) as error:
            now = f"{type(error).__name__}: {error}"
        if now != words:
            return f"{expression} is {now}, was {words}"
    return ""


def describe(value: Any) -> str | None:
    """An object that code refers to by name, in words that are the same in every process; None if it is no such."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, types.CodeType):
        return f"code {value.co_qualname} {_code(value)}"
    if isinstance(value, types.MethodType):
        return describe(value.__func__)
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {_code(value.__code__)}"
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{type(value).__name__} {getattr(value, '__module__', '')}.{value.__qualname__}"
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"operator {value}"
    return None


def _code(code: types.CodeType) -> str:
    """A digest of what a code object does, wherever its source stands and whatever it says of itself."""
    total = hashlib.sha256()
    total.update(code.co_code)
    total.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode("utf-8", "surrogatepass"))
    for position, constant in enumerate(code.co_consts):
        if position == 0 and isinstance(constant, str | None):
            continue  # the docstring, or that there is none
        if isinstance(constant, types.CodeType):
            total.update(_code(constant).encode())
        elif not isinstance(constant, frozenset):  # its order is the process's own
            total.update(repr(constant).encode("utf-8", "surrogatepass"))
    return total.hexdigest()[:16]
