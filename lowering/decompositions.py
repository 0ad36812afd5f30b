"""Which aten ops AOTAutograd takes apart before we see them. Everything that has a rule of ours stays whole; the
exceptions are listed, with reasons."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions

from tpu_compile.lowering.determinants import DETERMINANTS
from tpu_compile.lowering.foreach import list_decompositions
from tpu_compile.lowering.registry import registry

aten = torch.ops.aten

ALSO_DECOMPOSED: tuple[Any, ...] = (
    aten.rrelu_with_noise_backward,  # to a product, or leaky_relu_backward
)
"""Packets beyond torch's core list, for which torch has a decomposition."""


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's core decompositions without those of ops that have a rule."""
    table: dict[Any, Callable[..., Any]] = {
        **_core_aten_decompositions_post_autograd(),
        **get_decompositions(ALSO_DECOMPOSED),
        **DETERMINANTS,
        **list_decompositions(),
    }
    always = {overload for packet in ALSO_DECOMPOSED for overload in _overloads(packet)}
    for op in registry:
        if op not in always:
            table.pop(op, None)
    return table


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]
