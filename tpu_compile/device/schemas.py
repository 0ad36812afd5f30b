"""What an overload's schema says about a call: which arguments it writes, which results are those arguments, and which
numbers may be data of its program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

LIFTED = {
    "add": ("other", "alpha"),
    "sub": ("other", "alpha"),
    "rsub": ("other", "alpha"),
    "mul": ("other",),
    "div": ("other",),
    "addcmul": ("value",),
    "addcdiv": ("value",),
    "lerp": ("weight",),
    "fill": ("value",),
    "full": ("fill_value",),
    "full_like": ("fill_value",),
    "masked_fill": ("value",),
    "clamp": ("min", "max"),
    "clamp_min": ("min",),
    "clamp_max": ("max",),
    "remainder": ("other",),
    "fmod": ("other",),
    "floor_divide": ("other",),
    "eq": ("other",),
    "ne": ("other",),
    "lt": ("other",),
    "le": ("other",),
    "gt": ("other",),
    "ge": ("other",),
    "scalar_tensor": ("s",),
}
"""Operators whose rules take these numbers as values too: a number that changes from call to call does not recompile.
Foreach and in-place forms follow."""
_ALSO = {
    "_foreach_add": ("scalar", "scalars", "alpha"),
    "_foreach_sub": ("scalar", "scalars", "alpha"),
    "_foreach_mul": ("scalar", "scalars"),
    "_foreach_div": ("scalar", "scalars"),
    "_foreach_addcmul": ("value", "scalars"),
    "_foreach_addcdiv": ("value", "scalars"),
    "_foreach_lerp": ("weight",),
    "_foreach_clamp_min": ("scalar", "scalars"),
    "_foreach_clamp_max": ("scalar", "scalars"),
    "_foreach_maximum": ("scalar", "scalars"),
    "_foreach_minimum": ("scalar", "scalars"),
    "_fused_adam": ("lr",),
    "_fused_adamw": ("lr",),
    "_fused_sgd": ("lr",),
    "_fused_adagrad": ("lr",),
}


@dataclass(frozen=True)
class Schema:
    """``lifts`` answers for a position or a name whether a number there is data. ``written`` names the arguments that
    the op overwrites; ``returned`` has one entry for each result: the argument it is, or None for a new tensor."""

    op: OpOverload
    names: tuple[str, ...]
    lifts: dict[Any, bool]
    written: tuple[str, ...]
    outs: tuple[str, ...]
    returned: tuple[str | None, ...]
    draws: bool

    @property
    def base(self) -> str:
        return base_name(self.op)

    def argument(self, name: str, args: Any, kwargs: Any) -> Any:
        """The argument called ``name`` of a call, None if it was left out."""
        if name in kwargs:
            return kwargs[name]
        at = self.names.index(name)
        return args[at] if at < len(args) else None


def base_name(op: OpOverload) -> str:
    """``add`` for ``aten::add_.Tensor``."""
    name = op._schema.name.split("::")[1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@cache
def schema_of(op: OpOverload) -> Schema:
    """What the schema of ``op`` says."""
    arguments = op._schema.arguments
    liftable = {**LIFTED, **_ALSO}.get(base_name(op), ())
    lifts: dict[Any, bool] = {a.name: True for a in arguments if a.name in liftable}
    lifts.update({i: True for i, a in enumerate(arguments) if a.name in liftable and not a.kwarg_only})
    # A list that is written names no alias set: its overloads return nothing.
    written = [a for a in arguments if a.alias_info and a.alias_info.is_write]
    writes = {s: a.name for a in written if a.alias_info for s in a.alias_info.before_set}
    returned = tuple(_source(r, writes) for r in op._schema.returns)
    return Schema(
        op=op,
        names=tuple(a.name for a in arguments),
        lifts=lifts,
        written=tuple(a.name for a in written),
        outs=tuple(a.name for a in arguments if a.is_out),
        returned=returned,
        draws=torch.Tag.nondeterministic_seeded in op.tags,
    )


def _source(result: Any, writes: dict[str, str]) -> str | None:
    if result.alias_info is None:
        return None
    return next((writes[s] for s in result.alias_info.before_set if s in writes), None)


def is_view(op: OpOverload) -> bool:
    """Whether a result shares memory with an argument that the op does not write."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
