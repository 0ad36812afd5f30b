"""A Program as JSON values beside its bytecode: no pickle, and exact.

Every field is written by its values' types, so that a field which is added to Program is recorded too. Tensor constants
are not: the graph has them, and the record says which of the graph's constants they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from tpu_compile.lowering.program import HostCheck, Program, Result, TensorSpec

_BESIDE = ("name", "bytecode")


class NotRecordable(Exception):
    """The program holds something that JSON cannot say exactly."""


def dump(program: Program, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The program without its name and bytecode. ``tensors``: where its constants are found again, by identity.

    Raises:
        NotRecordable: a result or a check is of a kind that has no record.
    """
    names = [field.name for field in fields(Program) if field.name not in _BESIDE]
    return {name: _write(getattr(program, name), tensors) for name in names}


def load(record: Mapping[str, Any], name: str, bytecode: bytes, tensors: Sequence[torch.Tensor]) -> Program:
    """The program that ``dump`` was given.

    Raises:
        KeyError, TypeError, ValueError, IndexError, AttributeError: it is not what ``dump`` gives.
    """
    return Program(name=name, bytecode=bytecode, **{field: _read(value, tensors) for field, value in record.items()})


def _write(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is tuple:
        return [_write(item, tensors) for item in value]
    if isinstance(value, torch.Tensor):
        return {"tensor": _place(value, tensors)}
    if type(value) not in _TAGS:
        raise NotRecordable(f"a value of type {type(value).__name__}")
    tag, take_apart = _TAGS[type(value)]
    return {tag: _write(take_apart(value), tensors)}


def _read(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_read(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return tensors[content] if tag == "tensor" else _READERS[tag](_read(content, tensors))


def _place(t: torch.Tensor, tensors: Sequence[torch.Tensor]) -> int:
    for place, known in enumerate(tensors):
        if known is t:
            return place
    raise NotRecordable("a constant that is not the graph's")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _check(function: Any) -> tuple[str, tuple[Any, ...]]:
    """What looks at a result after the call: an aten operator with fixed keywords."""
    name = getattr(getattr(function, "func", None), "__name__", "")
    if isinstance(function, partial) and not function.args and getattr(torch.ops.aten, name, None) is function.func:
        return name, tuple(function.keywords.items())
    raise NotRecordable(f"a check by {function}")


_TAGS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    float: ("float", float.hex),
    TensorSpec: ("spec", lambda s: (s.shape, str(s.dtype).removeprefix("torch."), s.stride)),
    Result: ("result", lambda r: tuple([getattr(r, field.name) for field in fields(Result)])),
    HostCheck: ("check", lambda c: (c.result, *_check(c.function))),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "spec": lambda s: TensorSpec(s[0], _dtype(s[1]), s[2]),
    "result": lambda r: Result(*r),
    "check": lambda c: HostCheck(c[0], partial(getattr(torch.ops.aten, c[1]), **dict(c[2]))),
}
