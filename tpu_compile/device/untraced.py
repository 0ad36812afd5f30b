"""Kernels as Dynamo must see them: not at all.

Where a graph breaks, torch runs the rest of a user's function with Dynamo still watching, and every Python frame below
it, the kernels of this device included, would be traced and compiled as if the user had written it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # this frame, and all that it calls


def untraced(function: _Function) -> _Function:
    """The same function, which Dynamo and whatever it calls from here on leave alone. It costs a call nothing."""
    set_code_exec_strategy(inspect.unwrap(function).__code__, _ALONE)
    return function


def outside_graphs(function: _Function) -> _Function:
    """The same function, for which a compiled function breaks its graph instead of tracing into it: it acts on the
    device, or its answer changes from call to call."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it acts on the device: call it outside the graph"  # type: ignore[attr-defined]
    return untraced(function)


def implement(library: torch.library.Library, name: str, function: Callable[..., Any], key: str) -> None:
    """``library.impl`` for a kernel written in Python."""
    library.impl(name, untraced(function), key)
