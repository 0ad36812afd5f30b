"""Kernels as Dynamo must see them: not at all.

Where a graph breaks, torch runs the rest of a user's function with Dynamo still watching, and every Python frame below
it, the kernels of this device included, would be traced and compiled as if the user had written it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # this frame, and all that it calls


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which Dynamo and whatever it calls from here on leave alone. It costs a call nothing."""
    set_code_exec_strategy(inspect.unwrap(function).__code__, _ALONE)
    return function


def implement(library: torch.library.Library, name: str, function: Callable[..., Any], key: str) -> None:
    """``library.impl`` for a kernel written in Python."""
    library.impl(name, untraced(function), key)
