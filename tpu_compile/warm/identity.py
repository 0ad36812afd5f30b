"""What Dynamo's guards looked at, in words that another process can check.

torch leaves guards on functions, classes and modules, which compare addresses, out of an artifact. And it makes the
others anew where it is loaded, from values that it finds there if the way to them leads through a class, a function or
a module: such a guard holds whatever the value is. So each guard is also kept as an expression and what that stood
for, which is compared when the artifact is loaded; after that torch's guards see what changes. A guard on the identity
of an object without a name has no words.
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

from tpu_compile.warm.structure import NotKept

_BY_ADDRESS = frozenset(torch_guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
_BUILTINS = re.compile(r"G\['__builtins_dict__\w*'\]")
"""Dynamo's name for the builtins, which it puts among a function's globals."""
_BY_ID = re.compile(r"G\['(\w*_\d+_c\d+)'\]")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


class Guards:
    """Dynamo's guard filter for an artifact.

    Attributes:
        seen: expression → what it must stand for.
        types: of every value that a guard looks at.
        unspeakable: the first guard that neither torch nor ``seen`` can write down; empty if there is none.
    """

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.types: set[type] = set()
        self.unspeakable = ""

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        return [self._keep(entry) for entry in entries]

    def _keep(self, entry: Any) -> bool:
        by_address = bool(_BY_ADDRESS.intersection((entry.guard_type, *entry.derived_guard_types)))
        if entry.has_value:
            self.types.add(entry.value if isinstance(entry.value, type) else type(entry.value))
            self.seen[_BUILTINS.sub("BUILTINS", entry.orig_guard.name)] = words(entry.value)
        if by_address and (not entry.has_value or describe(entry.value) is None):
            self.unspeakable = self.unspeakable or f"{entry.guard_type} on {entry.name}"
        return not by_address


def installed(seen: Mapping[str, str], f_globals: Mapping[str, Any]) -> dict[str, str]:
    """Modules that Dynamo put among a function's globals, under names that hold their address: name → module.

    Raises:
        NotKept: a guard leads through something else that has such a name.
    """
    names = {name for expression in seen for name in _BY_ID.findall(expression)}
    for name in names:
        if not isinstance(f_globals.get(name), types.ModuleType):
            raise NotKept(
                f"a guard leads through a {type(f_globals.get(name)).__name__} that Dynamo holds by its address"
            )
    return {name: f_globals[name].__name__ for name in names}


def broken(seen: Mapping[str, str], f_locals: Mapping[str, Any], f_globals: Mapping[str, Any]) -> str:
    """The first expression that stands for something else than it did; empty if none does."""
    scope = {"L": f_locals, "G": f_globals, "BUILTINS": vars(builtins)}
    names = torch_guards._get_closure_vars()
    for expression, then in seen.items():
        try:
            now = words(eval(expression, scope, names))
        except (AttributeError, KeyError, IndexError, NameError, TypeError) as error:
            now = f"{type(error).__name__}: {error}"
        if now != then:
            return f"{expression} is {now}, was {then}"
    return ""


def words(value: Any) -> str:
    """What a guard can have looked at: an object by its name, a tensor by its layout, a container by its size and keys,
    anything else by its class."""
    named = describe(value)
    if named is not None:
        return named
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        strides = tuple(value.stride()) if value.layout is torch.strided else value.layout
        return f"{kind} {value.dtype}{tuple(value.shape)} {strides} {value.device} {value.requires_grad}"
    if isinstance(value, dict):
        return f"{kind} of {[describe(key) for key in dict.keys(value)]}"
    return f"{kind} of {len(value)}" if type(value) in (list, tuple, set, frozenset, torch.Size) else kind


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
