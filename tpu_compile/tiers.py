"""How each aten overload is lowered, from the registry and the schemas: ``tpu-compile ops``, and the coverage table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_compile.lowering.decompositions import decompositions
from tpu_compile.lowering.gaps import ASSERTIONS
from tpu_compile.lowering.random import keyed_ops
from tpu_compile.lowering.registry import registry

TIERS = {
    "native": "a rule that writes StableHLO",
    "jnp": "a rule written in jax.numpy",
    "torch-mlir": "lowered by torch-mlir, in a worker process",
    "decomposed": "torch takes it apart; its parts have tiers of their own",
    "eager": "runs on the CPU between compiled parts; an error under fullgraph=True",
}


@dataclass(frozen=True)
class OpTier:
    """One overload. ``through`` says which rule, or what it becomes first."""

    op: str
    tier: str
    through: str


def all_tiers() -> list[OpTier]:
    """Every aten overload of this torch, by name."""
    return [tier_of(op) for op in overloads()]


def overloads() -> list[OpOverload]:
    """Every aten overload of this torch, by name."""
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    return [_overload(name.removeprefix("aten::")) for name in names]


def _overload(name: str) -> OpOverload:
    base, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, base), overload or "default")
    return found


@cache
def tier_of(op: OpOverload) -> OpTier:
    """The tier of one overload, for arguments that its rule accepts."""
    rule = registry.get(op)
    if rule is not None:
        family = rule.function.__module__.removeprefix("tpu_compile.").replace(".", "/")
        return OpTier(str(op), rule.tier, f"{family}.py")
    if op in keyed_ops():
        return _through(op, keyed_ops()[op])
    if op in ASSERTIONS:
        return OpTier(str(op), "native", "checked while tracing; computes nothing")
    twin = functional_twin(op) if op._schema.is_mutable else None
    if twin is not None:
        return _through(op, twin)
    if op in decompositions() or _is_composite(op):
        return OpTier(str(op), "decomposed", "torch's decomposition")
    return OpTier(str(op), "eager", "")


def _through(op: OpOverload, other: OpOverload) -> OpTier:
    return OpTier(str(op), tier_of(other).tier, f"as {other}")


def _is_composite(op: OpOverload) -> bool:
    name = f"{op._schema.name}.{op._schema.overload_name}".rstrip(".")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def functional_twin(op: OpOverload) -> OpOverload | None:
    """What functionalization makes of an in-place or ``out=`` overload: the same computation, writing nothing."""
    base, overload = op._schema.name.removeprefix("aten::"), op._schema.overload_name
    wanted = [_kind(a) for a in op._schema.arguments if not a.is_out]
    for packet in _packets(base):
        same = getattr(packet, overload or "default", None)
        others = [getattr(packet, name) for name in packet.overloads()]
        for other in (same, *others):
            if other is not None and not other._schema.is_mutable and _kinds(other) == wanted:
                return other  # type: ignore[no-any-return]
    return None


def _packets(base: str) -> list[Any]:
    """Packets that may hold the functional form of ``base``: its own (``out=``), or the one without the underscore."""
    names = [base] if not base.endswith("_") or base.endswith("__") else [base[:-1], f"{base[:-1]}_functional"]
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


def _kinds(op: OpOverload) -> list[str]:
    return [_kind(argument) for argument in op._schema.arguments]


def _kind(argument: Any) -> str:
    return str(argument.type)
