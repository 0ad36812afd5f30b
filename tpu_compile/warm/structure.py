"""What a user hands to ``tpu_compile.aot``, in words: what names it, what it is made of, and why it may not be kept."""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


class NotKept(Exception):
    """Why something cannot be compiled ahead of time."""


def name(model: Callable[..., Any]) -> str:
    """For messages and listings."""
    if isinstance(model, torch.nn.Module):
        return type(model).__name__
    return str(getattr(model, "__qualname__", type(model).__name__)).replace("<locals>.", "")


def unbound(model: Callable[..., Any]) -> tuple[types.FunctionType, tuple[Any, ...]]:
    """The function that a call of ``model`` runs, and what it takes before the caller's arguments.

    Raises:
        NotKept: there is no such function, or more than it runs.
    """
    if isinstance(model, torch.nn.Module) and type(model).__call__ is not torch.nn.Module.__call__:
        raise NotKept(f"{type(model).__name__} has a __call__ of its own")
    function: Any = model.forward if isinstance(model, torch.nn.Module) else model
    first: tuple[Any, ...] = ()
    if inspect.ismethod(function):
        function, first = function.__func__, (function.__self__,)
    if not isinstance(function, types.FunctionType):
        raise NotKept(f"{name(model)} is no Python function")
    for path, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if hooked(module):
            raise NotKept(f"{path or name(model)} has hooks")
    return function, first


def hooked(model: Any) -> bool:
    """Whether a call of a module runs more than its ``forward``."""
    if not isinstance(model, torch.nn.Module):
        return False
    return any(getattr(model, f"_{hooks}") or getattr(torch_module, f"_global_{hooks}") for hooks in _HOOKS)


def describe(model: Any) -> str:
    """A digest of a module's submodules, parameters and buffers, without their values. Empty for a function."""
    if not isinstance(model, torch.nn.Module):
        return ""
    return hashlib.sha256("\n".join(_lines(model)).encode("utf-8", "surrogatepass")).hexdigest()


def _lines(model: torch.nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        kind = type(module)
        yield f"{path}: {kind.__module__}.{kind.__qualname__} training={module.training}"
        for what, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, t in tensors.items():
                yield f"{path} {what} {key}: {_tensor(t) if t is not None else None}"


def types_of(model: Any) -> set[type]:
    """The classes of a module's submodules."""
    return set(map(type, model.modules())) if isinstance(model, torch.nn.Module) else set()


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Example arguments: tensors by type and layout, plain values by themselves; of others their class alone."""
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return "; ".join([*map(_leaf, leaves), str(tree)])


def _leaf(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    return repr(value) if isinstance(value, _CONSTANTS) else f"{type(value).__module__}.{type(value).__qualname__}"


def _tensor(t: torch.Tensor) -> str:
    grad = " grad" if t.requires_grad else ""
    marks = sorted(getattr(t, "_dynamo_dynamic_indices", ()))
    return f"{type(t).__name__} {t.dtype}{list(t.shape)} {t.device} {_strides(t)}{grad}{marks or ''}"


def _strides(t: torch.Tensor) -> str:
    return str(list(t.stride())) if t.layout is torch.strided else str(t.layout)


def mode() -> str:
    """The modes that decide what is traced."""
    casts = [kind for kind in ("cpu", torch._C._get_privateuse1_backend_name()) if torch.is_autocast_enabled(kind)]
    dtypes = [str(torch.get_autocast_dtype(kind)) for kind in casts]
    return f"grad={torch.is_grad_enabled()} inference={torch.is_inference_mode_enabled()} autocast={casts}{dtypes}"
