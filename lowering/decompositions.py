"""Which aten ops AOTAutograd takes apart before we see them. Everything that has a rule of ours stays whole; the
exceptions are listed, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions

from tpu_compile.lowering.composites import COMPOSITES
from tpu_compile.lowering.determinants import DETERMINANTS
from tpu_compile.lowering.foreach import list_decompositions
from tpu_compile.lowering.recurrent import RECURRENT
from tpu_compile.lowering.registry import registry

aten = torch.ops.aten

ALSO_DECOMPOSED: tuple[Any, ...] = (
    aten.rrelu_with_noise_backward,  # to a product, or leaky_relu_backward
)
"""Packets beyond torch's core list, for which torch has a decomposition."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's core decompositions without those of ops that have a rule, registered up to now."""
    return _without(frozenset(registry))


@lru_cache(maxsize=2)
def _without(ruled: frozenset[Any]) -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        **_core_aten_decompositions_post_autograd(),
        **get_decompositions(ALSO_DECOMPOSED),
        **COMPOSITES,
        **DETERMINANTS,
        **list_decompositions(),
        **RECURRENT,
    }
    always = {overload for packet in ALSO_DECOMPOSED for overload in _overloads(packet)}
    for op in ruled - always:
        table.pop(op, None)
    return table


class WhenNeeded(Mapping[Any, Callable[..., Any]]):
    """``decompositions()`` for one run of AOTAutograd: where it need not trace, the rules' modules stay unimported."""

    @cached_property
    def _table(self) -> dict[Any, Callable[..., Any]]:
        return decompositions()

    def __getitem__(self, op: Any) -> Callable[..., Any]:
        return self._table[op]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]
