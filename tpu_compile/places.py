"""Where an op of a graph comes from, as its user knows it: a line, or the module that stands for one."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

from tpu_compile.lowering.gaps import where


def place(node: Node) -> str:
    """``file:line code`` (the file relative to the current folder, if it lies there), or ``layers.0.linear (Linear)``
    for an op that no line of the user's calls: torch's containers call their modules themselves."""
    line, module = where(node), _module(node)
    if line is None or (module and line.file.startswith(torch.__path__[0])):
        return module
    return f"{_relative(line.file)}:{line.line} {line.code.strip()}"


def _module(node: Node) -> str:
    """The module that an op, or the op whose gradient it computes, belongs to."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    named = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    within = re.sub(r"^L\['\w+'\]\.?", "", named)
    return f"{within or 'the model'} ({getattr(kind, '__name__', str(kind).rpartition('.')[2])})"


def _relative(file: str) -> str:
    here = Path.cwd()
    return str(Path(file).relative_to(here)) if Path(file).is_relative_to(here) else file
